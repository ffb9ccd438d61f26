# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12.8", "optax>=0.2.6", "chex>=0.1.90", "numpy>=2.0", "envpool>=1.2.5",
#                 "tyro>=1.0", "tensorboardX>=2.6", "wandb>=0.22", "pillow>=11.0"]
# ///
"""IMPACT on Atari: asynchronous PPO with a target network, a circular buffer and truncated importance sampling.

Paper: Luo et al., "IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target Networks", ICLR 2020.

    actor threads ── rollouts ──> bounded queue ──> circular buffer C(N, K) ──> SGD steps ──> live parameters
          ▲     (EnvPool, policy)                   first visit: the target network             │
          │                                         computes the advantages (V-GAE)             │
          └──────────── copy of the live parameters after the SGD steps ────────────────────────┘
                        after every N*K visits: target parameters <- live parameters

Three policies (worker, target, live), and the paper's ablations as flags (--ratio, --value-target). Deliberately
different from the paper or from its author's code:
  1. The target's critic computes the advantages, as the paper says; the author used the live one (--value-target live).
  2. All T rewards of a rollout count: it holds T+1 observations, the last one for bootstrapping only.
  3. A time limit is not a death: it bootstraps. EnvPool's dummy row after an end is masked out of everything.
  4. The shallow network's convolutions are VALID, initialised orthogonally, and read pixels / 255.

What is not the algorithm (`Run`, `refuse`, `play`, `make_shardings`) is in the appendix, the same in every script.

    python impact_atari.py --env-id Pong-v5                          one CPU or one GPU
    python impact_atari.py --num-envs 64 --learner-devices 0 1 2 3   data-parallel learner on four devices
    python impact_atari.py --distributed                             several hosts: the same command once on each
"""

import os
from importlib import metadata

# XLA's CPU backend runs convolutions on one core unless this fusion is off (3 to 4 times faster). An XLA that does not
# know a flag aborts, hence the versions. Your own XLA_FLAGS come last, so they win.
if metadata.version("jaxlib").startswith(("0.10.", "0.12.")) and "ynn_fusion" not in os.environ.get("XLA_FLAGS", ""):
    flags = "--xla_cpu_experimental_ynn_fusion_type=-individual_convolution", os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import closing, suppress
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
from flax.training import train_state


@dataclass(frozen=True)
class Args:
    """IMPACT on Atari. A step is an environment step: one decision of the agent, four Atari frames."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of environments, parameters and sampling
    total_timesteps: int = 10_000_000  # length of the run in environment steps, rounded down to whole generations
    runs_dir: str = "runs"  # folder that receives the run folder
    log_every: int = 10_000  # environment steps between two lines on the console and rows of metrics
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project_name: str = "impact"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    save_model: bool = True  # write model.msgpack (parameters and arguments) at the end
    checkpoint_every: int = 100_000  # environment steps between two checkpoints
    resume: str | None = None  # run folder to continue, with its own settings
    eval_episodes: int = 10  # whole games to play at the end, in fresh environments, actions sampled (0: none)
    capture_video: bool = False  # write a GIF of one evaluated game

    # --- environment ---
    env_id: str = "Pong-v5"  # EnvPool's name of the game
    num_envs: int = 16  # B, environments of each actor thread; a rollout of num_steps in each is a train batch
    frame_size: Literal[84, 42] = 84  # height and width of a frame in pixels (42: cheap, and the author's for Pong)
    episodic_life: bool = True  # a lost life ends a training episode (returns are always those of whole games)
    repeat_action_probability: float = 0.0  # probability that the emulator repeats the last action (sticky actions)
    max_episode_steps: int = 27_000  # time limit of a game in environment steps (27,000 = 108,000 frames)

    # --- algorithm ---
    network: Literal["shallow", "nature", "resnet"] = "shallow"  # 2 convolutions + 256 units, 3 + 512, or 15 + 256
    learning_rate: float = 5e-4  # step size of Adam
    anneal_lr: bool = True  # lower the step size linearly to 0 over the planned SGD steps
    gamma: float = 0.99  # discount per environment step
    gae_lambda: float = 1.0  # lambda of V-GAE
    c_bar: float = 1.0  # bound of pi_target / pi_worker in V-GAE (above 1 lag does not shorten its traces)
    num_steps: int = 50  # T, environment steps of each environment in a rollout
    num_minibatches: int = 1  # SGD steps per visit of a train batch, each on an equal share of each environment's rows
    buffer_size: int = 1  # N, slots of the circular buffer, in train batches
    passes: int = 2  # K, visits of each train batch
    target_period: int = 1  # generations (of N*K visits) between two updates of the target network
    ratio: Literal["impact", "target", "worker"] = "impact"  # pi / max(pi_tgt, pi_w / rho), pi / pi_tgt, or pi / pi_w
    rho: float = 2.0  # bound of pi_worker / pi_target in the IMPACT ratio
    value_target: Literal["target", "live"] = "target"  # critic that computes advantages and value targets
    clip_coef: float = 0.3  # epsilon of the clipped surrogate
    norm_adv: bool = False  # normalise the advantages of each minibatch
    vf_coef: float = 1.0  # weight of the value loss (half the mean squared error)
    ent_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 10.0  # bound of the gradient's global norm
    kl_coef: float = 0.0  # initial weight of KL(target || live), adapted once per generation (0: no KL term)
    kl_target: float = 0.04  # KL of a generation that the adaptation aims at, in nats

    # --- system ---
    num_actors: int = 1  # actor threads of each process
    queue_size: int = 1  # rollouts that may wait beside those in progress; with --no-concurrency the lag, in rollouts
    concurrency: bool = True  # act and learn at the same time, or by turns: then bit-identical between runs on a CPU
    actor_device: int = 0  # device of the actors' policy, an index into the process's devices (-1: the host's CPU)
    learner_devices: tuple[int, ...] = (0,)  # devices of the learner, indices into the process's devices
    distributed: bool = False  # call jax.distributed.initialize(): one process per host, the same command on each
    coordinator_address: str | None = None  # host:port of process 0, where JAX cannot find it itself
    num_processes: int | None = None  # number of processes, likewise
    process_id: int | None = None  # index of this process, likewise

    def __post_init__(self):
        may_be_0 = "seed queue_size eval_episodes vf_coef ent_coef kl_coef process_id"
        fractions = "gamma gae_lambda repeat_action_probability"
        check_numbers(self, may_be_0, fractions, actor_device=-1)
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
class Batch:
    """A slot of the circular buffer: a rollout, and the target network's evaluation of it."""

    rollout: Rollout
    target_logits: jax.Array  # [B, T, A]
    advantage: jax.Array  # [B, T] A_t
    value_target: jax.Array  # [B, T] G_t


class TrainState(train_state.TrainState):
    """Flax's train state (`step` counts SGD steps, `params` are the live policy and critic), and IMPACT's share."""

    target_params: Any
    kl_coef: jax.Array  # weight of KL(target || live)


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


def v_gae(value, reward, discount, cut, log_w, lambda_: float, c_bar: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """V-GAE (IMPACT, section 3.1): advantages and value targets `[T]` of one environment, w = pi_target / pi_worker.

        delta_t = rho_t (r_t + discount_t V(s_{t+1}) - V(s_t))     rho_t = c_t = min(c_bar, w_t), c_bar = 1 in the paper
        A_t     = delta_t + discount_t lambda c_t A_{t+1}          A_{t+1} = 0 where the episode is cut
        G_t     = V(s_t) + A_t                                     (lambda folded into the discount would bias it)

    value `[T+1]`; reward, discount, cut, log_w `[T]`. If w = 1 it is GAE(lambda), if lambda = 1 V-trace's advantage."""
    chex.assert_rank([value, reward, discount, cut, log_w], 1)
    rho_t = c_t = jnp.exp(jnp.minimum(log_w, np.log(c_bar)))
    delta_t = rho_t * (reward + jnp.where(discount > 0, discount * value[1:], 0.0) - value[:-1])

    def step(a_tp1, row):
        delta, decay, is_cut = row
        a_t = delta + jnp.where(is_cut, 0.0, decay * a_tp1)
        return a_t, a_t

    _, advantage = jax.lax.scan(step, jnp.zeros(()), (delta_t, discount * lambda_ * c_t, cut), reverse=True)
    return advantage, value[:-1] + advantage


def log_ratio(logp: jax.Array, logp_target: jax.Array, logp_worker: jax.Array, kind: str, rho: float) -> jax.Array:
    """log R of R = pi / max(pi_target, pi_worker / rho), which equals min(pi_worker / pi_target, rho) pi / pi_worker.
    The ablations: `target` has no bound (rho = infinity), `worker` is anchored at the policy that acted, as in PPO."""
    impact = jnp.maximum(logp_target, logp_worker - jnp.log(rho))
    return logp - {"impact": impact, "target": logp_target, "worker": logp_worker}[kind]


def surrogate(ratio: jax.Array, advantage: jax.Array, clip_coef: float) -> jax.Array:
    """PPO's clipped surrogate, to be maximised: min(R A, clip(R, 1 - eps, 1 + eps) A)."""
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)


def impact_loss(params, state: TrainState, batch: Batch, args: Args) -> tuple[jax.Array, dict]:
    """L = -E[surrogate] + c_v E[(V - G)^2] / 2 - c_e E[H(pi)] + k E[KL(pi_target || pi)], means over unmasked rows."""
    rollout, mask = batch.rollout, batch.rollout.mask
    logits, value = forward(state.apply_fn, params, rollout.obs[:, : mask.shape[1]])
    chex.assert_equal_shape([logits, batch.target_logits])

    # Masked rows are overwritten before any arithmetic: a NaN in one would return through the gradient of a product.
    target_logits = jnp.where(mask[..., None], batch.target_logits, 0.0)
    clean = (jnp.where(mask, x, 0.0) for x in (rollout.logp, batch.advantage, batch.value_target))
    logp_worker, advantage, value_target = clean
    if args.norm_adv:
        advantage = advantage - masked_mean(advantage, mask)
        advantage = advantage / jnp.sqrt(masked_mean(advantage**2, mask) + 1e-8)

    logp, logp_target = log_prob(logits, rollout.action), log_prob(target_logits, rollout.action)
    ratio = jnp.exp(log_ratio(logp, logp_target, logp_worker, args.ratio, args.rho).clip(max=20.0))  # never inf
    policy_loss = -masked_mean(surrogate(ratio, advantage, args.clip_coef), mask)
    value_loss = masked_mean((value - value_target) ** 2, mask) / 2
    log_pi, log_pi_target = nn.log_softmax(logits), nn.log_softmax(target_logits)
    entropy = masked_mean(-jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1), mask)
    kl = masked_mean(jnp.sum(jnp.exp(log_pi_target) * (log_pi_target - log_pi), axis=-1), mask)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + state.kl_coef * kl

    def variance(x):
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl_target_live": kl}
    log_w = (logp - logp_worker).clip(max=20.0)  # worker to live
    metrics["approx_kl"] = masked_mean(jnp.expm1(log_w) - log_w, mask)
    metrics["ratio"] = masked_mean(ratio, mask)
    metrics["clipfrac"] = masked_mean(jnp.abs(ratio - 1) > args.clip_coef, mask)
    metrics["rho_clipfrac"] = masked_mean(logp_worker - logp_target > np.log(args.rho), mask)
    metrics["explained_variance"] = 1 - variance(value_target - value) / jnp.maximum(variance(value_target), 1e-8)
    return loss, {f"losses/{name}": value for name, value in metrics.items()}


# --- learner ----------------------------------------------------------------------------------------------------------
@partial(jax.jit, static_argnames="args")
def evaluate_batch(state: TrainState, rollout: Rollout, args: Args, target_logits: jax.Array | None = None) -> Batch:
    """The target network evaluates a batch at its first visit, for all K of them: it changes only after the last. Or,
    given its logits, the live critic does (--value-target live). The weights are target over worker in either case."""
    params = state.target_params if target_logits is None else state.params
    logits, value = forward(state.apply_fn, params, rollout.obs)
    target_logits = logits[:, :-1] if target_logits is None else target_logits
    log_w = log_prob(target_logits, rollout.action) - rollout.logp
    one_env = partial(v_gae, lambda_=args.gae_lambda, c_bar=args.c_bar)
    returned = jax.vmap(one_env)(value, rollout.reward, rollout.discount, rollout.cut, log_w)
    return Batch(rollout, target_logits, *returned)


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


@partial(jax.jit, static_argnames=("args", "update_target"), donate_argnames="state")
def end_generation(state: TrainState, kls: tuple, args: Args, update_target: bool) -> TrainState:
    """Target <- live, and the author's rule for the weight of the KL term, given the KLs of each slot's last visits."""
    kl = jnp.mean(jnp.concatenate([jnp.ravel(x) for x in kls])[-args.buffer_size * args.num_minibatches :])
    factor = jnp.where(kl > 2 * args.kl_target, 1.5, jnp.where(kl < args.kl_target / 2, 0.5, 1.0))
    kl_coef = jnp.maximum(state.kl_coef * factor, 1e-2 * args.kl_coef)  # never so small that it could not come back
    if not update_target:
        return state.replace(kl_coef=kl_coef)
    # A copy: live and target parameters are both donated, so they must not share memory.
    return state.replace(target_params=jax.tree.map(jnp.copy, state.params), kl_coef=kl_coef)


# --- actors -----------------------------------------------------------------------------------------------------------
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


class Exchange:
    """All that actors and learner share: finished rollouts, the newest parameters, and a way to stop each other.

    Rollouts are bounded from their beginning: an actor that finds no room waits before it reads the parameters, not
    after it has used them. So the policy lag is no longer than the rollouts in flight."""

    def __init__(self, max_in_flight: int, device: jax.Device):
        self.rollouts, self.room, self.device = queue.SimpleQueue(), threading.Semaphore(max_in_flight), device
        self.published, self.stop, self.error, self.threads = (None, 0), threading.Event(), None, []

    def publish(self, params, sgd_steps: int):
        """Hands the actors a copy of the parameters that so many SGD steps made; raises what an actor died of."""
        if self.error is not None:
            raise self.error
        copy = jax.tree.map(lambda x: jnp.copy(x.addressable_data(0)), params)  # the learner's own are donated next
        self.published = jax.block_until_ready(jax.device_put(copy, self.device)), sgd_steps  # sync: no actor waits

    def act(self, worker):
        """One rollout with the newest parameters, into the queue."""
        params, sgd_steps = self.published
        self.rollouts.put((*worker.rollout(params), sgd_steps))

    def keep_acting(self, worker):
        """An actor thread. What goes wrong here reaches the learner."""
        try:
            while not self.stop.is_set():
                if self.room.acquire(timeout=0.2):
                    self.act(worker)
        except BaseException as error:
            self.error = error

    def start(self, workers: list):
        self.threads = [threading.Thread(target=self.keep_acting, args=(worker,), daemon=True) for worker in workers]
        for thread in self.threads:
            thread.start()

    def take(self) -> tuple:
        """The oldest rollout, its metrics, its parameters' SGD steps; raises what an actor died of."""
        while self.error is None:
            with suppress(queue.Empty):
                return self.rollouts.get(timeout=0.2)
        raise self.error

    def close(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(timeout=5)


# --- main -------------------------------------------------------------------------------------------------------------
def main(args: Args) -> dict:
    """Trains, evaluates, saves. Returns final_return (mean of the last 20 games), eval_return, global_step, run_dir."""
    run = Run(args)
    args, N, K = run.args, run.args.buffer_size, run.args.passes  # with --resume the arguments of that run
    replicated, by_env, actor_device = make_shardings(args, args.actor_device)
    generation_steps = N * args.num_steps * args.num_envs * jax.process_count()
    total_steps = run.plan("generation", generation_steps)
    planned_sgd_steps = total_steps // generation_steps * N * K * args.num_minibatches

    env = make_env(args, 1, (args.seed,))
    network = ActorCritic(args.network, int(env.action_space.n))
    init_key, actor_key, eval_key = jax.random.split(jax.random.key(args.seed), 3)
    params = network.init(init_key, np.zeros((1, *env.observation_space.shape), np.uint8))
    rate = optax.linear_schedule(args.learning_rate, 0.0 if args.anneal_lr else args.learning_rate, planned_sgd_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(rate, eps=1e-5))
    impact = {"target_params": params, "kl_coef": np.float32(args.kl_coef)}
    state = run.restore(TrainState.create(apply_fn=network.apply, params=params, tx=optimizer, **impact), replicated)
    global_step, sgd_steps, last_kls = run.step, int(state.step), deque(maxlen=N)

    # A resumed run plays new games, since the generation is part of their seeds.
    entropies = [(args.seed, jax.process_index(), i, global_step // generation_steps) for i in range(args.num_actors)]
    workers = [Worker(args, network.apply, entropy, actor_key) for entropy in entropies]
    # In flight: one rollout that each actor plays, those that wait, and N - 1 since a generation takes N.
    exchange = Exchange(N - 1 + args.num_actors + args.queue_size, actor_device)
    exchange.publish(state.params, sgd_steps)
    run.open(environment=f"{args.env_id}: {network.num_actions} actions (minimal), 4 grey frames of {args.frame_size} "
                         f"pixels, limit {args.max_episode_steps} steps = {4 * args.max_episode_steps} frames, up to "
                         f"30 no-ops, fire on reset, a lost life ends an episode: {args.episodic_life}, sticky actions "
                         f"{args.repeat_action_probability}, rewards clipped for learning only",
             plan=f"{args.num_actors} x {args.num_envs} environments, learner on {replicated.mesh.size} x "
                  f"{jax.devices()[0].device_kind}, {total_steps // generation_steps} x {generation_steps} steps, from "
                  f"{global_step}{' (resumed: the environments begin new games)' if args.resume else ''}")  # fmt: skip

    # A single slot's K visits follow one another: one call of the learner, if nothing changes between them.
    visits = K if N == 1 and args.value_target == "target" else 1
    every = K // visits  # calls from one rollout's beginning to the next: N in all, evenly over a generation
    with closing(exchange), run:
        exchange.start(workers if args.concurrency else [])
        while global_step < total_steps and not run.stop:
            slots: list[Batch] = []  # the circular buffer C(N, K): N batches, visited by turns, K times each
            for call in range(N * every):
                start = time.time()
                if call < N:  # in the first round the slots fill, and after the last all expire together
                    while not args.concurrency and exchange.rollouts.qsize() <= args.queue_size:  # act by turns
                        workers.append(workers.pop(0))
                        exchange.act(workers[-1])
                    rollout, metrics, behaviour_sgd_steps = exchange.take()
                    run.add(metrics | {"charts/policy_lag": sgd_steps - behaviour_sgd_steps})
                    run.add({"time/learner_queue_get": time.time() - start})
                    # Each process holds its own environments' rows; together they are one array, over all devices.
                    rollout = jax.tree.map(partial(jax.make_array_from_process_local_data, by_env), rollout)
                    slots.append(evaluate_batch(state, rollout, args))
                if call % every == 0:  # another rollout may begin
                    exchange.room.release()
                batch, start = slots[call % N], time.time()
                if args.value_target == "live":
                    batch = evaluate_batch(state, batch.rollout, args, batch.target_logits)
                rng = np.random.default_rng((args.seed, sgd_steps))  # so a resumed run goes on with the same stream
                rows = deal_rows(rng, visits, len(batch.rollout.action), args)
                state, losses = learn(state, batch, rows, impact_loss, args)
                sgd_steps += len(rows)
                if (call + 1) % every == 0:
                    exchange.publish(state.params, sgd_steps)
                last_kls.append(losses["losses/kl_target_live"])
                run.add(losses | {"time/learner_update": time.time() - start})
            global_step += generation_steps
            run.add({}, SPS=generation_steps)
            # The target changes here and only here: it has evaluated all that this generation learned from.
            update_target = global_step // generation_steps % args.target_period == 0
            state = end_generation(state, tuple(last_kls), args, update_target)
            if run.due(global_step, generation_steps, total_steps):
                run.log(state, {"charts/learning_rate": float(rate(sgd_steps))},
                        "step {step:>10,} {share:4.0%}   return (20 games) {charts/episodic_return_20:8.2f}   "
                        "SPS {charts/SPS:6.0f}   lag {charts/policy_lag:3.0f}   value loss {losses/value_loss:7.4f}   "
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
