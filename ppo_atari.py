# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12.8", "optax>=0.2.6", "chex>=0.1.90", "numpy>=2.0", "envpool>=1.2.5",
#                 "tyro>=1.0", "tensorboardX>=2.6", "wandb>=0.22", "pillow>=11.0"]
# ///
"""PPO on Atari: synchronous rollouts, generalised advantage estimation, the clipped surrogate.

Paper: Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv 1707.06347). The settings are those of
the widely used implementations (4 epochs; the paper: 3, a value coefficient of 1, and epsilon annealed to 0), and so
are the details: orthogonal initialisation, Adam's epsilon 1e-5, the step size annealed, advantages normalised per
minibatch, gradients clipped, EnvPool's frames, rewards and lives. --clip-vloss is off: no gain is known.

    T steps in each of B environments ──> GAE with the critic ──> epochs x minibatches of SGD steps ──┐
          ▲     (EnvPool, policy)                                                                     │
          └──────────────────────────── the new parameters ───────────────────────────────────────────┘

Deliberately different, or absent:
  1. A time limit is not a death: it bootstraps. EnvPool's dummy row after an end is masked out of everything.
  2. A minibatch takes equally many rows of every environment, so that no row ever leaves its device.
  3. The critic evaluates a whole rollout before the update, with the parameters that played it, not step by step.
  4. No early stop at a target KL, no LSTM, no multi-discrete actions: not in the paper's Atari experiments.

What is not the algorithm (`Run`, `refuse`, `play`, `make_shardings`) is in the appendix, the same in every script.

    python ppo_atari.py --env-id Pong-v5                             one CPU or one GPU
    python ppo_atari.py --num-envs 64 --learner-devices 0 1 2 3      data-parallel learner on four devices
    python ppo_atari.py --distributed                                several hosts: the same command once on each
"""

import os
from importlib import metadata

# XLA's CPU backend runs convolutions on one core unless this fusion is off (3 to 4 times faster). An XLA that does not
# know a flag aborts, hence the versions. Your own XLA_FLAGS come last, so they win.
if metadata.version("jaxlib").startswith(("0.10.", "0.12.")) and "ynn_fusion" not in os.environ.get("XLA_FLAGS", ""):
    flags = "--xla_cpu_experimental_ynn_fusion_type=-individual_convolution", os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import chex
import envpool
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.training.train_state import TrainState


@dataclass(frozen=True)
class Args:
    """PPO on Atari. A step is an environment step: one decision of the agent, four Atari frames."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of environments, parameters and sampling
    total_timesteps: int = 10_000_000  # length of the run in environment steps, rounded down to whole rollouts
    runs_dir: str = "runs"  # folder that receives the run folder
    log_every: int = 10_000  # environment steps between two lines on the console and rows of metrics
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project_name: str = "ppo"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    save_model: bool = True  # write model.msgpack (parameters and arguments) at the end
    checkpoint_every: int = 100_000  # environment steps between two checkpoints
    resume: str | None = None  # run folder to continue, with its own settings
    eval_episodes: int = 10  # whole games to play at the end, in fresh environments, actions sampled (0: none)
    capture_video: bool = False  # write a GIF of one evaluated game

    # --- environment ---
    env_id: str = "Pong-v5"  # EnvPool's name of the game
    num_envs: int = 8  # B, environments of each process; a rollout of num_steps in each is a train batch
    frame_size: Literal[84, 42] = 84  # height and width of a frame in pixels (42: four times cheaper)
    episodic_life: bool = True  # a lost life ends a training episode (returns are always those of whole games)
    repeat_action_probability: float = 0.0  # probability that the emulator repeats the last action (sticky actions)
    max_episode_steps: int = 27_000  # time limit of a game in environment steps (27,000 = 108,000 frames)

    # --- algorithm ---
    network: Literal["shallow", "nature", "resnet"] = "nature"  # 2 convolutions + 256 units, 3 + 512, or 15 + 256
    learning_rate: float = 2.5e-4  # step size of Adam
    anneal_lr: bool = True  # lower the step size linearly to 0 over the planned SGD steps
    gamma: float = 0.99  # discount per environment step
    gae_lambda: float = 0.95  # lambda of GAE
    num_steps: int = 128  # T, environment steps of each environment in a rollout
    num_minibatches: int = 4  # SGD steps per epoch, each on an equal share of each environment's rows
    update_epochs: int = 4  # passes over each rollout
    clip_coef: float = 0.1  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # clip the value's change by epsilon too, as some implementations do
    norm_adv: bool = True  # normalise the advantages of each minibatch
    vf_coef: float = 0.5  # weight of the value loss (half the mean squared error)
    ent_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # bound of the gradient's global norm

    # --- system ---
    learner_devices: tuple[int, ...] = (0,)  # indices into the process's devices; the first one also acts
    distributed: bool = False  # call jax.distributed.initialize(): one process per host, the same command on each
    coordinator_address: str | None = None  # host:port of process 0, where JAX cannot find it itself
    num_processes: int | None = None  # number of processes, likewise
    process_id: int | None = None  # index of this process, likewise

    def __post_init__(self):
        fractions = "gamma gae_lambda repeat_action_probability"
        check_numbers(self, "seed eval_episodes vf_coef ent_coef process_id", fractions)
        if self.capture_video and not self.eval_episodes:
            refuse("--capture-video: films an evaluated game, so --eval-episodes must be above 0")
        if self.num_steps % self.num_minibatches:
            refuse(f"--num-steps {self.num_steps}: must be a multiple of --num-minibatches {self.num_minibatches}")


def check_numbers(args, may_be_0: str, fractions: str, **least: float):
    """Refuses numbers out of range: above 0 and at most a billion; fractions, 0 to 1; or as named here."""
    for name, x in vars(args).items():
        low, high = (0, 1) if name in fractions.split() else (least.get(name, 1e-12), 10**9)
        low = 0 if name in may_be_0.split() else low
        if type(x) in (int, float) and not low <= x <= high:  # NaN does not hold either
            at_least = "above 0" if 0 < low < 1 else f"at least {low}"
            refuse(f"--{name.replace('_', '-')} {x}: must be {at_least} and at most {high:,}")


# --- environment ------------------------------------------------------------------------------------------------------
def make_env(args: Args, num_envs: int, entropy: tuple[int, ...], render: bool = False):
    """EnvPool's vector of one Atari game: observations `[num_envs, 4, frame, frame]` uint8, the oldest frame first. Its
    seeds are drawn from `entropy`, since with seed + i two runs of neighbouring seeds would share nearly all games."""
    if args.env_id not in envpool.list_all_envs():
        refuse(f"--env-id {args.env_id}: unknown to EnvPool; Atari games are called Pong-v5, SpaceInvaders-v5, ...")
    seeds = np.random.SeedSequence(entropy).generate_state(num_envs) >> 1
    try:
        env = envpool.make(
            args.env_id, env_type="gymnasium", num_envs=num_envs, num_threads=min(num_envs, os.cpu_count() or 1),
            seed=seeds.tolist(), img_height=args.frame_size, img_width=args.frame_size, stack_num=4, gray_scale=True,
            episodic_life=args.episodic_life, repeat_action_probability=args.repeat_action_probability,
            max_episode_steps=args.max_episode_steps, reward_clip=True,  # info["reward"] stays unclipped
            render_mode="rgb_array" if render else None,  # EnvPool's own: 4 frames a step, 30 no-ops, fire on reset
        )  # fmt: skip
        if hasattr(env.action_space, "n"):  # discrete
            return env
    except TypeError:  # not an Atari game: its settings know no frame size
        pass
    refuse(f"--env-id {args.env_id}: this script needs four stacked grey frames and discrete actions, as in Pong-v5")


def step_env(env, action: np.ndarray) -> tuple[np.ndarray, ...]:
    """One step of all environments: obs, clipped reward, terminated, truncated, game over, unclipped reward.

    EnvPool resets an ended episode in the *next* step, which ignores its action. So the observation that comes with an
    end is the true last one, and the row that begins with it is a dummy, of reward 0. A lost life terminates an episode
    (unless told otherwise); `info["terminated"]` is the end of a game."""
    obs, reward, terminated, truncated, info = env.step(action)
    terminated = terminated | (info["terminated"] > 0)
    truncated = truncated & ~terminated
    return obs, reward, terminated, truncated, truncated | (info["terminated"] > 0), info["reward"]


# --- network ----------------------------------------------------------------------------------------------------------
class ActorCritic(nn.Module):
    """Frames `[B, 4, H, W]` uint8 to policy logits `[B, A]` and state values `[B]`, on one convolutional torso."""

    network: str
    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        orthogonal = nn.initializers.orthogonal
        conv = partial(nn.Conv, padding="VALID", kernel_init=orthogonal(np.sqrt(2)))
        same = partial(nn.Conv, kernel_size=(3, 3), kernel_init=orthogonal(np.sqrt(2)))
        x = jnp.moveaxis(obs, 1, -1).astype(jnp.float32) / 255.0
        first = ((8, 8), 4) if x.shape[1] > 42 else ((4, 4), 2)  # kernel, stride: 84 and 42 pixels both become 20 x 20
        if self.network == "resnet":
            for channels in (16, 32, 32):
                x = nn.max_pool(same(channels)(x), (3, 3), (2, 2), "SAME")
                for _ in range(2):
                    x = x + same(channels)(nn.relu(same(channels)(nn.relu(x))))
            x = nn.relu(x)
        elif self.network == "nature":
            for layer in conv(32, *first), conv(64, (4, 4), 2), conv(64, (3, 3), 1):
                x = nn.relu(layer(x))
        else:
            for layer in conv(16, *first), conv(32, (4, 4), 2):
                x = nn.relu(layer(x))
        units = 512 if self.network == "nature" else 256
        x = nn.relu(nn.Dense(units, kernel_init=orthogonal(np.sqrt(2)))(x.reshape(x.shape[0], -1)))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        return logits, nn.Dense(1, kernel_init=orthogonal(1.0))(x).squeeze(-1)


# --- state ------------------------------------------------------------------------------------------------------------
@flax.struct.dataclass
class Rollout:
    """T steps of B environments. Row t: obs_t, action_t, and what the step with action_t returned."""

    obs: jax.Array  # [B, T+1, ...]; the last one is for bootstrapping only
    action: jax.Array  # [B, T, ...]
    logp: jax.Array  # [B, T] log-probability of the action for the policy that took it
    reward: jax.Array  # [B, T] as learnt from: clipped or scaled
    discount: jax.Array  # [B, T] gamma, or 0 at a termination
    cut: jax.Array  # [B, T] the episode ends here, by termination or time limit: no recursion beyond
    mask: jax.Array  # [B, T] False on the dummy row after an end


@flax.struct.dataclass
class EvaluatedRollout:
    """A rollout, and its evaluation by the critic that is about to be updated."""

    rollout: Rollout
    value: jax.Array  # [B, T] V(s_t) before the update, for value clipping
    advantage: jax.Array  # [B, T] A_t
    value_target: jax.Array  # [B, T] A_t + V(s_t)


# --- the mathematics --------------------------------------------------------------------------------------------------
def forward(apply_fn: Callable, params, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits `[B, T, A]` and values `[B, T]` of frames `[B, T, ...]`; B may be sharded over devices."""
    B, T = obs.shape[:2]
    # On a CPU in pieces of 64 frames, but not too many: their temporary arrays fit the cache, a quarter faster or more.
    n = max(64 // B, -(-T // 16)) if jax.default_backend() == "cpu" else T
    pieces = [apply_fn(params, obs[:, t : t + n].reshape(-1, *obs.shape[2:])) for t in range(0, T, n)]
    pieces = [jax.tree.map(lambda x: x.reshape(B, -1, *x.shape[1:]), piece) for piece in pieces]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *pieces)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the rows whose mask is True; `where` and not a product, since NaN * 0 is NaN."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    """log pi(action): logits `[..., A]`, action `[...]`."""
    return jnp.take_along_axis(nn.log_softmax(logits), action[..., None], axis=-1).squeeze(-1)


def gae(value, reward, discount, cut, lambda_: float) -> jax.Array:
    """Generalised advantage estimation (Schulman et al., 2016, equation 16): advantages `[T]` of one environment.

        delta_t = r_t + discount_t V(s_{t+1}) - V(s_t)
        A_t     = delta_t + discount_t lambda A_{t+1}          A_{t+1} = 0 where the episode is cut

    value `[T+1]`; reward, discount, cut `[T]`."""
    chex.assert_rank([value, reward, discount, cut], 1)
    delta_t = reward + jnp.where(discount > 0, discount * value[1:], 0.0) - value[:-1]

    def step(a_tp1, row):
        delta, decay, is_cut = row
        a_t = delta + jnp.where(is_cut, 0.0, decay * a_tp1)
        return a_t, a_t

    return jax.lax.scan(step, jnp.zeros(()), (delta_t, discount * lambda_, cut), reverse=True)[1]


def surrogate(ratio: jax.Array, advantage: jax.Array, clip_coef: float) -> jax.Array:
    """PPO's clipped surrogate, to be maximised: min(R A, clip(R, 1 - eps, 1 + eps) A)."""
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)


def ppo_loss(params, state: TrainState, batch: EvaluatedRollout, args: Args) -> tuple[jax.Array, dict]:
    """L = -E[surrogate] + c_v E[(V - G)^2] / 2 - c_e E[H(pi)] (PPO, equation 9), means over unmasked rows."""
    rollout, mask = batch.rollout, batch.rollout.mask
    logits, value = forward(state.apply_fn, params, rollout.obs[:, : mask.shape[1]])

    # Masked rows are overwritten before any arithmetic: a NaN in one would return through the gradient of a product.
    clean = (jnp.where(mask, x, 0.0) for x in (rollout.logp, batch.value, batch.advantage, batch.value_target))
    old_logp, old_value, advantage, value_target = clean
    if args.norm_adv:
        advantage = advantage - masked_mean(advantage, mask)
        advantage = advantage / jnp.sqrt(masked_mean(advantage**2, mask) + 1e-8)

    log_ratio = (log_prob(logits, rollout.action) - old_logp).clip(max=20.0)  # never inf
    ratio = jnp.exp(log_ratio)
    policy_loss = -masked_mean(surrogate(ratio, advantage, args.clip_coef), mask)
    squared_error = (value - value_target) ** 2
    if args.clip_vloss:
        clipped = old_value + jnp.clip(value - old_value, -args.clip_coef, args.clip_coef)
        squared_error = jnp.maximum(squared_error, (clipped - value_target) ** 2)
    value_loss = masked_mean(squared_error, mask) / 2
    log_pi = nn.log_softmax(logits)
    entropy = masked_mean(-jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1), mask)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy

    def variance(x):
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    metrics["approx_kl"] = masked_mean(jnp.expm1(log_ratio) - log_ratio, mask)
    metrics["ratio"] = masked_mean(ratio, mask)
    metrics["clipfrac"] = masked_mean(jnp.abs(ratio - 1) > args.clip_coef, mask)
    metrics["explained_variance"] = 1 - variance(value_target - value) / jnp.maximum(variance(value_target), 1e-8)
    return loss, {f"losses/{name}": value for name, value in metrics.items()}


# --- learner ----------------------------------------------------------------------------------------------------------
@partial(jax.jit, static_argnames="args")
def with_advantages(state: TrainState, rollout: Rollout, args: Args) -> EvaluatedRollout:
    """The critic evaluates a new rollout, once, before its first SGD step."""
    _, value = forward(state.apply_fn, state.params, rollout.obs)
    one_env = partial(gae, lambda_=args.gae_lambda)
    advantage = jax.vmap(one_env)(value, rollout.reward, rollout.discount, rollout.cut)
    return EvaluatedRollout(rollout, value[:, :-1], advantage, advantage + value[:, :-1])


def deal_rows(rng: np.random.Generator, visits: int, num_envs: int, args: Args) -> np.ndarray:
    """Which rows go into which SGD step: `[visits * num_minibatches, num_envs, num_steps / num_minibatches]`. Dealt out
    evenly for each environment, so that no row leaves its device and the number of devices changes nothing."""
    rows = rng.permuted(np.tile(np.arange(args.num_steps), (visits, num_envs, 1)), axis=-1)
    rows = rows.reshape(visits, num_envs, args.num_minibatches, -1).swapaxes(1, 2)
    return rows.reshape(visits * args.num_minibatches, num_envs, -1)


@jax.jit
def take_rows(batch, rows: jax.Array):
    """The minibatch of rows `[B, n]` of a batch whose arrays are `[B, T(+1), ...]`."""
    return jax.tree.map(lambda x: jax.vmap(lambda one_env, i: one_env[i])(x, rows), batch)


@partial(jax.jit, static_argnames=("loss_fn", "args"), donate_argnames="state")
def sgd_step(state, batch, loss_fn: Callable, args: Args) -> tuple[Any, dict]:
    """One SGD step on all rows of a batch. If it is sharded over devices, XLA sums their gradients."""
    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state, batch, args)
    return state.apply_gradients(grads=grads), metrics | {"losses/grad_norm": optax.tree.norm(grads)}


@partial(jax.jit, static_argnames=("loss_fn", "args"), donate_argnames="state")
def sgd_steps_in_one_call(state, batch, rows: jax.Array, loss_fn: Callable, args: Args) -> tuple[Any, dict]:
    return jax.lax.scan(lambda state, rows: sgd_step(state, take_rows(batch, rows), loss_fn, args), state, rows)


def learn(state, batch, rows: np.ndarray, loss_fn: Callable, args: Args) -> tuple[Any, dict]:
    """SGD steps on a batch, one for each `rows[i]`; returns the metrics of every step."""
    if jax.default_backend() != "cpu":
        return sgd_steps_in_one_call(state, batch, rows, loss_fn, args)
    metrics = []  # on a CPU XLA's gradient of a convolution is dozens of times slower inside a loop of its own
    for i in range(len(rows)):
        state, step_metrics = sgd_step(state, take_rows(batch, rows[i]), loss_fn, args)
        metrics.append(step_metrics)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *metrics)


# --- acting -----------------------------------------------------------------------------------------------------------
@partial(jax.jit, static_argnames="apply_fn")
def policy_step(apply_fn: Callable, params, obs: jax.Array, key: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
    """Samples actions: obs `[B, 4, H, W]` to action `[B]` and its log-probability `[B]`."""
    logits, _ = apply_fn(params, obs)
    action = jax.random.categorical(jax.random.fold_in(key, step), logits)
    return action, log_prob(logits, action)


class Worker:
    """A vector of environments, and what it carries from one rollout to the next."""

    def __init__(self, args: Args, apply_fn: Callable, entropy: tuple[int, ...], key: jax.Array):
        self.args, self.apply_fn, self.steps = args, apply_fn, 0
        self.key = jax.random.fold_in(key, np.random.SeedSequence(entropy).generate_state(1)[0])
        self.env = make_env(args, args.num_envs, entropy)
        self.obs, _ = self.env.reset()
        self.ended = np.zeros(args.num_envs, bool)  # the last row ended an episode, so the next one is a dummy
        self.game_return, self.game_length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)

    def rollout(self, params) -> tuple[Rollout, dict[str, list[float]]]:
        """T steps with these parameters: arrays that nobody writes again, and metrics."""
        rows, metrics, inference, start = [], defaultdict(list), 0.0, time.time()
        for _ in range(self.args.num_steps):
            asked = time.time()
            action, logp = jax.device_get(policy_step(self.apply_fn, params, self.obs, self.key, self.steps))  # sync
            inference += time.time() - asked
            obs, reward, terminated, truncated, game_over, game_reward = step_env(self.env, action)
            discount = np.where(terminated, 0.0, self.args.gamma).astype(np.float32)
            rows.append((self.obs, action, logp, reward, discount, terminated | truncated, ~self.ended))
            self.game_return += game_reward
            self.game_length += ~self.ended
            metrics["charts/episodic_return"] += self.game_return[game_over].tolist()
            metrics["charts/episodic_length"] += self.game_length[game_over].tolist()
            self.game_return[game_over], self.game_length[game_over] = 0, 0
            self.obs, self.ended, self.steps = obs, terminated | truncated, self.steps + 1
        obs, *columns = zip(*rows)
        rollout = Rollout(np.stack([*obs, self.obs], 1), *(np.stack(column, 1) for column in columns))
        return rollout, metrics | {"time/actor_rollout": [time.time() - start], "time/actor_inference": [inference]}


# --- main -------------------------------------------------------------------------------------------------------------
def main(args: Args) -> dict:
    """Trains, evaluates, saves. Returns final_return (mean of the last 20 games), eval_return, global_step, run_dir."""
    run = Run(args)
    args = run.args  # with --resume those of that run
    replicated, by_env, _ = make_shardings(args)
    rollout_steps = args.num_steps * args.num_envs * jax.process_count()
    total_steps = run.plan("rollout", rollout_steps)
    planned_sgd_steps = total_steps // rollout_steps * args.update_epochs * args.num_minibatches

    env = make_env(args, 1, (args.seed,))
    network = ActorCritic(args.network, int(env.action_space.n))
    init_key, actor_key, eval_key = jax.random.split(jax.random.key(args.seed), 3)
    params = network.init(init_key, np.zeros((1, *env.observation_space.shape), np.uint8))
    rate = optax.linear_schedule(args.learning_rate, 0.0 if args.anneal_lr else args.learning_rate, planned_sgd_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(rate, eps=1e-5))
    state = run.restore(TrainState.create(apply_fn=network.apply, params=params, tx=optimizer), replicated)
    global_step, sgd_steps = run.step, int(state.step)
    # A resumed run plays new games, since the rollouts done are part of their seeds.
    worker = Worker(args, network.apply, (args.seed, jax.process_index(), 0, global_step // rollout_steps), actor_key)
    run.open(environment=f"{args.env_id}: {network.num_actions} actions (minimal), 4 grey frames of {args.frame_size} "
                         f"pixels, limit {args.max_episode_steps} steps = {4 * args.max_episode_steps} frames, up to "
                         f"30 no-ops, fire on reset, a lost life ends an episode: {args.episodic_life}, sticky actions "
                         f"{args.repeat_action_probability}, rewards clipped for learning only",
             plan=f"{args.num_envs} environments, learner on {replicated.mesh.size} x {jax.devices()[0].device_kind}, "
                  f"{total_steps // rollout_steps} x {rollout_steps} steps, from {global_step}"
                  f"{' (resumed: the environments begin new games)' if args.resume else ''}")  # fmt: skip

    with run:
        while global_step < total_steps and not run.stop:
            rollout, metrics = worker.rollout(jax.tree.map(lambda x: x.addressable_data(0), state.params))
            run.add(metrics)
            start = time.time()
            # Each process holds its own environments' rows; together they are one array, sharded over all devices.
            rollout = jax.tree.map(partial(jax.make_array_from_process_local_data, by_env), rollout)
            batch = with_advantages(state, rollout, args)
            rng = np.random.default_rng((args.seed, sgd_steps))  # so a resumed run goes on with the same stream
            rows = deal_rows(rng, args.update_epochs, len(rollout.action), args)
            state, losses = learn(state, batch, rows, ppo_loss, args)
            jax.block_until_ready(state.params)  # sync, for the timing; acting would wait for them anyway
            sgd_steps, global_step = sgd_steps + len(rows), global_step + rollout_steps
            run.add(losses | {"time/learner_update": time.time() - start}, SPS=rollout_steps)
            if run.due(global_step, rollout_steps, total_steps):
                run.log(state, {"charts/learning_rate": float(rate(sgd_steps))},
                        "step {step:>10,} {share:4.0%}   return (20 games) {charts/episodic_return_20:8.2f}   "
                        "SPS {charts/SPS:6.0f}   value loss {losses/value_loss:7.4f}   "
                        "entropy {losses/entropy:5.3f}   {left:4.0f} min left")  # fmt: skip

    params = jax.tree.map(lambda x: x.addressable_data(0), state.params)

    def evaluate() -> np.ndarray:
        """In environments set up as in training: a policy that never served after a lost life would stand still."""
        env = make_env(args, args.eval_episodes, (args.seed, 2**31), render=args.capture_video)
        act = lambda obs, i: np.asarray(policy_step(network.apply, params, obs, eval_key, i)[0])  # noqa: E731
        return play(args.eval_episodes, env, step_env, act, film=run.folder if args.capture_video else None)

    return run.end(total_steps, params, evaluate)


# --- appendix: the run folder, logging, checkpoints, signals, devices; the same in every script ---
import json
import signal
import subprocess
import sys
import zlib

from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensorboardX import SummaryWriter


def refuse(message: str, code: int = 2):
    """Ends the program with one line that names the flag or the file and the remedy."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():  # an orderly exit would wait minutes for the other processes
        os._exit(code)
    raise SystemExit(code)


def make_shardings(args, actor_device: int | None = None) -> tuple[NamedSharding, NamedSharding, jax.Device]:
    """Over the learner's devices of all processes: replicated (a state), and split by environments (a batch). And the
    actors' device. Joins the other processes first, if --distributed."""
    where, devices = (args.coordinator_address, args.num_processes, args.process_id), args.learner_devices
    if not devices or min(devices) < 0 or len({*devices}) < len(devices):
        refuse("--learner-devices: must be different indices, for example --learner-devices 0 1")
    if args.num_envs % len(devices):
        refuse(f"--num-envs {args.num_envs}: must be a multiple of the {len(devices)} --learner-devices")
    if not args.distributed and where != (None,) * 3:
        refuse("--coordinator-address, --num-processes, --process-id: need --distributed")
    if args.distributed:
        try:
            jax.distributed.initialize(*where, heartbeat_timeout_seconds=20)  # when a process dies, the others end soon
        except (ValueError, RuntimeError) as error:
            refuse(f"--distributed: {error}; name --coordinator-address, --num-processes and --process-id")
    here, flags = jax.local_devices(), "--learner-devices" + ", --actor-device" * (actor_device is not None)
    if max(*devices, actor_device or 0) >= len(here):
        refuse(f"{flags}: only {len(here)} devices here, 0 to {len(here) - 1}")
    by_process = [[d for d in jax.devices() if d.process_index == p] for p in range(jax.process_count())]
    mesh = Mesh([process[i] for process in by_process for i in devices], "data")
    acting = jax.local_devices(backend="cpu")[0] if actor_device == -1 else here[actor_device or 0]
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")), acting


def play(n: int, env, step, choose, least_steps: int = 0, film: Path | None = None, ms_per_frame=67) -> np.ndarray:
    """Unclipped returns of whole games: n environments make `least_steps` together, then each ends its game, so short
    ones are not over-represented. `choose(obs, i)` acts in step i. Writes a GIF of one (3,000 steps) into `film`."""
    (obs, _), total, playing, returns, frames, i = env.reset(), np.zeros(n), np.ones(n, bool), [], [], 0
    filming = film is not None
    while playing.any():
        if filming:
            frames.append(env.render()[0])
        obs, *_, over, reward = step(env, choose(obs, i))
        total, i = total + reward, i + 1
        returns += total[over & playing].tolist()
        total[over] = 0.0
        playing &= ~over | (i * n < least_steps)
        filming = filming and not over[0] and i < 3000
    if frames:
        from PIL import Image

        first, *rest = map(Image.fromarray, frames)
        first.save(film / "eval.gif", save_all=True, append_images=rest, duration=ms_per_frame)
    return np.array(returns)


def write_whole(path: Path, data: bytes):
    """Replaces a file as a whole: a kill at any moment leaves the old one or the new one."""
    path.with_suffix(".tmp").write_bytes(data)
    os.replace(path.with_suffix(".tmp"), path)


def read_checkpoint(flag: str, folder: str) -> tuple[dict, dict]:
    """Arguments and checkpoint of a run of this script; refuses a missing, damaged or foreign one."""
    try:
        saved = json.loads((Path(folder) / "args.json").read_text())
        data = (Path(folder) / "checkpoint.msgpack").read_bytes()
    except (OSError, ValueError) as error:
        refuse(f"{flag} {folder}: cannot read its args.json and checkpoint.msgpack ({error!r}); name a run's folder")
    if zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
        refuse(f"{flag} {folder}: checkpoint.msgpack is damaged; restore it from a copy, or start a new run")
    checkpoint = flax.serialization.msgpack_restore(data[4:])
    if checkpoint["script"] != Path(__file__).stem:
        refuse(f"{flag} {folder}: it is a run of {checkpoint['script']}.py; name one of this script")
    return {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}, checkpoint


class Run:
    """A run's folder, log, checkpoints and end. With several processes only the first one has a folder, and speaks.
    `progress` is what a checkpoint holds beside the state. `with run:` encloses the training: a first Ctrl-C or SIGTERM
    sets `stop` when the round under way is done, a second Ctrl-C does not wait."""

    def __init__(self, args):
        self.progress, self.checkpoint = {"global_step": 0, "wall_seconds": 0.0, "last_returns": []}, None
        if args.resume:  # with its own settings: a flag set to something else than its default is refused, not ignored
            saved, self.checkpoint = read_checkpoint("--resume", args.resume)
            self.progress, given = self.checkpoint["progress"], vars(args)
            if saved.keys() != given.keys():
                refuse(f"--resume {args.resume}: cannot read its args.json, which has other fields than this script's")
            own = {"resume", "coordinator_address", "num_processes", "process_id"} & given.keys()  # of this process
            args = type(args)(**saved | {name: given[name] for name in own})
            for name, x in given.items():
                if name not in own and x not in (getattr(type(args), name), getattr(args, name)):
                    refuse(f"--{name.replace('_', '-')} {x}: a resumed run keeps its settings; leave the flag out")
        for flag, wanted, name in ("--track", args.track, "wandb"), ("--capture-video", args.capture_video, "pillow"):
            if wanted and not any(metadata.distributions(name=name)):
                refuse(f"{flag}: needs the package {name}; run pip install {name}, or leave the flag out")
        self.args, self.folder, self.stop, self.interrupted = args, None, False, False
        self.step, self.last_returns = self.progress["global_step"], self.progress["last_returns"]

    def plan(self, unit: str, steps: int) -> int:
        """How many environment steps the run has, in whole rollouts or generations of so many steps."""
        if self.args.total_timesteps < steps:
            refuse(f"--total-timesteps {self.args.total_timesteps}: must be at least one {unit}, {steps} steps")
        if self.progress.setdefault(f"{unit}_steps", steps) != steps:
            refuse(f"--resume {self.args.resume}: was started with another number of processes; use as many as then")
        return self.args.total_timesteps // steps * steps

    def restore(self, state, sharding=None):
        """A new state, or the checkpoint's, on the devices."""
        if self.checkpoint:
            state = flax.serialization.from_state_dict(state, self.checkpoint["state"])
        # By way of numpy copies: parameters and their target begin equal, but must not share memory, which is donated.
        return jax.device_put(jax.tree.map(np.array, state), sharding)

    def open(self, **told: str):
        """Makes the run folder, with arguments, versions and this script in it, or goes on in it; begins the log."""
        if jax.process_index() > 0:
            return
        args, here, stamp = self.args, Path(__file__).resolve(), int(time.time())
        name = str(Path(args.runs_dir) / f"{args.env_id}__{args.exp_name}__{args.seed}__")
        while Path(f"{name}{stamp}").exists():
            stamp += 1
        self.folder = Path(args.resume or f"{name}{stamp}")
        git = subprocess.run("git rev-parse HEAD", shell=True, cwd=here.parent, capture_output=True, text=True)
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "envpool")}
        versions |= {"python": sys.version.split()[0], "device": jax.devices()[0].device_kind, "cpus": os.cpu_count()}
        try:
            if not args.resume:
                self.folder.mkdir(parents=True)
                write_whole(self.folder / here.name, here.read_bytes())
                for name, facts in ("args", vars(args)), ("versions", versions | {"git_commit": git.stdout.strip()}):
                    (self.folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            refuse(f"--runs-dir {args.runs_dir}: cannot write {self.folder} ({error.strerror}); name a writable folder")
        path, self.t0 = self.folder / "metrics.csv", time.time() - self.progress["wall_seconds"]
        rows = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
        # A resumed run forgets the rows that its checkpoint has not seen, and a last line cut short by a kill.
        rows = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= self.step]
        write_whole(path, ("global_step,wall_seconds,metric,value\n" + "".join(rows)).encode())
        self.csv, self.events = path.open("a"), SummaryWriter(str(self.folder), purge_step=self.step + 1)
        if args.track:
            import wandb

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "id": self.folder.name}
            self.wandb = wandb.init(config=vars(args), resume="allow", reinit="finish_previous", **names)
            self.wandb.define_metric("*", step_metric="global_step")
        for name, text in {"run folder": self.folder, **told}.items():
            print(f"{name:<13}{text}", flush=True)

    def __enter__(self):
        self.values, self.counts, self.since = defaultdict(list), defaultdict(int), (time.time(), self.step)
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self.handlers = {s: signal.signal(s, self.interrupt) for s in signals}

    def interrupt(self, *_):
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind, error, trace):
        if error and jax.distributed.is_initialized():  # as in `refuse`
            sys.excepthook(kind, error, trace)
            os._exit(1)
        for s, handler in self.handlers.items():
            signal.signal(s, handler)

    def add(self, metrics: dict, **counts: int):
        """Collects what the next log shows: values, to be averaged, and counts, to be divided by the seconds."""
        for name, values in metrics.items():
            self.values[name].append(values)
        for name, n in counts.items():
            self.counts[f"charts/{name}"] += n
        self.last_returns = [*self.last_returns, *metrics.get("charts/episodic_return", ())][-20:]

    def due(self, step: int, made: int, end: int, begin: int = 0) -> bool:
        """After each round of `made` steps, of those from begin to end: whether to log now. Takes note of Ctrl-C."""
        # All processes leave the training together: any that stayed would wait for ever.
        self.step, self.stop = step, bool(multihost_utils.process_allgather(np.array(self.interrupted)).any())
        self.span, self.save_now = (begin, end), step >= end or self.stop or step % self.args.checkpoint_every < made
        due = self.save_now or step % self.args.log_every < made
        self.values = jax.device_get(dict(self.values)) if due else self.values  # sync
        return due

    def log(self, state, metrics: dict[str, float], line: str):
        """A row of each metric, a line on the console, and a checkpoint if it is time; of finite numbers only."""
        values = {name: np.concatenate([np.ravel(x) for x in parts]) for name, parts in self.values.items()}
        step, means = self.step, {name: float(np.mean(x)) for name, x in values.items() if x.size}
        if bad := [name for name, value in means.items() if not np.isfinite(value)]:
            good = self.folder / "checkpoint.msgpack" if self.folder else Path()
            good = f"last good checkpoint: {good}" if good.is_file() else "no checkpoint was saved before"
            refuse(f"{bad[0]} is not finite at step {step}, so the run stopped without saving; {good}; "
                   "a new run with a lower --learning-rate may help", code=1)  # fmt: skip
        seconds, steps, (begin, end) = time.time() - self.since[0], step - self.since[1], self.span
        means |= {name: n / seconds for name, n in self.counts.items()} | metrics
        if len(self.last_returns) == 20:
            means["charts/episodic_return_20"] = float(np.mean(self.last_returns))
        told = {"step": step, "share": (step - begin) / (end - begin), "left": (end - step) / steps * seconds / 60}
        self.write(means, line.format_map(defaultdict(lambda: np.nan, means | told)).replace("nan", "  -"))
        self.values, self.counts, self.since = defaultdict(list), defaultdict(int), (time.time(), step)
        if self.save_now and self.folder:
            self.progress.update(global_step=step, last_returns=self.last_returns, wall_seconds=time.time() - self.t0)
            saved = {"script": Path(__file__).stem, "progress": self.progress}
            saved["state"] = flax.serialization.to_state_dict(state)
            data = flax.serialization.msgpack_serialize(jax.device_get(saved))
            write_whole(self.folder / "checkpoint.msgpack", zlib.crc32(data).to_bytes(4, "big") + data)

    def write(self, metrics: dict[str, float], line: str):
        if self.folder:
            for name, value in metrics.items():
                self.csv.write(f"{self.step},{time.time() - self.t0:.2f},{name},{value:.8g}\n")
                self.events.add_scalar(name, value, self.step)
            self.csv.flush()
            print(line, flush=True)
            if self.args.track and metrics:
                self.wandb.log(metrics | {"global_step": self.step})

    def evaluated(self, returns: np.ndarray) -> float:
        numbers = {"eval/episodic_return": returns.mean(), "eval/episodic_return_std": returns.std()}
        self.write(numbers, f"evaluation: {returns.mean():.2f} +- {returns.std():.2f} over {len(returns)} whole games")
        return float(returns.mean())

    def end(self, total: int, params, evaluate, **model) -> dict:
        """Saves the model of a run that is complete, and evaluates it; the result of main."""
        final_return = float(np.mean(self.last_returns)) if self.last_returns else None
        result = {"final_return": final_return, "eval_return": None, "global_step": self.step, "run_dir": self.folder}
        if self.step < total:
            self.write({}, f"interrupted at step {self.step}; continue with --resume {self.folder}")
            return result
        if self.args.save_model and self.folder:
            model |= {"format": f"{Path(__file__).stem} 1", "args": json.dumps(vars(self.args)), "params": params}
            write_whole(self.folder / "model.msgpack", flax.serialization.msgpack_serialize(jax.device_get(model)))
        if self.args.eval_episodes:
            result["eval_return"] = self.evaluated(evaluate())
        return result


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:  # before the first step, during an evaluation, or the second Ctrl-C
        refuse("interrupted", code=130)
