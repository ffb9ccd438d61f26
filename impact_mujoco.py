# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12.8", "optax>=0.2.6", "chex>=0.1.90", "numpy>=2.0", "envpool>=1.2.5",
#                 "tyro>=1.0", "tensorboardX>=2.6", "wandb>=0.22", "pillow>=11.0"]
# ///
"""IMPACT on MuJoCo: asynchronous PPO with a target network, a circular buffer and truncated importance sampling.

Paper: Luo et al., "IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target Networks", ICLR 2020.

    actor threads ── rollouts ──> bounded queue ──> circular buffer C(N, K) ──> SGD steps ──> live parameters
          ▲     (EnvPool, policy)                   first visit: the target network             │
          │                                         computes the advantages (V-GAE)             │
          └──────────── copy of the live parameters and of the normaliser after the SGD steps ──┘
                        after every N*K visits: target parameters <- live parameters

The continuous half of the paper: a Gaussian policy, a value network of its own, a running observation normaliser, and
the KL penalty with its adaptive weight. Deliberately different from the paper or from its author's code:
  1. The target's critic computes the advantages, as the paper says; the author used the live one (--value-target live).
  2. The time limit is not a death: it bootstraps. EnvPool's dummy row after an end is masked out of everything.
  3. The normaliser is frozen for each rollout, and rollouts hold normalised observations: so worker, target and live
     policy see the same input, and their ratio is 1 when their parameters are.
  4. Generations are short, 2,048 steps, for budgets of 1 to 10 million (the paper's half a million: see the README).
  5. V-GAE bounds its weights by 2. The paper's 1 (--c-bar 1) cuts a trace at every step, at a KL of .03 by a tenth.
  6. Rewards are divided by the running standard deviation of the discounted return (--no-scale-reward).

What is not the algorithm (`Run`, `refuse`, `play`, `make_shardings`) is in the appendix, the same in every script.

    python impact_mujoco.py --env-id HalfCheetah-v4                  one CPU or one GPU
    python impact_mujoco.py --num-envs 64 --learner-devices 0 1 2 3  data-parallel learner on four devices
    python impact_mujoco.py --distributed                            several hosts: the same command once on each
"""

import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
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
    """IMPACT on MuJoCo. A step is an environment step: one decision of the agent."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of environments, parameters and sampling
    total_timesteps: int = 1_000_000  # length of the run in environment steps, rounded down to whole generations
    runs_dir: str = "runs"  # folder that receives the run folder
    log_every: int = 10_000  # environment steps between two lines on the console and rows of metrics
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project_name: str = "impact"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    save_model: bool = True  # write model.msgpack (parameters and arguments) at the end
    checkpoint_every: int = 100_000  # environment steps between two checkpoints
    resume: str | None = None  # run folder to continue, with its own settings
    eval_episodes: int = 10  # whole episodes to play at the end, in fresh environments, actions sampled (0: none)
    capture_video: bool = False  # write a GIF of one evaluated episode (needs OpenGL)

    # --- environment ---
    env_id: str = "HalfCheetah-v4"  # EnvPool's name of a task with Box observations and actions
    num_envs: int = 16  # B, environments of each actor thread; a rollout of num_steps in each is a train batch
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation, clipped at +-10
    scale_reward: bool = True  # divide rewards by the running standard deviation of the discounted return, same clip

    # --- algorithm ---
    free_log_std: bool = True  # log-std is a parameter for each action dimension; otherwise an output of the network
    learning_rate: float = 3e-4  # step size of Adam
    anneal_lr: bool = True  # lower the step size linearly to 0 over the planned SGD steps
    gamma: float = 0.99  # discount per environment step
    gae_lambda: float = 0.95  # lambda of V-GAE
    c_bar: float = 2.0  # bound of pi_target / pi_worker in V-GAE (above 1 lag does not shorten its traces)
    num_steps: int = 32  # T, environment steps of each environment in a rollout
    num_minibatches: int = 1  # SGD steps per visit of a train batch, each on an equal share of each environment's rows
    buffer_size: int = 4  # N, slots of the circular buffer, in train batches (the paper, with a long budget: 16)
    passes: int = 20  # K, visits of each train batch
    target_period: int = 1  # generations (of N*K visits) between two updates of the target network
    ratio: Literal["impact", "target", "worker"] = "impact"  # pi / max(pi_tgt, pi_w / rho), pi / pi_tgt, or pi / pi_w
    rho: float = 2.0  # bound of pi_worker / pi_target in the IMPACT ratio
    value_target: Literal["target", "live"] = "target"  # critic that computes advantages and value targets
    clip_coef: float = 0.3  # epsilon of the clipped surrogate
    norm_adv: bool = True  # normalise the advantages of each minibatch
    vf_coef: float = 0.5  # weight of the value loss (half the mean squared error)
    ent_coef: float = 0.0  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # bound of the gradient's global norm
    kl_coef: float = 1.0  # initial weight of KL(target || live), adapted once per generation (0: no KL term)
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
        check_numbers(self, may_be_0, "gamma gae_lambda", actor_device=-1)
        if self.capture_video and not self.eval_episodes:
            refuse("--capture-video: films an evaluated episode, so --eval-episodes must be above 0")
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
def make_task(args: Args, num_envs: int, entropy: tuple[int, ...], render: bool = False):
    """EnvPool's vector of one continuous-control task. The seeds are drawn from `entropy`: EnvPool would give
    environment i seed + i, and two runs with neighbouring seeds would share nearly all of their episodes."""
    if args.env_id not in envpool.list_all_envs():
        refuse(f"--env-id {args.env_id}: unknown to EnvPool; tasks are called HalfCheetah-v4, HumanoidRun-v1, ...")
    seeds = np.random.SeedSequence(entropy).generate_state(num_envs) >> 1
    threads = max(1, min(num_envs, (os.cpu_count() or 1) // args.num_actors))
    if render:  # tried in a process of its own, since MuJoCo ends the one in which it finds no OpenGL
        code = f"import envpool; env = envpool.make({args.env_id!r}, env_type='gymnasium', render_mode='rgb_array'); "
        if subprocess.run([sys.executable, "-c", code + "env.reset(); env.render()"], capture_output=True).returncode:
            refuse("--capture-video: MuJoCo finds no OpenGL library to draw with; install one, or leave the flag out")
    env = envpool.make(
        args.env_id, env_type="gymnasium", num_envs=num_envs, num_threads=threads, seed=seeds.tolist(),
        **({"render_mode": "rgb_array"} if render else {}),
    )  # fmt: skip
    if not hasattr(env.action_space, "low"):
        refuse(f"--env-id {args.env_id}: has discrete actions; use a task with one Box of actions, or impact_atari.py")
    return env


def flat(obs) -> np.ndarray:
    """Observations `[B, D]` float32 of an array `[B, ...]`, or of a dictionary of such (DeepMind's control suite)."""
    parts = [obs[name] for name in sorted(obs)] if isinstance(obs, dict) else [obs]
    obs = np.concatenate([np.reshape(part, (len(part), -1)) for part in parts], axis=1).astype(np.float32)
    if not np.isfinite(obs).all():
        refuse("--env-id: the environment returned an observation that is not finite; choose another task or version")
    return obs


def step_task(env, action: np.ndarray) -> tuple[np.ndarray, ...]:
    """One step of all environments: obs `[B, D]`, reward, terminated, truncated, either, reward. Actions of +-1 are the
    space's bounds; the sample is clipped to them here and nowhere else: its log-probability is the Gaussian's.

    EnvPool resets an ended episode in the *next* step, which ignores its action. So the observation that comes with an
    end is the true last one, and the row that begins with it is a dummy."""
    low, high = env.action_space.low, env.action_space.high
    action = low + (np.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
    obs, reward, terminated, truncated, _ = env.step(action.astype(env.action_space.dtype))
    if not np.isfinite(reward).all():
        refuse("--env-id: the environment returned a reward that is not finite; choose another task or version")
    return flat(obs), reward, terminated, truncated & ~terminated, terminated | truncated, reward


# --- normaliser -------------------------------------------------------------------------------------------------------
@flax.struct.dataclass
class Moments:
    """Count, mean and summed squared deviation of everything seen: scalar, `[D]` and `[D]` (or scalars), float64."""

    count: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @staticmethod
    def of(x: np.ndarray) -> "Moments":
        """Of the rows of x, `[n, D]` or `[n]`; n may be 0."""
        x = np.asarray(x, np.float64)
        mean = x.sum(0) / max(len(x), 1)
        return Moments(np.float64(len(x)), mean, ((x - mean) ** 2).sum(0))

    def merge(self, other: "Moments") -> "Moments":
        """Of both together (Chan, Golub and LeVeque, 1979)."""
        count, delta = self.count + other.count, other.mean - self.mean
        share = other.count / max(count, 1.0)
        return Moments(count, self.mean + delta * share, self.m2 + other.m2 + delta**2 * self.count * share)

    def std(self) -> np.ndarray:
        return np.sqrt(self.m2 / self.count + 1e-8) if self.count else np.ones_like(self.m2)


def gather_moments(seen):
    """Moments of every process, a list of what each has. As 32-bit words, since JAX would round float64 to float32."""
    leaves, tree = jax.tree.flatten(seen)
    words = multihost_utils.process_allgather([np.atleast_1d(leaf).view(np.uint32) for leaf in leaves])
    return [
        tree.unflatten(np.array(x[p]).view(np.float64).reshape(leaf.shape) for x, leaf in zip(words, leaves))
        for p in range(jax.process_count())
    ]


def scales(moments: tuple[Moments, Moments], norm_obs: bool) -> tuple[jax.Array, ...]:
    """Mean and standard deviation of the observations, and the rewards' divisor, as the actors read them."""
    mean, std = (moments[0].mean, moments[0].std()) if norm_obs else (np.zeros(()), np.ones(()))
    return jax.device_put(tuple(np.float32(x) for x in (mean, std, moments[1].std())))


def normalise(obs: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return ((obs - mean) / std).clip(-10.0, 10.0).astype(np.float32)


# --- network ----------------------------------------------------------------------------------------------------------
class GaussianActorCritic(nn.Module):
    """Observations `[..., D]` to mean and log-std `[..., A]` of a diagonal Gaussian, and state values `[...]`, by two
    separate networks of two tanh layers."""

    num_actions: int
    free_log_std: bool

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        def layers(sizes, x, last_scale):
            for size in sizes[:-1]:
                x = nn.tanh(nn.Dense(size, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
            return nn.Dense(sizes[-1], kernel_init=nn.initializers.orthogonal(last_scale))(x)

        outputs = layers((256, 256, self.num_actions * (1 if self.free_log_std else 2)), obs, 0.01)
        if self.free_log_std:
            log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,))
            policy = outputs, jnp.broadcast_to(log_std, outputs.shape)
        else:
            mean, log_std = jnp.split(outputs, 2, axis=-1)
            policy = mean, log_std.clip(-5.0, 2.0)  # or it could run away, and take the density with it
        return policy, layers((256, 256, 1), obs, 1.0).squeeze(-1)


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
class EvaluatedBatch:
    """A slot of the circular buffer: a rollout, and the target network's evaluation of it."""

    rollout: Rollout
    target_policy: tuple[jax.Array, jax.Array]  # mean and log-std, [B, T, A]
    advantage: jax.Array  # [B, T] A_t
    value_target: jax.Array  # [B, T] G_t


class TrainState(train_state.TrainState):
    """Flax's train state (`step` counts SGD steps, `params` are the live policy and critic), and IMPACT's share."""

    target_params: Any
    kl_coef: jax.Array  # weight of KL(target || live)


# --- the mathematics --------------------------------------------------------------------------------------------------
def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the rows whose mask is True; `where` and not a product, since NaN * 0 is NaN."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def gaussian_log_prob(policy: tuple[jax.Array, jax.Array], action: jax.Array) -> jax.Array:
    """log pi(action), summed over action dimensions: mean, log-std and action `[..., A]`."""
    mean, log_std = policy
    z = (action - mean) * jnp.exp(-log_std)
    return -jnp.sum(z**2 / 2 + log_std + np.log(2 * np.pi) / 2, axis=-1)


def gaussian_entropy(policy: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.sum(policy[1] + (np.log(2 * np.pi) + 1) / 2, axis=-1)


def gaussian_kl(p: tuple[jax.Array, jax.Array], q: tuple[jax.Array, jax.Array]) -> jax.Array:
    """KL(p || q) of diagonal Gaussians, summed over action dimensions."""
    (mean_p, log_std_p), (mean_q, log_std_q) = p, q
    squares = (jnp.exp(2 * log_std_p) + (mean_p - mean_q) ** 2) * jnp.exp(-2 * log_std_q)
    return jnp.sum(log_std_q - log_std_p + squares / 2 - 0.5, axis=-1)


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


def gaussian_impact_loss(params, state: TrainState, batch: EvaluatedBatch, args: Args) -> tuple[jax.Array, dict]:
    """L = -E[surrogate] + c_v E[(V - G)^2] / 2 - c_e E[H(pi)] + k E[KL(pi_target || pi)], means over unmasked rows."""
    rollout, mask = batch.rollout, batch.rollout.mask
    T = mask.shape[1]
    policy, value = state.apply_fn(params, rollout.obs[:, :T])
    chex.assert_equal_shape([policy[0], batch.target_policy[0], rollout.action])

    # Masked rows are overwritten before any arithmetic: a NaN in one would return through the gradient of a product.
    target_policy = jax.tree.map(lambda x: jnp.where(mask[..., None], x, 0.0), batch.target_policy)
    clean = (jnp.where(mask, x, 0.0) for x in (rollout.logp, batch.advantage, batch.value_target))
    logp_worker, advantage, value_target = clean
    if args.norm_adv:
        advantage = advantage - masked_mean(advantage, mask)
        advantage = advantage / jnp.sqrt(masked_mean(advantage**2, mask) + 1e-8)

    action = jnp.where(mask[..., None], rollout.action, 0.0)
    logp, logp_target = gaussian_log_prob(policy, action), gaussian_log_prob(target_policy, action)
    ratio = jnp.exp(log_ratio(logp, logp_target, logp_worker, args.ratio, args.rho).clip(max=20.0))  # never inf
    policy_loss = -masked_mean(surrogate(ratio, advantage, args.clip_coef), mask)
    value_loss = masked_mean((value - value_target) ** 2, mask) / 2
    entropy, kl = masked_mean(gaussian_entropy(policy), mask), masked_mean(gaussian_kl(target_policy, policy), mask)
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
    metrics["kl_coef"] = state.kl_coef
    return loss, {f"losses/{name}": value for name, value in metrics.items()}


# --- learner ----------------------------------------------------------------------------------------------------------
@partial(jax.jit, static_argnames="args")
def evaluate_task_batch(state: TrainState, rollout: Rollout, args: Args, target_policy=None) -> EvaluatedBatch:
    """The target network evaluates a batch at its first visit, for all K of them: it changes only after the last. Or,
    given its policy, the live critic does (--value-target live). The weights are target over worker in either case."""
    params = state.target_params if target_policy is None else state.params
    policy, value = state.apply_fn(params, rollout.obs)
    target_policy = jax.tree.map(lambda x: x[:, :-1], policy) if target_policy is None else target_policy
    log_w = gaussian_log_prob(target_policy, rollout.action) - rollout.logp
    one_env = partial(v_gae, lambda_=args.gae_lambda, c_bar=args.c_bar)
    returned = jax.vmap(one_env)(value, rollout.reward, rollout.discount, rollout.cut, log_w)
    return EvaluatedBatch(rollout, target_policy, *returned)


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


@jax.jit
def fill_buffer(*batches: EvaluatedBatch) -> EvaluatedBatch:
    """The N slots of the circular buffer as one, `[N, B, T, ...]`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *batches)


@partial(jax.jit, static_argnames="args", donate_argnames="state")
def visit(state: TrainState, slots: EvaluatedBatch, order: jax.Array, rows: jax.Array, args: Args):
    """SGD steps on one slot after another: step i on the rows `rows[i]` `[B, n]` of slot `order[i]`."""

    def step(state, which):
        slot, rows = which
        batch = jax.tree.map(lambda x: x[slot], slots)
        if args.value_target == "live":  # before each visit anew
            batch = evaluate_task_batch(state, batch.rollout, args, batch.target_policy)
        if args.num_minibatches > 1:
            batch = take_rows(batch, rows)
        return sgd_step(state, batch, gaussian_impact_loss, args)

    return jax.lax.scan(step, state, (order, rows))


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
def sample_action(apply_fn: Callable, params, obs: jax.Array, key: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
    """Samples actions: normalised obs `[B, D]` to action `[B, A]` and its log-probability `[B]`."""
    (mean, log_std), _ = apply_fn(params, obs)
    action = mean + jnp.exp(log_std) * jax.random.normal(jax.random.fold_in(key, step), mean.shape)
    return action, gaussian_log_prob((mean, log_std), action)


class TaskWorker:
    """A vector of environments, and what it carries from one rollout to the next."""

    def __init__(self, args: Args, apply_fn: Callable, entropy: tuple[int, ...], key: jax.Array):
        self.args, self.apply_fn, self.steps = args, apply_fn, 0
        self.key = jax.random.fold_in(key, np.random.SeedSequence(entropy).generate_state(1)[0])
        self.env = make_task(args, args.num_envs, entropy)
        self.obs = flat(self.env.reset()[0])
        self.ended = np.zeros(args.num_envs, bool)  # the last row ended an episode, so the next one is a dummy
        self.episode_return, self.episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
        self.discounted = np.zeros(args.num_envs)  # running discounted return, for the scale of rewards

    def rollout(self, published) -> tuple[Rollout, dict[str, list[float]], tuple[Moments, Moments]]:
        """T steps with these parameters and this normaliser: arrays that nobody writes again, metrics, and the moments
        of the observations and discounted returns seen."""
        params, scales = published
        mean, std, reward_std = jax.device_get(scales)
        rows, seen, returns, metrics, inference, start = [], [], [], defaultdict(list), 0.0, time.time()
        normalised = normalise(self.obs, mean, std)
        for _ in range(self.args.num_steps):
            asked = time.time()
            sampled = sample_action(self.apply_fn, params, normalised, self.key, self.steps)
            action, logp = jax.device_get(sampled)  # sync
            inference += time.time() - asked
            if not np.isfinite(action).all():
                refuse("the policy's actions are not finite, learning diverged; try a lower --learning-rate", code=1)
            seen.append(self.obs[~self.ended])
            obs, reward, terminated, _, ended, _ = step_task(self.env, action)
            discount = np.where(terminated, 0.0, self.args.gamma).astype(np.float32)
            scaled = (reward / reward_std).clip(-10.0, 10.0) if self.args.scale_reward else reward
            rows.append((normalised, action, logp, np.float32(scaled), discount, ended, ~self.ended))
            self.discounted = reward + self.args.gamma * self.discounted * ~self.ended
            self.episode_return += reward
            self.episode_length += ~self.ended
            metrics["charts/episodic_return"] += self.episode_return[ended].tolist()
            metrics["charts/episodic_length"] += self.episode_length[ended].tolist()
            self.episode_return[ended], self.episode_length[ended] = 0, 0
            returns.append(self.discounted[~self.ended])
            self.obs, self.ended, self.steps = obs, ended, self.steps + 1
            normalised = normalise(obs, mean, std)
        obs, *columns = zip(*rows)
        rollout = Rollout(np.stack([*obs, normalised], 1), *(np.stack(column, 1) for column in columns))
        moments = Moments.of(np.concatenate(seen)), Moments.of(np.concatenate(returns))
        metrics |= {"time/actor_rollout": [time.time() - start], "time/actor_inference": [inference]}
        return rollout, metrics, moments


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

    env = make_task(args, 1, (args.seed,), render=args.capture_video)
    network = GaussianActorCritic(env.action_space.shape[0], args.free_log_std)
    example = flat(env.reset()[0])
    init_key, actor_key, eval_key = jax.random.split(jax.random.key(args.seed), 3)
    params = network.init(init_key, example)
    rate = optax.linear_schedule(args.learning_rate, 0.0 if args.anneal_lr else args.learning_rate, planned_sgd_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(rate, eps=1e-5))
    impact = {"target_params": params, "kl_coef": np.float32(args.kl_coef)}
    state = run.restore(TrainState.create(apply_fn=network.apply, params=params, tx=optimizer, **impact), replicated)
    global_step, sgd_steps = run.step, int(state.step)
    moments = Moments.of(example[:0]), Moments.of(example[:0, 0])  # of observations, of discounted returns
    if args.resume and "moments" not in run.progress:
        refuse(f"--resume {args.resume}: its checkpoint has no normaliser; start a new run")
    if args.resume:
        moments = flax.serialization.from_state_dict(moments, run.progress["moments"])

    # A resumed run plays new games, since the generation is part of their seeds.
    entropies = [(args.seed, jax.process_index(), i, global_step // generation_steps) for i in range(args.num_actors)]
    workers = [TaskWorker(args, network.apply, entropy, actor_key) for entropy in entropies]
    exchange = Exchange(N - 1 + args.num_actors + args.queue_size, actor_device)
    exchange.publish((state.params, scales(moments, args.norm_obs)), sgd_steps)
    low, high, limit = env.action_space.low.min(), env.action_space.high.max(), env.spec.config.max_episode_steps
    run.open(environment=f"{args.env_id}: {example.shape[1]} observations, {network.num_actions} actions in [{low:g}, "
                         f"{high:g}], limit {limit} steps (bootstrapped), observations normalised: {args.norm_obs}, "
                         f"rewards scaled for learning: {args.scale_reward}",
             plan=f"{args.num_actors} x {args.num_envs} environments, learner on {replicated.mesh.size} x "
                  f"{jax.devices()[0].device_kind}, {total_steps // generation_steps} x {generation_steps} steps, from "
                  f"{global_step}{' (resumed: environments begin new episodes)' if args.resume else ''}")  # fmt: skip

    with closing(exchange), run:
        exchange.start(workers if args.concurrency else [])
        while global_step < total_steps and not run.stop:
            # C(N, K): the slots fill, are visited by turns, K times each, and expire together. Then the target changes:
            # it has evaluated all that is learned from. Meanwhile the actors play the next N batches, one per K visits.
            batches, kls = [], []
            while len(batches) < N:
                start = time.time()
                while not args.concurrency and exchange.rollouts.qsize() <= args.queue_size:  # act by turns
                    workers.append(workers.pop(0))
                    exchange.act(workers[-1])
                rollout, metrics, seen, behaviour_sgd_steps = exchange.take()
                for of_one_process in gather_moments(seen):  # all processes normalise alike
                    moments = tuple(map(Moments.merge, moments, of_one_process))
                run.add(metrics | {"charts/policy_lag": sgd_steps - behaviour_sgd_steps})
                run.add({"time/learner_queue_get": time.time() - start})
                # Each process holds its own environments' rows; together they are one array, over all devices.
                rollout = jax.tree.map(partial(jax.make_array_from_process_local_data, by_env), rollout)
                batches.append(evaluate_task_batch(state, rollout, args))
            slots = fill_buffer(*batches)
            for i in range(N):
                exchange.room.release()
                start = time.time()
                rng = np.random.default_rng((args.seed, sgd_steps))  # so a resumed run goes on with the same stream
                rows = deal_rows(rng, K, args.num_envs * jax.process_count(), args)
                order = (i * K + np.arange(K)).repeat(args.num_minibatches) % N
                state, losses = visit(state, slots, order, rows, args)
                sgd_steps += len(order)
                exchange.publish((state.params, scales(moments, args.norm_obs)), sgd_steps)
                kls.append(losses["losses/kl_target_live"])
                run.add(losses | {"time/learner_update": time.time() - start})
            global_step += generation_steps
            run.add({}, SPS=generation_steps)
            update_target = global_step // generation_steps % args.target_period == 0
            state = end_generation(state, tuple(kls), args, update_target)
            run.progress["moments"] = flax.serialization.to_state_dict(moments)
            if run.due(global_step, generation_steps, total_steps):
                run.log(state, {"charts/learning_rate": float(rate(sgd_steps))},
                        "step {step:>10,} {share:4.0%}   return (20 eps) {charts/episodic_return_20:8.2f}   "
                        "SPS {charts/SPS:6.0f}   lag {charts/policy_lag:3.0f}   value loss {losses/value_loss:7.4f}   "
                        "entropy {losses/entropy:5.3f}   {left:4.0f} min left")  # fmt: skip

    params = jax.tree.map(lambda x: x.addressable_data(0), state.params)
    normaliser = dict(zip(("mean", "std", "reward_std"), jax.device_get(scales(moments, args.norm_obs))))

    def evaluate() -> np.ndarray:
        def act(obs, i):
            obs = normalise(flat(obs), normaliser["mean"], normaliser["std"])
            return np.asarray(sample_action(network.apply, params, obs, eval_key, i)[0])

        env = make_task(args, args.eval_episodes, (args.seed, 2**31), render=args.capture_video)
        film = run.folder if args.capture_video else None
        return play(args.eval_episodes, env, step_task, act, film=film, ms_per_frame=50)

    return run.end(total_steps, params, evaluate, normaliser=normaliser)


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
