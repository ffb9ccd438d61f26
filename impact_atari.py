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

All of the algorithm is here: three policies (worker, target, live), the clipped surrogate with the IMPACT ratio,
V-GAE, the circular buffer, the optional KL penalty, and the paper's ablations as flags (--ratio, --value-target).
Deliberately different from the paper or from its author's code:
  1. The target's critic computes the advantages, as the paper says; the author used the live one (--value-target live).
  2. All T rewards of a rollout count: it holds T+1 observations, the last one for bootstrapping only.
  3. A time limit is not a death: it bootstraps. EnvPool's dummy row after an end is masked out of everything.
  4. The shallow network's convolutions are VALID, initialised orthogonally, and read pixels / 255.

    python impact_atari.py --env-id Pong-v5                          one CPU or one GPU
    python impact_atari.py --num-envs 64 --learner-devices 0 1 2 3   data-parallel learner on four devices
    python impact_atari.py --distributed                             several hosts: the same command once on each
"""

import os
from importlib import metadata

# XLA's CPU backend runs convolutions on one core unless this fusion is off (3 to 4 times faster). An XLA that does not
# know a flag aborts, hence the versions. It concerns no other backend, and your own XLA_FLAGS come last, so they win.
YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type=-individual_convolution"
if metadata.version("jaxlib").startswith(("0.10.", "0.12.")) and YNN_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{YNN_FLAG} {os.environ.get('XLA_FLAGS', '')}".strip()

import json
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensorboardX import SummaryWriter


def refuse(message: str, code: int = 2):
    """Ends the program with one line that names the flag or the file and the remedy."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


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
    queue_size: int = 1  # rollouts that may wait beside those in progress; with --no-concurrency exactly the policy lag
    concurrency: bool = True  # act and learn at the same time, or by turns: then bit-identical between runs on a CPU
    actor_device: int = 0  # device of the actors' policy, an index into the process's devices (-1: the host's CPU)
    learner_devices: tuple[int, ...] = (0,)  # devices of the learner, indices into the process's devices
    distributed: bool = False  # call jax.distributed.initialize(): one process per host, the same command on each
    coordinator_address: str | None = None  # host:port of process 0, where JAX cannot find it itself
    num_processes: int | None = None  # number of processes, likewise
    process_id: int | None = None  # index of this process, likewise

    def __post_init__(self):
        may_be_0 = "seed queue_size eval_episodes vf_coef ent_coef kl_coef gamma gae_lambda process_id"
        may_be_0 += " repeat_action_probability"
        for name, x in asdict(self).items():
            low = -1 if name == "actor_device" else 0 if name in may_be_0.split() else 1e-12
            high = 1 if name in ("gamma", "gae_lambda", "repeat_action_probability") else 10**9
            if type(x) in (int, float) and not low <= x <= high:  # NaN does not hold either
                at_least = "above 0" if 0 < low < 1 else f"at least {low}"
                refuse(f"--{name.replace('_', '-')} {x}: must be {at_least} and at most {high:,}")
        if not self.distributed and (self.coordinator_address, self.num_processes, self.process_id) != (None,) * 3:
            refuse("--coordinator-address, --num-processes, --process-id: need --distributed")
        if self.capture_video and not self.eval_episodes:
            refuse("--capture-video: films an evaluated game, so --eval-episodes must be above 0")
        num_devices = len(self.learner_devices)
        if num_devices == 0 or min(self.learner_devices) < 0 or len({*self.learner_devices}) < num_devices:
            refuse("--learner-devices: must be different indices, for example --learner-devices 0 1")
        if self.num_steps % self.num_minibatches:
            refuse(f"--num-steps {self.num_steps}: must be a multiple of --num-minibatches {self.num_minibatches}")
        if self.num_envs % num_devices:
            refuse(f"--num-envs {self.num_envs}: must be a multiple of the {num_devices} --learner-devices")


# --- environment ------------------------------------------------------------------------------------------------------
def make_env(args: Args, num_envs: int, entropy: tuple[int, ...], render: bool = False):
    """EnvPool's vector of one Atari game: observations `[num_envs, 4, frame, frame]` uint8, the oldest frame first.

    The seeds are drawn from `entropy`: EnvPool would give environment i seed + i, and two runs with neighbouring seeds
    would share nearly all of their games."""
    if args.env_id not in envpool.list_all_envs():
        refuse(f"--env-id {args.env_id}: unknown to EnvPool; Atari games are called Pong-v5, SpaceInvaders-v5, ...")
    seeds = np.random.SeedSequence(entropy).generate_state(num_envs) >> 1
    try:
        env = envpool.make(
            args.env_id, env_type="gymnasium", num_envs=num_envs, num_threads=min(num_envs, os.cpu_count() or 1),
            seed=seeds.tolist(), img_height=args.frame_size, img_width=args.frame_size, stack_num=4, gray_scale=True,
            episodic_life=args.episodic_life, repeat_action_probability=args.repeat_action_probability,
            max_episode_steps=args.max_episode_steps, reward_clip=True,  # info["reward"] stays unclipped
            render_mode="rgb_array" if render else None,
        )  # fmt: skip
        if hasattr(env.action_space, "n"):  # discrete
            return env
    except TypeError:  # not an Atari game: its settings know no frame size
        pass
    refuse(f"--env-id {args.env_id}: this script needs four stacked grey frames and discrete actions, as in Pong-v5")


def step_env(env, action: np.ndarray) -> tuple[np.ndarray, ...]:
    """One step of all environments: obs, clipped reward, terminated, truncated, game over, unclipped reward.

    EnvPool resets an ended episode in the *next* step, which ignores its action. So the observation that comes with an
    end is the true last one, and the row that begins with it is a dummy. A lost life terminates, but not the game."""
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


def traverse(take_oldest: Callable[[], Any], num_slots: int, passes: int) -> Iterator[Any]:
    """One generation of the circular buffer C(N, K): N batches are taken in the first round, each is visited K times.

    The slots fill in the first round and expire together after the last, so no batch outlives the generation: there the
    target network may change without making the evaluations stored in the slots stale."""
    slots = [None] * num_slots
    for visited in range(passes):
        for i in range(num_slots):
            if visited == 0:
                slots[i] = take_oldest()
            yield slots[i]


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
        G_t     = V(s_t) + A_t

    value `[T+1]`; reward, discount, cut, log_w `[T]`. If w = 1 it is GAE(lambda), if lambda = 1 V-trace's advantage.
    Lambda is kept out of the discount: folded in, it would bias the value target."""
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
def make_batch(rollout: Rollout, target_logits: jax.Array, value: jax.Array, args: Args) -> Batch:
    """Advantages and value targets from values `[B, T+1]`; always with target over worker, never live over worker."""
    log_w = log_prob(target_logits, rollout.action) - rollout.logp
    one_env = partial(v_gae, lambda_=args.gae_lambda, c_bar=args.c_bar)
    returned = jax.vmap(one_env)(value, rollout.reward, rollout.discount, rollout.cut, log_w)
    return Batch(rollout, target_logits, *returned)


@partial(jax.jit, static_argnames="args")
def first_visit(state: TrainState, rollout: Rollout, args: Args) -> Batch:
    """The target network evaluates a new batch. That holds for all K visits: the target changes only after the last."""
    logits, value = forward(state.apply_fn, state.target_params, rollout.obs)
    return make_batch(rollout, logits[:, :-1], value, args)


@partial(jax.jit, static_argnames="args")
def with_live_critic(state: TrainState, batch: Batch, args: Args) -> Batch:
    """--value-target live: before each visit the live critic computes advantages and value targets anew."""
    _, value = forward(state.apply_fn, state.params, batch.rollout.obs)
    return make_batch(batch.rollout, batch.target_logits, value, args)


def deal_rows(rng: np.random.Generator, visits: int, num_envs: int, args: Args) -> np.ndarray:
    """Which rows go into which SGD step: `[visits * num_minibatches, num_envs, num_steps / num_minibatches]`.

    Every environment's rows are shuffled by themselves and dealt out evenly. So no row ever leaves its device, and the
    result does not depend on the number of devices or processes."""
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
        self.args, self.apply_fn, self.key, self.steps = args, apply_fn, key, 0
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
    """What actor threads and learner share: a bounded queue, the newest parameters, and a way to stop each other.

    The bound counts rollouts from their beginning: an actor that finds no room waits before it reads the parameters,
    not after it has used them. So the policy lag is no longer than the rollouts in flight. The learner takes the oldest
    and makes room for another when that one is to begin."""

    def __init__(self, max_in_flight: int):
        self.rollouts, self.room = queue.SimpleQueue(), threading.Semaphore(max_in_flight)
        self.published: tuple[Any, int] = (None, 0)  # parameters, SGD steps that made them; replaced as a whole
        self.stop, self.error = threading.Event(), None

    def publish(self, params, sgd_steps: int, device: jax.Device):
        """Hands the actors a copy of the replicated parameters: the learner's own are donated, so deleted, next."""
        if self.error is not None:
            raise self.error
        copy = jax.tree.map(lambda x: jnp.copy(x.addressable_data(0)), params)
        self.published = jax.block_until_ready(jax.device_put(copy, device)), sgd_steps  # syncs, or actors would wait

    def act(self, worker):
        """One rollout with the newest parameters, into the queue."""
        params, sgd_steps = self.published
        self.rollouts.put((*worker.rollout(params), sgd_steps))

    def take(self) -> tuple:
        """What the oldest waiting rollout consists of, and its parameters' SGD steps; raises what an actor died of."""
        while self.error is None:
            try:
                return self.rollouts.get(timeout=0.2)
            except queue.Empty:
                continue
        raise self.error


def actor_thread(worker, exchange: Exchange):
    """Acts until told to stop. What goes wrong here reaches the learner through the exchange."""
    try:
        while not exchange.stop.is_set():
            if exchange.room.acquire(timeout=0.2):
                exchange.act(worker)
    except BaseException as error:
        exchange.error = error


# --- logging, saving, evaluation --------------------------------------------------------------------------------------
class Logger:
    """metrics.csv (global_step,wall_seconds,metric,value), TensorBoard events, and wandb if asked for."""

    def __init__(self, args: Args, run_dir: Path, step: int, wall_seconds: float):
        path, self.started = run_dir / "metrics.csv", time.time() - wall_seconds
        rows = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
        # A resumed run forgets the rows that its checkpoint has not seen, and a last line cut short by a kill.
        rows = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= step]
        write_whole(path, ("global_step,wall_seconds,metric,value\n" + "".join(rows)).encode())
        self.csv, self.tensorboard, self.wandb = path.open("a"), SummaryWriter(str(run_dir), purge_step=step + 1), None
        if args.track:
            import wandb

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "id": run_dir.name}
            self.wandb = wandb.init(config=asdict(args), resume="allow", reinit="finish_previous", **names)
            self.wandb.define_metric("*", step_metric="global_step")

    def log(self, step: int, metrics: dict[str, float]):
        for name, value in metrics.items():
            self.csv.write(f"{step},{time.time() - self.started:.2f},{name},{value:.8g}\n")
            self.tensorboard.add_scalar(name, value, step)
        self.csv.flush()
        if self.wandb:
            self.wandb.log(metrics | {"global_step": step})


def make_run_dir(args: Args) -> Path:
    """Creates the run folder, with the run's provenance in it: arguments, versions, a copy of this script."""
    stamp = int(time.time())
    while (run_dir := Path(args.runs_dir) / f"{args.env_id}__{args.exp_name}__{args.seed}__{stamp}").exists():
        stamp += 1
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "envpool")}
    versions |= {"python": sys.version.split()[0], "device": jax.devices()[0].device_kind, "git_commit": commit}
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        (run_dir / "versions.json").write_text(json.dumps(versions | {"cpus": os.cpu_count()}, indent=2) + "\n")
        shutil.copy(__file__, run_dir)
    except OSError as error:
        refuse(f"--runs-dir {args.runs_dir}: cannot write {run_dir} ({error.strerror}); name a writable folder")
    return run_dir


def write_whole(path: Path, data: bytes):
    """Replaces a file as a whole: a kill at any moment leaves the old one or the new one."""
    path.with_suffix(".tmp").write_bytes(data)
    os.replace(path.with_suffix(".tmp"), path)


def save_checkpoint(run_dir: Path, state, progress: dict):
    """The whole state and the counters, with a checksum so that a damaged file cannot pass."""
    content = {"script": Path(__file__).stem, "progress": progress, "state": flax.serialization.to_state_dict(state)}
    data = flax.serialization.msgpack_serialize(jax.device_get(content))
    write_whole(run_dir / "checkpoint.msgpack", zlib.crc32(data).to_bytes(4, "big") + data)


def read_checkpoint(flag: str, folder: str) -> tuple[dict, dict]:
    """Arguments and checkpoint of a run of this script; refuses a missing, damaged or foreign one."""
    run_dir = Path(folder)
    try:
        saved, data = json.loads((run_dir / "args.json").read_text()), (run_dir / "checkpoint.msgpack").read_bytes()
    except (OSError, ValueError) as error:
        refuse(f"{flag} {run_dir}: cannot read its args.json and checkpoint.msgpack ({error!r}); name a run's folder")
    if zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
        refuse(f"{flag} {run_dir}: checkpoint.msgpack is damaged; restore it from a copy, or start a new run")
    checkpoint = flax.serialization.msgpack_restore(data[4:])
    if checkpoint["script"] != Path(__file__).stem:
        refuse(f"{flag} {run_dir}: it is a run of {checkpoint['script']}.py; name one of this script")
    return {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}, checkpoint


def load_checkpoint(args: Args) -> tuple[Args, dict]:
    """The settings and the checkpoint of the run to resume. It keeps its settings: a flag set to something else than
    its default is refused, not ignored."""
    saved, checkpoint = read_checkpoint("--resume", args.resume)
    of_the_process = {"resume", "coordinator_address", "num_processes", "process_id"} & asdict(args).keys()
    if saved.keys() != asdict(args).keys():
        refuse(f"--resume {args.resume}: cannot read its args.json, which has other fields than this script's")
    resumed = Args(**saved | {name: getattr(args, name) for name in of_the_process})
    for name, given in asdict(args).items():
        if name not in of_the_process and given not in (getattr(Args, name), getattr(resumed, name)):
            refuse(f"--{name.replace('_', '-')} {given}: a resumed run keeps its settings; leave the flag out")
    return resumed, checkpoint


def evaluate(args: Args, apply_fn: Callable, params, key: jax.Array, run_dir: Path | None) -> np.ndarray:
    """Unclipped returns of whole games, actions sampled: the first game of each of `eval_episodes` fresh environments,
    so that short games are not over-represented. They are those of training: a policy that never had to serve the ball
    after a lost life would otherwise stand still there. Writes a GIF of one (its first 3,000 steps) if asked for."""
    n = args.eval_episodes
    env = make_env(args, n, (args.seed, 2**31), render=args.capture_video)
    (obs, _), returns, over, frames, step = env.reset(), np.zeros(n), np.zeros(n, bool), [], 0
    while not over.all():
        if args.capture_video and run_dir and not over[0] and step < 3000:
            frames.append(env.render()[0])
        action, _ = jax.device_get(policy_step(apply_fn, params, obs, key, step))
        obs, *_, game_over, game_reward = step_env(env, action)
        returns, over, step = returns + game_reward * ~over, over | game_over, step + 1
    if frames:
        from PIL import Image

        first, *rest = map(Image.fromarray, frames)
        first.save(run_dir / "eval.gif", save_all=True, append_images=rest, duration=67)  # ms: 4 frames at 60 Hz
    return returns


# --- main -------------------------------------------------------------------------------------------------------------
def main(args: Args) -> dict:
    """Trains, evaluates, saves. Returns final_return (mean of the last 20 games), eval_return, global_step, run_dir."""
    progress, checkpoint = {"global_step": 0, "wall_seconds": 0.0, "last_returns": []}, None
    if args.resume:
        args, checkpoint = load_checkpoint(args)
        progress = checkpoint["progress"]
    for flag, wanted, package in ("--track", args.track, "wandb"), ("--capture-video", args.capture_video, "pillow"):
        if wanted and not any(metadata.distributions(name=package)):
            refuse(f"{flag}: needs the package {package}; run pip install {package}, or leave the flag out")

    # --- devices: each process has its own; the learner's devices of all processes form one mesh ---
    if args.distributed:
        where = (args.coordinator_address, args.num_processes, args.process_id)
        try:
            jax.distributed.initialize(*where, heartbeat_timeout_seconds=20)  # when a process dies, the others end soon
        except (ValueError, RuntimeError) as error:
            refuse(f"--distributed: {error}; name --coordinator-address, --num-processes and --process-id")
    local = jax.local_devices()
    if max(*args.learner_devices, args.actor_device) >= len(local):
        refuse(f"--learner-devices, --actor-device: only {len(local)} devices here, 0 to {len(local) - 1}")
    actor_device = jax.local_devices(backend="cpu")[0] if args.actor_device < 0 else local[args.actor_device]
    by_process = [[d for d in jax.devices() if d.process_index == p] for p in range(jax.process_count())]
    mesh = Mesh([devices[i] for devices in by_process for i in args.learner_devices], "data")
    replicated, by_env = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    # --- plan ---
    generation_steps = args.buffer_size * args.num_steps * args.num_envs * jax.process_count()
    num_generations = args.total_timesteps // generation_steps
    if num_generations == 0:
        refuse(f"--total-timesteps {args.total_timesteps}: must be at least one generation, {generation_steps} steps")
    if progress.setdefault("generation_steps", generation_steps) != generation_steps:
        refuse(f"--resume {args.resume}: was started with another number of processes; use as many as then")
    planned_sgd_steps = num_generations * args.buffer_size * args.passes * args.num_minibatches

    # --- state ---
    env = make_env(args, 1, (args.seed,))
    network = ActorCritic(args.network, int(env.action_space.n))
    init_key, actor_key, eval_key = jax.random.split(jax.random.key(args.seed), 3)
    params = network.init(init_key, np.zeros((1, *env.observation_space.shape), np.uint8))
    last_rate = 0.0 if args.anneal_lr else args.learning_rate
    rate = optax.linear_schedule(args.learning_rate, last_rate, planned_sgd_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(rate, eps=1e-5))
    state = TrainState.create(
        apply_fn=network.apply, params=params, tx=optimizer, target_params=params, kl_coef=np.float32(args.kl_coef)
    )
    if checkpoint:
        state = flax.serialization.from_state_dict(state, checkpoint["state"])
    # By way of numpy copies: live and target parameters begin equal, but must not share memory.
    state = jax.device_put(jax.tree.map(np.array, state), replicated)
    global_step, sgd_steps = progress["global_step"], int(state.step)
    generation = global_step // generation_steps

    # --- actors; a resumed run plays new games, since the generation is part of their seeds ---
    exchange, workers = Exchange(args.buffer_size - 1 + args.num_actors + args.queue_size), []
    exchange.publish(state.params, sgd_steps, actor_device)
    for i in range(args.num_actors):
        entropy = (args.seed, jax.process_index(), i, generation)
        key = jax.random.fold_in(actor_key, np.random.SeedSequence(entropy).generate_state(1)[0])
        workers.append(Worker(args, network.apply, entropy, key))
    threads = [threading.Thread(target=actor_thread, args=(worker, exchange), daemon=True) for worker in workers]

    # --- run folder and log; only process 0 writes ---
    run_dir = logger = None
    if jax.process_index() == 0:
        run_dir = Path(args.resume) if args.resume else make_run_dir(args)
        logger = Logger(args, run_dir, global_step, progress["wall_seconds"])
        pixels, limit = f"{args.frame_size} x {args.frame_size}", args.max_episode_steps
        life = "a training episode" if args.episodic_life else "nothing"
        print(f"run folder   {run_dir}\n"
              f"environment  {args.env_id}: 4 grey frames of {pixels}, {network.num_actions} actions (minimal), limit "
              f"{limit} steps = {4 * limit} frames, up to 30 no-ops, fire on reset, a lost life ends {life}, "
              f"sticky actions {args.repeat_action_probability}, rewards clipped for learning only\n"
              f"plan         {args.num_actors} x {args.num_envs} environments, learner on {mesh.size} x "
              f"{local[0].device_kind}, {num_generations} x {generation_steps} steps, from {global_step}"
              f"{' (resumed: the environments begin new games)' if checkpoint else ''}")  # fmt: skip
    pending, last_kls = defaultdict(list), deque(maxlen=args.buffer_size)
    last_returns = deque(progress["last_returns"], maxlen=20)

    def take_oldest() -> Batch:
        """From the queue to the learner's devices; without concurrency the actors act first, by turns."""
        start = time.time()
        while not args.concurrency and exchange.rollouts.qsize() <= args.queue_size:
            workers.append(workers.pop(0))
            exchange.act(workers[-1])
        rollout, metrics, behaviour_sgd_steps = exchange.take()
        last_returns.extend(metrics["charts/episodic_return"])
        metrics["charts/policy_lag"].append(sgd_steps - behaviour_sgd_steps)
        metrics["time/learner_queue_get"].append(time.time() - start)
        for name, values in metrics.items():
            pending[name] += values
        # Each process holds its own environments' rows; together they are one array, sharded over all learner devices.
        rollout = jax.tree.map(lambda x: jax.make_array_from_process_local_data(by_env, x), rollout)
        return first_visit(state, rollout, args)

    # --- learn, until the end or the first Ctrl-C (or SIGTERM); a second one does not wait for the generation's end ---
    interrupted, stop = threading.Event(), False

    def interrupt(*_):
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    in_main = threading.current_thread() is threading.main_thread()
    old_handlers = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    # A single slot's K visits follow one another: one call of the learner, if nothing changes between them.
    visits = args.passes if args.buffer_size == 1 and args.value_target == "target" else 1
    every = args.passes // visits  # calls from one rollout's beginning to the next: N in all, evenly over a generation
    logged_at, logged_step = time.time(), global_step
    try:
        for thread in threads if args.concurrency else ():
            thread.start()
        while generation < num_generations and not stop:
            for visit, batch in enumerate(traverse(take_oldest, args.buffer_size, every)):
                if visit % every == 0:
                    exchange.room.release()
                start = time.time()
                rng = np.random.default_rng((args.seed, sgd_steps))  # so a resumed run goes on with the same stream
                if args.value_target == "live":
                    batch = with_live_critic(state, batch, args)
                rows = deal_rows(rng, visits, len(batch.rollout.action), args)
                state, metrics = learn(state, batch, rows, impact_loss, args)
                sgd_steps += visits * args.num_minibatches
                if (visit + 1) % every == 0:
                    exchange.publish(state.params, sgd_steps, actor_device)
                last_kls.append(metrics["losses/kl_target_live"])
                for name, value in (metrics | {"time/learner_update": time.time() - start}).items():
                    pending[name].append(value)
            generation += 1
            global_step = generation * generation_steps
            update_target = generation % args.target_period == 0
            state = end_generation(state, tuple(last_kls), args, update_target)
            stop = interrupted.is_set()
            if args.distributed:  # all processes leave the loop together: any that stayed would wait for ever
                stop = bool(multihost_utils.process_allgather(np.array(stop)).any())

            last = generation == num_generations or stop
            save_now = last or global_step % args.checkpoint_every < generation_steps
            if save_now or global_step % args.log_every < generation_steps:
                means = {name: float(np.mean(x)) for name, x in jax.device_get(dict(pending)).items() if x}  # sync
                pending.clear()
                bad = [name for name, value in means.items() if not np.isfinite(value)]
                if bad:
                    good = run_dir / "checkpoint.msgpack" if run_dir else Path()
                    good = f"last good checkpoint: {good}" if good.is_file() else "no checkpoint was saved before"
                    refuse(f"{bad[0]} is not finite at step {global_step}, so the run stopped without saving; {good}; "
                           "a new run with a lower --learning-rate may help", code=1)  # fmt: skip
                speed = (global_step - logged_step) / (time.time() - logged_at)
                logged_at, logged_step = time.time(), global_step
                means |= {"charts/SPS": speed, "charts/learning_rate": float(rate(sgd_steps))}
                if len(last_returns) == 20:
                    means["charts/episodic_return_20"] = float(np.mean(last_returns))
                if logger:
                    logger.log(global_step, means)
                    left = (num_generations - generation) * generation_steps / speed / 60
                    print(f"step {global_step:>10,} {generation / num_generations:4.0%}   return (20 games) "
                          f"{means.get('charts/episodic_return_20', np.nan):8.2f}   SPS {speed:6.0f}   lag "
                          f"{means['charts/policy_lag']:3.0f}   value loss {means['losses/value_loss']:7.4f}   entropy "
                          f"{means['losses/entropy']:5.3f}   {left:4.0f} min left", flush=True)  # fmt: skip
            if save_now and logger:
                progress |= {"global_step": global_step, "last_returns": list(last_returns)}
                progress["wall_seconds"] = time.time() - logger.started
                save_checkpoint(run_dir, state, progress)
    except BaseException as error:
        if args.distributed:  # an orderly exit would wait minutes for the other processes
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            os._exit(getattr(error, "code", 1))
        raise
    finally:
        exchange.stop.set()
        for s, handler in old_handlers.items():
            signal.signal(s, handler)
        for thread in threads:
            if thread.is_alive():
                thread.join(timeout=5)

    # --- evaluate and save ---
    result = {"final_return": float(np.mean(last_returns)) if last_returns else None, "eval_return": None}
    result |= {"global_step": global_step, "run_dir": run_dir}
    if generation < num_generations:
        if logger:
            print(f"interrupted at step {global_step}; continue with --resume {run_dir}")
        return result
    params = jax.tree.map(lambda x: x.addressable_data(0), state.params)
    if args.save_model and logger:
        model = {"format": f"{Path(__file__).stem} 1", "args": json.dumps(asdict(args))}
        model["params"] = jax.device_get(params)
        write_whole(run_dir / "model.msgpack", flax.serialization.msgpack_serialize(model))
    if args.eval_episodes:
        returns = evaluate(args, network.apply, params, eval_key, run_dir)
        result["eval_return"] = float(returns.mean())
        if logger:
            logger.log(global_step, {"eval/episodic_return": returns.mean(), "eval/episodic_return_std": returns.std()})
            print(f"evaluation: {returns.mean():.2f} +- {returns.std():.2f} over {len(returns)} whole games; {run_dir}")
    return result


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:  # before the first step, during the evaluation, or the second Ctrl-C
        refuse("interrupted", code=130)
