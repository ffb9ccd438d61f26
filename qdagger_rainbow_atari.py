# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12.8", "optax>=0.2.6", "chex>=0.1.90", "numpy>=2.0", "envpool>=1.2.5",
#                 "tyro>=1.0", "tensorboardX>=2.6", "wandb>=0.22", "pillow>=11.0"]
# ///
"""QDagger on Atari: an existing agent teaches a Rainbow, first offline and then online, until it needs it no more.

Paper: Agarwal et al., "Reincarnating Reinforcement Learning: Reusing Prior Computation to Accelerate Progress", 2022.
Rainbow: Hessel et al., "Rainbow: Combining Improvements in Deep Reinforcement Learning", 2018.

    teacher ── its replay data, or games it plays here ──> D_T ── updates ──> student         offline, steps below 0
       └─────────── its policy on every state ──────────────┴──────────┐         │
                                                                       ▼         ▼ (the same network goes on)
    environments ── epsilon-greedy student ──> the student's own replay ── updates ──> student     online, from 0 on
                                                  ▲      by priority         │
                                                  └── sqrt of the losses ────┘

Every update minimises  w (L_C51 + c lambda KL(pi_T || pi)): distributional n-step Q-learning, and distillation of the
teacher's policy into the softmax of the expected values. As in the paper: C51, n = 3, prioritised replay (online only)
and the residual network. The rest of Rainbow by flags: --double --dueling --noisy. Lambda, the two phases and the other
workflows are those of qdagger_dqn_atari.py. Deliberately different from the paper or its authors' code:
  1. The teacher sees every state once, when it enters the data; its policy is stored there. Asking it for each sampled
     batch would give the same numbers at eight (online) to dozens (offline) of times the cost.
  2. Several environments are stepped together; there is still one update for every four environment steps. The updates
     of one such step are sampled together, before any of them changes a priority.
  3. A time limit is not a death: the window ends there and bootstraps from the episode's last observation.

It runs on one device, CPU or GPU, and imports the package teachers/ that lies beside it.

    python qdagger_rainbow_atari.py --env-id Pong-v5                    with the bundled teacher
    python qdagger_rainbow_atari.py --env-id Breakout-v5 --teacher runs/Breakout-v5__qdagger_dqn_atari__1__1790000000
    python qdagger_rainbow_atari.py --teacher none --network nature --double --dueling --noisy     Rainbow of 2018
"""

import os
from importlib import metadata

# XLA's CPU backend runs convolutions on one core unless this fusion is off (3 to 4 times faster). An XLA that does not
# know a flag aborts, hence the versions. It concerns no other backend, and your own XLA_FLAGS come last, so they win.
YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type=-individual_convolution"
if metadata.version("jaxlib").startswith(("0.10.", "0.12.")) and YNN_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{YNN_FLAG} {os.environ.get('XLA_FLAGS', '')}".strip()

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
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
from tensorboardX import SummaryWriter

import teachers


def refuse(message: str, code: int = 2):
    """Ends the program with one line that names the flag or the file and the remedy."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@dataclass(frozen=True)
class Args:
    """QDagger with a Rainbow student on Atari. A step is an environment step: one decision, four Atari frames."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of environments, parameters and sampling
    total_timesteps: int = 2_500_000  # length of the online phase in environment steps (0: offline only)
    runs_dir: str = "runs"  # folder that receives the run folder
    log_every: int = 10_000  # environment steps (offline: updates) between two lines on the console and rows of metrics
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project_name: str = "qdagger"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    save_model: bool = True  # write model.msgpack (parameters and arguments) at the end
    save_replay: bool = False  # write the student's replay at the end, as teacher data for other runs
    checkpoint_every: int = 100_000  # environment steps (offline: updates) between two checkpoints
    resume: str | None = None  # run folder to continue, with its own settings
    eval_episodes: int = 10  # environments that evaluate, each plays at least one whole game
    eval_steps: int = 125_000  # least number of environment steps of an evaluation, all its environments together
    capture_video: bool = False  # write a GIF of one evaluated game at the end

    # --- environment ---
    env_id: str = "Pong-v5"  # EnvPool's name of the game
    num_envs: int = 8  # environments stepped together
    protocol: Literal["dopamine", "classic"] = "dopamine"  # sticky actions; or no-ops, lives, fire on reset
    max_episode_steps: int = 27_000  # time limit of a game in environment steps (27,000 = 108,000 frames)

    # --- teacher ---
    teacher: str | None = None  # model file, run folder, hf://owner/repo/file, none (default: the bundled one)
    teacher_data: str | None = None  # folder of the teacher's replay (default: beside the teacher, or else collected)
    collect_steps: int = 1_000_000  # environment steps of teacher data: the newest of its replay, or collected
    collect_epsilon: float = 0.4  # of the first environment that collects; evenly down to 0 in the last
    offline_steps: int = 1_000_000  # updates of the offline phase (0: kickstarting)
    finetune: str | None = None  # run folder of this script whose weights, Adam state and replay to go on with

    # --- algorithm ---
    network: Literal["resnet", "nature", "shallow"] = "resnet"  # 15 convolutions + 512 units, 3 + 512, or 2 + 256
    learning_rate: float | None = None  # of Adam while lambda is 1 (default: 1e-4; no teacher 6.25e-5; --finetune 1e-5)
    final_learning_rate: float | None = None  # once lambda is 0 (default: 1e-5 after a teacher, or else no change)
    gamma: float = 0.99  # discount per environment step
    n_step: int | None = None  # environment steps until a target bootstraps (default: 3; --finetune 1)
    batch_size: int = 32  # transitions of an update
    replay_capacity: int = 1_000_000  # environment steps in the student's replay, 7,056 bytes each
    learning_starts: int = 20_000  # environment steps in the replay before the first online update
    train_frequency: int = 4  # environment steps per update
    target_period: int = 2_000  # updates between two copies of the online network to the target network
    iteration_steps: int = 250_000  # environment steps (offline: updates) between two evaluations, which set lambda
    wean_steps: int = 2_500_000  # environment steps after which lambda is 0 in any case
    distill_coef: float = 1.0  # c, weight of the distillation loss
    temperature: float = 0.1  # tau of softmax(Q / tau), for the student and a value-based teacher
    num_atoms: int = 51  # atoms of the return distribution
    v_min: float = -10.0  # lowest return that it knows, in clipped rewards
    v_max: float = 10.0  # highest
    prioritized: bool = True  # sample the student's own replay by priority, not uniformly
    importance_exponent: float = 0.5  # beta of the weights (1 / probability)^beta that correct for it
    double: bool = False  # the online network chooses the action of the target (double Q-learning)
    dueling: bool = False  # separate streams for the state's value and the actions' advantages
    noisy: bool = False  # dense layers with learned noise, which explores instead of epsilon
    noisy_sigma: float = 0.5  # sigma_0, initial scale of that noise
    epsilon: float = 0.01  # probability of a random action online
    epsilon_decay_steps: int = 250_000  # environment steps from epsilon 1 to --epsilon, if nothing was learned before
    eval_epsilon: float = 0.001  # probability of a random action in an evaluation

    # --- system ---
    updates_per_call: int = 50  # offline updates between two looks at the clock and at Ctrl-C; one call on a GPU

    def __post_init__(self):
        may_be_0 = "seed total_timesteps offline_steps wean_steps distill_coef gamma epsilon eval_epsilon eval_steps"
        may_be_0 += " epsilon_decay_steps collect_epsilon learning_rate final_learning_rate importance_exponent"
        for name, x in asdict(self).items():
            low = -1e9 if name in ("v_min", "v_max") else 0 if name in may_be_0.split() else 1e-12
            high = 1 if "epsilon" in name and "steps" not in name or name == "gamma" else 10**9
            if type(x) in (int, float) and not low <= x <= high:  # NaN does not hold either
                at_least = "above 0" if 0 < low < 1 else f"at least {low}"
                refuse(f"--{name.replace('_', '-')} {x}: must be {at_least} and at most {high:,}")
        if self.num_atoms < 2 or self.v_min >= self.v_max:
            refuse("--num-atoms, --v-min, --v-max: need two atoms or more, from a lower to a higher value")
        if self.finetune and self.teacher not in (None, "none"):
            refuse("--teacher: a fine-tuned agent has none; leave out --teacher or --finetune")
        has_data = not self.finetune and self.teacher != "none" and self.offline_steps > 0
        if self.teacher_data and not has_data:
            refuse("--teacher-data: is for the offline phase, which --finetune, --teacher none and --offline-steps 0 "
                   "leave out; leave it out as well")  # fmt: skip
        least = self.num_envs * ((self.n_step or 3) + 5)
        for name in ("learning_starts", "collect_steps") if has_data else ("learning_starts",):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                refuse(f"--{flag} {getattr(self, name)}: must be at least {least}, a window in each environment")
        if self.final_learning_rate is not None and (self.finetune or self.teacher == "none"):
            refuse("--final-learning-rate: is for after a teacher; without one, --learning-rate is all there is")
        if self.replay_capacity // self.num_envs * self.num_envs < self.learning_starts:
            refuse(
                f"--replay-capacity {self.replay_capacity}: must be at least --learning-starts, rounded to --num-envs"
            )
        frames = max(self.replay_capacity, self.collect_steps if has_data else 0)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if frames * 84 * 84 > memory:
            refuse(f"--replay-capacity, --collect-steps: {frames:,} frames take {frames * 84 * 84:,} bytes, this "
                   f"machine has {memory:,}; choose fewer")  # fmt: skip


# --- environment ------------------------------------------------------------------------------------------------------
PROTOCOLS = {  # Machado et al. (2018), as in Dopamine; Mnih et al. (2015)
    "dopamine": dict(repeat_action_probability=0.25, episodic_life=False, noop_max=1, use_fire_reset=False),
    "classic": dict(repeat_action_probability=0.0, episodic_life=True, noop_max=30, use_fire_reset=True),
}


def make_game(args: Args, num_envs: int, entropy: tuple[int, ...], render: bool = False):
    """EnvPool's vector of one Atari game: observations `[num_envs, 4, 84, 84]` uint8, the oldest frame first.

    The seeds are drawn from `entropy`: EnvPool would give environment i seed + i, and two runs with neighbouring seeds
    would share nearly all of their games."""
    if args.env_id not in envpool.list_all_envs():
        refuse(f"--env-id {args.env_id}: unknown to EnvPool; Atari games are called Pong-v5, SpaceInvaders-v5, ...")
    seeds = np.random.SeedSequence(entropy).generate_state(num_envs) >> 1
    try:
        env = envpool.make(
            args.env_id, env_type="gymnasium", num_envs=num_envs, num_threads=min(num_envs, os.cpu_count() or 1),
            seed=seeds.tolist(), img_height=84, img_width=84, stack_num=4, gray_scale=True,
            max_episode_steps=args.max_episode_steps, reward_clip=True,  # info["reward"] stays unclipped
            render_mode="rgb_array" if render else None, **PROTOCOLS[args.protocol],
        )  # fmt: skip
        if hasattr(env.action_space, "n"):  # discrete
            return env
    except TypeError:  # not an Atari game: its settings know no frame size
        pass
    refuse(f"--env-id {args.env_id}: this script needs four stacked grey frames and discrete actions, as in Pong-v5")


def game_of(env_id: str) -> str:
    """Pong, of Pong-v5 and of PongNoFrameskip-v4."""
    return env_id.partition("-")[0].removesuffix("NoFrameskip")


def step_env(env, action: np.ndarray) -> tuple[np.ndarray, ...]:
    """One step of all environments: obs, clipped reward, terminated, truncated, game over, unclipped reward.

    EnvPool resets an ended episode in the *next* step, which ignores its action. So the observation that comes with an
    end is the true last one, and the row that begins with it is a dummy. A lost life terminates, but not the game."""
    obs, reward, terminated, truncated, info = env.step(action)
    terminated = terminated | (info["terminated"] > 0)
    truncated = truncated & ~terminated
    return obs, reward, terminated, truncated, truncated | (info["terminated"] > 0), info["reward"]


# --- network ----------------------------------------------------------------------------------------------------------
UNITS = {"nature": 512, "resnet": 512, "shallow": 256}  # of the hidden layer


def features(obs: jax.Array, network: str) -> jax.Array:
    """Frames `[B, 4, H, W]` uint8 to `[B, n]`, by convolutions that belong to the module that calls this."""
    conv = partial(nn.Conv, padding="VALID", kernel_init=nn.initializers.xavier_uniform())
    same = partial(nn.Conv, kernel_size=(3, 3), kernel_init=nn.initializers.xavier_uniform())
    x = jnp.moveaxis(obs, 1, -1).astype(jnp.float32) / 255.0
    if network == "resnet":
        for channels in (16, 32, 32):
            x = nn.max_pool(same(channels)(x), (3, 3), (2, 2), "SAME")
            for _ in range(2):
                x = x + same(channels)(nn.relu(same(channels)(nn.relu(x))))
        x = nn.relu(x)
    elif network == "nature":
        for layer in conv(32, (8, 8), 4), conv(64, (4, 4), 2), conv(64, (3, 3), 1):
            x = nn.relu(layer(x))
    else:
        for layer in conv(16, (8, 8), 4), conv(32, (4, 4), 2):
            x = nn.relu(layer(x))
    return x.reshape(x.shape[0], -1)


class NoisyDense(nn.Module):
    """A dense layer with factorised Gaussian noise (Fortunato et al., 2018, equations 9 to 11):

        y = x (mu_w + sigma_w f(e_in) f(e_out)^T) + mu_b + sigma_b f(e_out)      f(e) = sign(e) sqrt|e|

    mu is initialised uniformly within +-1 / sqrt(inputs), sigma with sigma_0 / sqrt(inputs). Without a key for the
    stream "noise" it is mu alone."""

    units: int
    sigma: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        n = x.shape[-1]

        def uniform(key, shape):
            return jax.random.uniform(key, shape, minval=-(n**-0.5), maxval=n**-0.5)

        sigma = nn.initializers.constant(self.sigma * n**-0.5)
        kernel, bias = self.param("kernel", uniform, (n, self.units)), self.param("bias", uniform, (self.units,))
        kernel_sigma = self.param("kernel_sigma", sigma, (n, self.units))
        bias_sigma = self.param("bias_sigma", sigma, (self.units,))
        if self.has_rng("noise"):
            noise = jax.random.normal(self.make_rng("noise"), (n + self.units,))
            noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
            kernel = kernel + kernel_sigma * jnp.outer(noise[:n], noise[n:])
            bias = bias + bias_sigma * noise[n:]
        return x @ kernel + bias


class RainbowNetwork(nn.Module):
    """Frames `[B, 4, H, W]` uint8 to logits of the return distributions `[B, A, atoms]`."""

    network: str
    num_actions: int
    num_atoms: int
    dueling: bool
    noisy_sigma: float | None  # None: no noise

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        dense = partial(nn.Dense, kernel_init=nn.initializers.xavier_uniform())
        if self.noisy_sigma is not None:
            dense = partial(NoisyDense, sigma=self.noisy_sigma)
        x, A = features(obs, self.network), self.num_actions
        hidden = nn.relu(dense(UNITS[self.network])(x))
        logits = dense(A * self.num_atoms)(hidden).reshape(-1, A, self.num_atoms)
        if self.dueling:  # the stream above is that of the advantages (Wang et al., 2016, equation 9)
            value = dense(self.num_atoms)(nn.relu(dense(UNITS[self.network])(x)))
            logits = value[:, None] + logits - logits.mean(axis=1, keepdims=True)
        return logits


# --- state ------------------------------------------------------------------------------------------------------------
@flax.struct.dataclass
class Transitions:
    """A batch of n-step transitions; m is n, or less where the episode ends before."""

    obs: jax.Array  # [B, 4, H, W] uint8, s_t
    action: jax.Array  # [B] a_t
    n_step_reward: jax.Array  # [B] sum over k < m of gamma^k r_{t+k}
    discount: jax.Array  # [B] gamma^m, or 0 if a termination is in the window
    next_obs: jax.Array  # [B, 4, H, W] uint8, s_{t+m}
    teacher_policy: jax.Array  # [B, A] pi_T(. | s_t); zeros where the teacher was not asked


@flax.struct.dataclass
class WeightedTransitions:
    """A batch, and how much each transition counts."""

    transitions: Transitions
    weight: jax.Array  # [B] importance weights, at most 1


class QState(train_state.TrainState):
    """Flax's train state (`step` counts updates, `params` are the online network), and the target network."""

    target_params: Any


class ReplayBuffer:
    """The newest steps of E environments in single frames: a ring of rows for each environment.

    A row: the newest frame of s_t, a_t, and what the step with a_t returned. EnvPool's dummy row after an end keeps the
    episode's last frame, from which a time limit bootstraps; no transition starts there. States are rebuilt as EnvPool
    stacks them: the first frame of a game fills the stack, a lost life does not empty it."""

    def __init__(self, num_envs: int, rows: int, frame_shape: tuple[int, int], num_actions: int):
        self.frames = np.zeros((num_envs, rows, *frame_shape), np.uint8)  # takes its memory as it is written
        self.action = np.zeros((num_envs, rows), np.int32)
        self.reward = np.zeros((num_envs, rows), np.float32)
        self.terminated, self.truncated = np.zeros((2, num_envs, rows), bool)
        self.history = np.zeros((num_envs, rows), np.int8)  # earlier frames of the same episode in the stack, at most 3
        self.first = np.zeros((num_envs, rows), bool)  # the first frame of a game
        self.starts = np.zeros((num_envs, rows), bool)  # a transition may start here
        self.teacher_policy = np.zeros((num_envs, rows, num_actions), np.float32)
        # Around an end: its last step (over, unless it is a life's), the dummy row, the next game's first row (begins).
        self.over, self.dummy, self.begins = *np.zeros((2, num_envs), bool), np.ones(num_envs, bool)
        self.written = 0  # rows, also those overwritten since

    def fill(self, data: teachers.Replay, n_step: int):
        """Takes rows of a file, as if the environments had played a share each. Files lack an episode's last frame, so
        windows that a time limit ends are lost."""
        num_envs, rows = len(self.action), len(data.action) // len(self.action)
        data, ends = replace(data, truncated=data.truncated.copy()), slice(rows - 1, None, rows)
        data.truncated[ends] |= ~data.terminated[ends]  # where a share ends, its story breaks off
        names = ("frames", "action", "reward", "terminated", "truncated", "first")
        columns = {name: getattr(data, name) for name in names}
        columns["history"] = np.minimum(np.arange(len(data.action)) - data.begin, 3).astype(np.int8)
        columns["starts"] = data.usable(n_step)
        for name, column in columns.items():
            column = column[: num_envs * rows].reshape(num_envs, rows, *column.shape[1:])
            if rows == self.action.shape[1]:
                setattr(self, name, column)  # gigabytes of frames are not copied
            else:
                getattr(self, name)[:, :rows] = column
        self.written = rows

    def __len__(self) -> int:
        return min(self.written, self.action.shape[1]) * len(self.action)

    def add(self, obs: np.ndarray, action, reward, terminated, truncated, game_over, teacher_policy=0.0):
        """One row for each environment: arrays `[E, ...]`, of which obs `[E, 4, H, W]` came before the action."""
        t = self.written % self.action.shape[1]
        self.frames[:, t], self.action[:, t], self.reward[:, t] = obs[:, -1], action, reward
        self.terminated[:, t], self.truncated[:, t] = terminated, truncated
        self.history[:, t] = np.where(self.begins, 0, np.minimum(self.history[:, t - 1] + 1, 3))
        self.first[:, t], self.starts[:, t], self.teacher_policy[:, t] = self.begins, ~self.dummy, teacher_policy
        self.begins, self.dummy, self.over = self.dummy & self.over, terminated | truncated, game_over
        self.written += 1

    def known(self, env: np.ndarray, t: np.ndarray, n_step: int) -> np.ndarray:
        """Whether transitions start in these rows: the state's frames and the n rows after it are in the ring."""
        rows = self.action.shape[1]
        age = (t - max(self.written - rows, 0)) % rows  # rows since the oldest
        window = age + n_step < min(self.written, rows)
        return self.starts[env, t] & (age >= self.history[env, t]) & window

    def sample(self, rng: np.random.Generator, shape: tuple[int, int], n_step: int) -> tuple[np.ndarray, np.ndarray]:
        """Environments and rows `[updates, B]` of which transitions start, uniformly, with replacement."""
        found, need = [], shape[0] * shape[1]
        while need > 0:
            env = rng.integers(len(self.action), size=need)
            t = rng.integers(min(self.written, self.action.shape[1]), size=need)
            good = self.known(env, t, n_step)
            found.append((env[good], t[good]))
            need -= int(good.sum())
        env, t = (np.concatenate(x).reshape(shape) for x in zip(*found))
        return env, t

    def states(self, env: np.ndarray, t: np.ndarray) -> np.ndarray:
        """`[..., 4, H, W]` uint8 of environments and rows `[...]`."""
        back = np.minimum(np.arange(3, -1, -1), self.history[env, t][..., None])
        return self.frames[env[..., None], (t[..., None] - back) % self.action.shape[1]]

    def transitions(self, env: np.ndarray, t: np.ndarray, n_step: int, gamma: float) -> Transitions:
        """The transitions that start in these rows `[...]`."""
        window = (env[..., None], (t[..., None] + np.arange(n_step)) % self.action.shape[1])
        columns = self.reward[window], self.terminated[window], self.truncated[window]
        reward, discount, steps = n_step_return(*columns, gamma)
        next_obs = self.states(env, (t + steps) % self.action.shape[1])
        policy = self.teacher_policy[env, t]
        return Transitions(self.states(env, t), self.action[env, t], reward, discount, next_obs, policy)

    def ask(self, teacher: Callable[[np.ndarray], np.ndarray]):
        """Stores the teacher's policy in all rows."""
        started, rows = time.time(), min(self.written, self.action.shape[1])
        for env in range(len(self.action)):
            for first in range(0, rows, 256):
                t = np.arange(first, first + 256) % rows  # always 256: one compilation
                self.teacher_policy[env, t] = teacher(self.states(np.full(256, env), t))
                say_progress("shown to the teacher", first + 256, rows, 256, started)

    def export(self, env: int, protocol: dict) -> teachers.Replay:
        """One environment's rows in the order of play."""
        order = np.arange(max(0, self.written - self.action.shape[1]), self.written) % self.action.shape[1]
        names = ("frames", "action", "reward", "terminated", "truncated", "first")
        columns = {name: getattr(self, name)[env][order] for name in names}
        columns["truncated"][-1] |= ~columns["terminated"][-1]
        return teachers.Replay(**columns, protocol=protocol, source="replay")


class SumTree:
    """Non-negative priorities in the leaves of a binary tree whose nodes hold the sums of their children, float64.

    Sums are computed anew from their children and never corrected by differences, so they do not drift."""

    def __init__(self, leaves: int):
        self.size = 1 << max(1, (leaves - 1).bit_length())
        self.nodes = np.zeros(2 * self.size)  # node i has the children 2i and 2i + 1; the root is 1

    def set(self, leaf: np.ndarray, priority: np.ndarray):
        """Of leaves `[n]`; where one is named twice, its last priority counts."""
        node = leaf + self.size
        self.nodes[node] = priority
        while (node := node >> 1)[0]:  # all are at the same depth
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, mass: np.ndarray) -> np.ndarray:
        """The leaves `[n]` in which these masses `[n]` of [0, total) lie, counted from the left."""
        node, mass = np.ones(len(mass), np.int64), mass.copy()
        for _ in range(self.size.bit_length() - 1):
            left = self.nodes[2 * node]
            right = (mass >= left) & (self.nodes[2 * node + 1] > 0)  # rounding must not lead to a leaf of priority 0
            mass -= left * right
            node = 2 * node + right
        return node - self.size


class PrioritizedReplay(ReplayBuffer):
    """Prioritised sampling (Schaul et al., 2016): in the tree are exactly the rows where transitions start; all others,
    dummy rows among them, have priority 0."""

    def __init__(self, n_step: int, *shape):
        super().__init__(*shape)
        self.n_step, self.highest, self.tree = n_step, 1.0, SumTree(self.action.size)

    def put(self, env: np.ndarray, t: np.ndarray, priority):
        """Priorities of rows `[n]`, as far as transitions start there."""
        self.tree.set(env * self.action.shape[1] + t, np.where(self.known(env, t, self.n_step), priority, 0.0))

    def fill(self, *given):
        super().fill(*given)
        self.put(*np.indices(self.action.shape).reshape(2, -1), 1.0)

    def add(self, *given):
        """The window of a row n steps back is complete now, so it enters with the highest priority seen. The newest row
        replaced the oldest, and took its frame from the stacks of the three after."""
        super().add(*given)
        newest, (num_envs, rows) = self.written - 1, self.action.shape
        env, t = np.repeat(np.arange(num_envs), 4), np.tile(np.arange(newest, newest + 4) % rows, num_envs)
        self.put(env, t, self.tree.nodes[self.tree.size + env * rows + t])
        if newest >= self.n_step:
            self.put(np.arange(num_envs), np.full(num_envs, (newest - self.n_step) % rows), self.highest)

    def sample_by_priority(self, rng: np.random.Generator, shape: tuple[int, int], beta: float):
        """Environments, rows and importance weights `[updates, B]`: for each update one from each of B equal shares of
        the priorities. The weights (1 / probability)^beta are divided by the largest of the batch."""
        total = self.tree.nodes[1]
        mass = (np.arange(shape[1]) + rng.random(shape)) / shape[1] * total
        leaf = self.tree.find(mass.ravel()).reshape(shape)
        weight = (self.tree.nodes[leaf + self.tree.size] / total) ** -beta
        env, t = np.divmod(leaf, self.action.shape[1])
        return env, t, (weight / weight.max(axis=1, keepdims=True)).astype(np.float32)

    def update(self, env: np.ndarray, t: np.ndarray, priority: np.ndarray):
        """New priorities of rows that were sampled."""
        self.highest = max(self.highest, float(priority.max()))
        self.put(env.ravel(), t.ravel(), priority.ravel())


# --- the mathematics --------------------------------------------------------------------------------------------------
def n_step_return(reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, gamma: float):
    """Rewards and ends of windows `[..., n]` to what their targets consist of:

        y_t = sum_{k<m} gamma^k r_{t+k} + discount max_a Q(s_{t+m}, a)      discount = gamma^m, 0 after a termination

    Returns the sum, the discount and m, each `[...]`. A window stops at the first end in it: m <= n steps."""
    ended = terminated | truncated
    played = np.cumsum(ended, axis=-1) - ended == 0  # [..., n] no end before this step
    steps = played.sum(axis=-1)
    died = (terminated & played).any(axis=-1)
    n_step_reward = (np.where(played, reward, 0.0) * gamma ** np.arange(reward.shape[-1])).sum(axis=-1)
    return n_step_reward.astype(np.float32), np.where(died, 0.0, gamma**steps).astype(np.float32), steps


def teacher_target(scores: jax.Array, kind: str, temperature: float) -> jax.Array:
    """pi_T `[B, A]`: softmax(Q_T / tau) of a value-based teacher, softmax(logits) of one that is a policy."""
    return nn.softmax(scores if kind == "policy" else scores / temperature)


def distillation(teacher_policy: jax.Array, q: jax.Array, temperature: float) -> jax.Array:
    """KL(pi_T || pi) `[B]`, pi = softmax(Q / tau): QDagger's loss, 0 where pi_T is all zeros (not asked)."""
    log_teacher = jnp.log(jnp.maximum(teacher_policy, 1e-30))
    return jnp.sum(teacher_policy * (log_teacher - nn.log_softmax(q / temperature)), axis=-1)


def distill_weight(weight: float, student: float, teacher: float, random: float, step: int, wean_steps: int) -> float:
    """The next lambda, from evaluated scores: clip(1 - g, 0, 1) of g = (student - random) / (teacher - random).
    Once 0 it stays 0, and it is 0 after `wean_steps`. (Divided by the teacher's score alone, as in other
    implementations, a game of negative scores would wean the worst students first.)"""
    if weight == 0 or step >= wean_steps:
        return 0.0
    return float(np.clip(1 - (student - random) / (teacher - random), 0.0, 1.0))


def c51_projection(support: jax.Array, probability: jax.Array, atoms: jax.Array) -> jax.Array:
    """A distribution on values `support` `[B, n]`, projected onto evenly spaced atoms `[n]` (Bellemare et al., 2017,
    equation 7): each value is clipped to the atoms' range, and its probability shared by its two neighbours."""
    chex.assert_equal_shape([support, probability])
    step = atoms[1] - atoms[0]
    distance = jnp.abs(support.clip(atoms[0], atoms[-1])[:, None, :] - atoms[None, :, None]) / step  # [B, to, from]
    return jnp.sum((1 - distance).clip(0, 1) * probability[:, None, :], axis=-1)


def expected_value(logits: jax.Array, atoms: jax.Array) -> jax.Array:
    """Q `[B, A]` of return distributions with logits `[B, A, atoms]`."""
    return jnp.sum(nn.softmax(logits) * atoms, axis=-1)


def rainbow_loss(params, state: QState, batch: WeightedTransitions, lambda_: jax.Array, args: Args):
    """Mean of w (L_C51 + c lambda L_distill). The metrics hold each transition's next priority."""
    given, atoms = batch.transitions, jnp.linspace(args.v_min, args.v_max, args.num_atoms)
    noise = jax.random.split(jax.random.fold_in(jax.random.key(args.seed + 10**9), state.step), 3)
    rngs = [{"noise": key} if args.noisy else {} for key in noise]
    logits = state.apply_fn(params, given.obs, rngs=rngs[0])
    next_logits = state.apply_fn(state.target_params, given.next_obs, rngs=rngs[1])
    chooser = state.apply_fn(params, given.next_obs, rngs=rngs[2]) if args.double else next_logits
    chex.assert_equal_shape([logits, next_logits])

    next_action = jnp.argmax(expected_value(chooser, atoms), axis=-1)
    next_probability = nn.softmax(take_action(next_logits, next_action))
    support = given.n_step_reward[:, None] + given.discount[:, None] * atoms
    target = jax.lax.stop_gradient(c51_projection(support, next_probability, atoms))
    c51_loss = -jnp.sum(target * nn.log_softmax(take_action(logits, given.action)), axis=-1)
    q = expected_value(logits, atoms)
    distill_loss = distillation(given.teacher_policy, q, args.temperature)
    loss = jnp.mean(batch.weight * (c51_loss + args.distill_coef * lambda_ * distill_loss))
    metrics = {"losses/td_loss": jnp.mean(c51_loss), "losses/distill_loss": jnp.mean(distill_loss)}
    metrics["losses/q_values"] = jnp.mean(take_action(q, given.action))
    return loss, metrics | {"priority": jnp.sqrt(c51_loss + 1e-10)}


def take_action(x: jax.Array, action: jax.Array) -> jax.Array:
    """x `[B, A, ...]` of the actions `[B]`: `[B, ...]`."""
    return jax.vmap(lambda one, i: one[i])(x, action)


# --- learner ----------------------------------------------------------------------------------------------------------
@partial(jax.jit, static_argnames=("loss_fn", "args"), donate_argnames="state")
def q_update(state, batch, learning_rate, lambda_, loss_fn: Callable, args: Args) -> tuple[Any, dict]:
    """One SGD step; every `target_period` of them the target network becomes the online one."""
    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state, batch, lambda_, args)
    direction, opt_state = state.tx.update(grads, state.opt_state)
    params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
    target_params = optax.periodic_update(params, state.target_params, state.step + 1, args.target_period)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, target_params=target_params)
    return state, metrics | {"losses/grad_norm": optax.tree.norm(grads)}


@partial(jax.jit, static_argnames=("loss_fn", "args"), donate_argnames="state")
def q_updates_in_one_call(state, batches, learning_rate, lambda_, loss_fn: Callable, args: Args) -> tuple[Any, dict]:
    return jax.lax.scan(lambda s, batch: q_update(s, batch, learning_rate, lambda_, loss_fn, args), state, batches)


def q_learn(state, batches, learning_rate, lambda_, loss_fn: Callable, args: Args) -> tuple[Any, dict]:
    """SGD steps on batches `[n, B, ...]`, one each; returns the metrics of every step."""
    if jax.default_backend() != "cpu":
        return q_updates_in_one_call(state, batches, learning_rate, lambda_, loss_fn, args)
    metrics = []  # on a CPU XLA's gradient of a convolution is dozens of times slower inside a loop of its own
    for i in range(len(jax.tree.leaves(batches)[0])):
        batch = jax.tree.map(itemgetter(i), batches)
        state, step_metrics = q_update(state, batch, learning_rate, lambda_, loss_fn, args)
        metrics.append(step_metrics)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *metrics)


# --- acting -----------------------------------------------------------------------------------------------------------
@partial(jax.jit, static_argnames=("apply_fn", "noisy", "args"))
def choose(apply_fn: Callable, params, obs: jax.Array, key: jax.Array, step, epsilon, noisy: bool, args: Args):
    """Epsilon-greedy actions `[B]` for obs `[B, 4, H, W]`, by expected values under one draw of the noise, or none."""
    explore_key, action_key, noise_key = jax.random.split(jax.random.fold_in(key, step), 3)
    logits = apply_fn(params, obs, rngs={"noise": noise_key} if noisy else {})
    values = expected_value(logits, jnp.linspace(args.v_min, args.v_max, args.num_atoms))
    random = jax.random.randint(action_key, values.shape[:1], 0, values.shape[1])
    explore = jax.random.uniform(explore_key, values.shape[:1]) < epsilon
    return jnp.where(explore, random, jnp.argmax(values, axis=-1))


class Mentor:
    """A loaded teacher that is asked for its policy, and acts."""

    def __init__(self, teacher: teachers.Teacher, temperature: float):
        @jax.jit
        def policy(params, obs):
            return teacher_target(teacher.apply(obs, params), teacher.kind, temperature)

        self.teacher, self.compiled = teacher, policy

    def policy(self, obs: np.ndarray) -> np.ndarray:
        """pi_T `[B, A]` of obs `[B, 4, 84, 84]`."""
        return np.asarray(self.compiled(self.teacher.params, obs))

    def act(self, policy: np.ndarray, rng: np.random.Generator, epsilon) -> np.ndarray:
        """Actions `[B]` from pi_T `[B, A]`: its most probable one if value-based, a sample otherwise; epsilon `[B]`."""
        action = policy.argmax(axis=1)
        if self.teacher.kind == "policy":
            action = (policy.cumsum(axis=1) > rng.random((len(policy), 1))).argmax(axis=1)
        random = rng.integers(policy.shape[1], size=len(policy))
        return np.where(rng.random(len(policy)) < epsilon, random, action).astype(np.int32)


def say_progress(what: str, done: int, total: int, step: int, started: float):
    """A line at every tenth of a long wait, with the minutes that are left."""
    if done * 10 // total > (done - step) * 10 // total and time.time() - started > 2:
        left = (time.time() - started) * (total - done) / done / 60
        print(f"             {what} {min(done, total):>10,} of {total:,}   {max(left, 0):4.0f} min left", flush=True)


def collect(args: Args, mentor: Mentor, buffer: ReplayBuffer):
    """Teacher data D_T, where the teacher comes without: it fills the buffer, playing with more random actions from
    environment to environment, so that mistakes and the way back from them are in the data too."""
    env, rng, started = (
        make_game(args, args.num_envs, (args.seed, 2**30)),
        np.random.default_rng(args.seed),
        time.time(),
    )
    (obs, _), epsilon = env.reset(), np.linspace(args.collect_epsilon, 0.0, args.num_envs)
    for i in range(1, buffer.action.shape[1] + 1):
        policy = mentor.policy(obs)
        action = mentor.act(policy, rng, epsilon)
        next_obs, reward, terminated, truncated, game_over, _ = step_env(env, action)
        buffer.add(obs, action, reward, terminated, truncated, game_over, policy)
        obs = next_obs
        say_progress("collected", i * args.num_envs, buffer.action.size, args.num_envs, started)


def play(args: Args, choose: Callable, entropy: tuple[int, ...], film: Path | None = None) -> np.ndarray:
    """Unclipped returns of whole games. Each of `eval_episodes` fresh environments plays on until all have made
    `eval_steps` steps together, and then to the end of its game. `choose(obs, step)` gives actions. Writes a GIF of
    one game (its first 3,000 steps) into the folder `film`."""
    n = args.eval_episodes
    env = make_game(args, n, entropy, render=film is not None)
    (obs, _), total, playing, returns, frames, step = env.reset(), np.zeros(n), np.ones(n, bool), [], [], 0
    filming = film is not None
    while playing.any():
        if filming:
            frames.append(env.render()[0])
        obs, *_, game_over, game_reward = step_env(env, choose(obs, step))
        total, step = total + game_reward, step + 1
        returns += total[game_over & playing].tolist()
        total[game_over] = 0.0
        playing &= ~game_over | (step * n < args.eval_steps)
        filming = filming and not game_over[0] and step < 3000
    if frames:
        from PIL import Image

        first, *rest = map(Image.fromarray, frames)
        first.save(film / "eval.gif", save_all=True, append_images=rest, duration=67)  # ms: 4 frames at 60 Hz
    return np.array(returns)


# --- logging, saving --------------------------------------------------------------------------------------------------
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


# --- main -------------------------------------------------------------------------------------------------------------
def main(args: Args) -> dict:
    """Trains, evaluates, saves. Returns final_return (mean of the last 20 games), eval_return, teacher_score,
    global_step, run_dir."""
    progress, checkpoint = None, None
    if args.resume:
        args, checkpoint = load_checkpoint(args)
        progress = checkpoint["progress"]
    for flag, wanted, package in ("--track", args.track, "wandb"), ("--capture-video", args.capture_video, "pillow"):
        if wanted and not any(metadata.distributions(name=package)):
            refuse(f"{flag}: needs the package {package}; run pip install {package}, or leave the flag out")

    # --- the workflow: reincarnation, fine-tuning or tabula rasa; the offline phase counts its updates up to step 0 ---
    taught = not args.finetune and args.teacher != "none"
    rate, last_rate, n_step = (6.25e-5, 6.25e-5, 3)
    if args.finetune:
        rate, last_rate, n_step = (1e-5, 1e-5, 1)
    if taught:
        rate, last_rate, n_step = (1e-4, 1e-5, 3)
    if args.learning_rate is not None:
        rate, last_rate = args.learning_rate, last_rate if taught else args.learning_rate
    last_rate = last_rate if args.final_learning_rate is None else args.final_learning_rate
    n_step = args.n_step or n_step
    offline_steps = args.offline_steps if taught else 0
    total_timesteps = args.total_timesteps // args.num_envs * args.num_envs
    if total_timesteps == offline_steps == 0:
        refuse("--total-timesteps 0: leaves nothing to do without a teacher and --offline-steps; raise one of them")
    if total_timesteps == 0 and args.save_replay:
        refuse("--save-replay: the offline phase plays nothing to save; raise --total-timesteps, or leave it out")

    def epsilon(step: int) -> float:
        """Falls from 1 once learning starts, but for a student that has learned before, or that noise moves."""
        if args.noisy:
            return 0.0
        if args.finetune or offline_steps:
            return args.epsilon
        decay = args.learning_starts, args.learning_starts + args.epsilon_decay_steps
        return float(np.interp(step, decay, (1.0, args.epsilon)))

    if not progress:
        progress = {"global_step": -offline_steps, "wall_seconds": 0.0, "last_returns": []}
        progress |= {"distill_weight": float(taught), "teacher_score": None}
    global_step, lambda_ = progress["global_step"], progress["distill_weight"]

    # --- environment and student ---
    env = make_game(args, args.num_envs, (args.seed, max(global_step, 0)))
    num_actions, obs_shape = int(env.action_space.n), env.observation_space.shape
    noise = args.noisy_sigma if args.noisy else None
    network = RainbowNetwork(args.network, num_actions, args.num_atoms, args.dueling, noise)
    init_key, act_key, eval_key = jax.random.split(jax.random.key(args.seed), 3)
    params = network.init(init_key, np.zeros((1, *obs_shape), np.uint8))
    optimizer = optax.scale_by_adam(eps=1.5e-4)  # the learning rate follows lambda, not the number of updates
    state = QState.create(apply_fn=network.apply, params=params, tx=optimizer, target_params=params)
    if args.finetune and not checkpoint:
        saved, source = read_checkpoint("--finetune", args.finetune)
        for name in "network", "env_id", "protocol", "num_atoms", "v_min", "v_max", "dueling", "noisy":
            if saved.get(name) != getattr(args, name):
                refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: --finetune goes on with {saved.get(name)}")
        state = flax.serialization.from_state_dict(state, source["state"])
    if checkpoint:
        state = flax.serialization.from_state_dict(state, checkpoint["state"])
    # By way of numpy copies: online and target parameters begin equal, but must not share memory.
    state = jax.device_put(jax.tree.map(np.array, state))
    updates = int(state.step)

    # --- teacher, and data from files: what is wrong with them is said before any time is spent ---
    def new_replay(rows: int = args.replay_capacity // args.num_envs, num_envs: int = args.num_envs) -> ReplayBuffer:
        return PrioritizedReplay(n_step, num_envs, rows, obs_shape[1:], num_actions)

    mentor, folder, data_protocol = None, None, {}
    replay, protocol, limit = new_replay(), PROTOCOLS[args.protocol], args.max_episode_steps
    try:
        if taught:
            random_score = teachers.scores_of(args.env_id).random
            path = args.teacher or teachers.bundled_teacher(args.env_id)
            mentor = Mentor(teachers.load_teacher(path, num_actions=num_actions), args.temperature)
            told = mentor.teacher.protocol
            if game_of(told.get("env_id", args.env_id)) != game_of(args.env_id):
                refuse(f"--teacher {path}: it learned {told['env_id']}, not {args.env_id}; choose one of this game")
        if global_step < 0:
            folder = args.teacher_data or teachers.replay_beside(path)
        if args.finetune and not checkpoint:
            folder = teachers.replay_beside(args.finetune)
        if folder:
            newest = args.collect_steps if taught else args.replay_capacity // args.num_envs * args.num_envs
            data = teachers.load_replay(folder, num_actions=num_actions, start=-newest)
            if game_of(data.protocol.get("env_id", args.env_id)) != game_of(args.env_id):
                refuse(f"{folder}: data of {data.protocol['env_id']}, not of {args.env_id}; choose those of this game")
            data_protocol = data.protocol
            if taught:
                replay = new_replay(len(data.action), 1)
            if len(data.action) >= len(replay.action):
                replay.fill(data, n_step)
            if not replay.known(*np.indices(replay.action.shape), n_step).any():
                refuse(f"{folder}: its {len(data.action)} rows hold no window of {n_step} steps; name longer data")
            del data
    except teachers.TeacherError as error:
        refuse(f"{'--teacher, --teacher-data' if taught else '--finetune'}: {error}")

    # --- run folder and log ---
    run_dir = Path(args.resume) if args.resume else make_run_dir(args)
    logger = Logger(args, run_dir, global_step, progress["wall_seconds"])
    print(f"run folder   {run_dir}\n"
          f"environment  {args.env_id}: 4 grey frames of 84 x 84, {num_actions} actions (minimal), limit {limit} steps "
          f"= {4 * limit} frames, {', '.join(f'{name} {x}' for name, x in protocol.items())}, "
          "rewards clipped for learning only\n"
          f"plan         {offline_steps:,} offline updates, {total_timesteps:,} steps in {args.num_envs} environments, "
          f"on {jax.devices()[0].device_kind}, from {global_step:,}, "
          f"up to {args.replay_capacity * 7056 / 1e9:.1f} GB of replay"
          f"{' (resumed: new games, and an empty replay online)' if checkpoint else ''}", flush=True)  # fmt: skip
    if args.finetune and not checkpoint:
        print(f"data         {len(replay):,} steps from {folder}" if folder else
              "data         that run kept no replay (--save-replay), so it begins with an empty one")  # fmt: skip

    # --- the teacher's score and data ---
    if mentor:
        print(
            f"teacher      {mentor.teacher.source}: {mentor.teacher.network} network, {mentor.teacher.kind}", flush=True
        )
        for who, told in ("the teacher learned", mentor.teacher.protocol), ("the data were played", data_protocol):
            told = PROTOCOLS.get(told.get("protocol"), {}) | told
            if any(told.get(name, x) != x for name, x in protocol.items()):
                print(f"warning      {who} under another protocol: {told}")
        if progress["teacher_score"] is None:
            print(f"             is evaluated, {args.eval_steps:,} steps or more", flush=True)
            rng, entropy = np.random.default_rng((args.seed, 2**31)), (args.seed, 2**31)
            returns = play(args, lambda obs, _: mentor.act(mentor.policy(obs), rng, args.eval_epsilon), entropy)
            progress["teacher_score"] = float(returns.mean())
            print(f"             {returns.mean():.2f} +- {returns.std():.2f} in {len(returns)} whole games", flush=True)
        if progress["teacher_score"] <= random_score:
            refuse(f"--teacher: its score is {progress['teacher_score']:.2f}, a random policy's {random_score}; choose "
                   "another, or another --protocol")  # fmt: skip
    if global_step < 0 and folder:
        print(f"data         {len(replay):,} steps from {folder}", flush=True)
        replay.ask(mentor.policy)
    elif global_step < 0:
        again = " (again: checkpoints hold none)" if checkpoint else ""
        print(f"data         none beside the teacher: it plays {args.collect_steps:,} steps{again}; the paper's data "
              "are of all its training", flush=True)  # fmt: skip
        replay = new_replay(args.collect_steps // args.num_envs)
        collect(args, mentor, replay)
    pending, last_returns = defaultdict(list), deque(progress["last_returns"], maxlen=20)
    (obs, _), game_return, game_length = env.reset(), np.zeros(args.num_envs), np.zeros(args.num_envs, int)
    ended = np.zeros(args.num_envs, bool)

    def evaluate_student(film: Path | None = None) -> np.ndarray:
        key, explore = jax.random.fold_in(eval_key, updates), (args.eval_epsilon, False, args)
        act = lambda obs, step: np.asarray(choose(network.apply, state.params, obs, key, step, *explore))  # noqa: E731
        returns = play(args, act, (args.seed, 2**31, updates), film)
        logger.log(global_step, {"eval/episodic_return": returns.mean(), "eval/episodic_return_std": returns.std()})
        print(f"evaluation: {returns.mean():.2f} +- {returns.std():.2f} over {len(returns)} whole games", flush=True)
        return returns

    # --- learn, until the end or the first Ctrl-C (or SIGTERM); a second one does not wait ---
    interrupted = threading.Event()

    def interrupt(*_):
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    in_main = threading.current_thread() is threading.main_thread()
    old_handlers = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    logged_at, logged_step, logged_updates = time.time(), global_step, updates
    last = global_step >= total_timesteps
    drawn = priority = None  # rows of the last updates, and the priorities that these give them
    try:
        while not last:
            start = time.time()
            if global_step < 0:  # offline: nothing but updates
                made = due = min(args.updates_per_call, -global_step)
            else:
                policy = mentor.policy(obs) if lambda_ > 0 else 0.0  # a student past its teacher does not ask
                explore = act_key, global_step, epsilon(global_step), args.noisy, args
                action = np.asarray(choose(network.apply, state.params, obs, *explore))  # sync
                if drawn:  # the last updates are done
                    replay.update(*drawn, np.asarray(priority))
                    drawn = None
                next_obs, reward, terminated, truncated, game_over, game_reward = step_env(env, action)
                replay.add(obs, action, reward, terminated, truncated, game_over, policy)
                game_return += game_reward
                game_length += ~ended
                pending["charts/episodic_return"] += game_return[game_over].tolist()
                pending["charts/episodic_length"] += game_length[game_over].tolist()
                last_returns.extend(game_return[game_over].tolist())
                game_return[game_over], game_length[game_over] = 0, 0
                obs, ended, made = next_obs, terminated | truncated, args.num_envs
                due = (global_step + made) // args.train_frequency - global_step // args.train_frequency
                due = due if len(replay) >= args.learning_starts else 0
                pending["time/act"].append(time.time() - start)
            if due:
                start = time.time()
                rng = np.random.default_rng((args.seed, updates))  # so a resumed run goes on with the same stream
                shape = due, args.batch_size
                if args.prioritized and global_step >= 0:
                    *drawn, importance = replay.sample_by_priority(rng, shape, args.importance_exponent)
                    chosen = drawn
                else:
                    chosen, importance = replay.sample(rng, shape, n_step), np.ones(shape, np.float32)
                batches = WeightedTransitions(replay.transitions(*chosen, n_step, args.gamma), importance)
                pending["time/sample"].append(time.time() - start)
                learning_rate = lambda_ * rate + (1 - lambda_) * last_rate
                state, metrics = q_learn(state, batches, learning_rate, lambda_, rainbow_loss, args)
                priority = metrics.pop("priority")
                updates += due
                for name, value in metrics.items():
                    pending[name].append(value)
            global_step += made
            last = global_step >= total_timesteps or interrupted.is_set()
            if global_step == 0 and offline_steps:  # the student goes on with a replay of its own
                replay = new_replay()
                state = state.replace(target_params=jax.tree.map(jnp.copy, state.params))

            if global_step % args.iteration_steps < made and global_step < total_timesteps:
                start = time.time()
                returns = evaluate_student()
                logged_at += time.time() - start  # not the training's time
                if global_step > 0 and mentor:
                    scores = returns.mean(), progress["teacher_score"], random_score
                    lambda_ = distill_weight(lambda_, *scores, global_step, args.wean_steps)
            if global_step >= args.wean_steps:
                lambda_ = 0.0
            save_now = last or global_step % args.checkpoint_every < made
            if save_now or global_step % args.log_every < made:
                means = {name: float(np.mean(np.concatenate([np.ravel(x) for x in values])))
                         for name, values in jax.device_get(dict(pending)).items() if values}  # fmt: skip  # sync
                pending.clear()
                bad = [name for name, value in means.items() if not np.isfinite(value)]
                if bad:
                    good = run_dir / "checkpoint.msgpack"
                    good = f"last good checkpoint: {good}" if good.is_file() else "no checkpoint was saved before"
                    refuse(f"{bad[0]} is not finite at step {global_step}, so the run stopped without saving; {good}; "
                           "a new run with a lower --learning-rate may help", code=1)  # fmt: skip
                seconds = time.time() - logged_at
                speed, update_speed = (global_step - logged_step) / seconds, (updates - logged_updates) / seconds
                logged_at, logged_step, logged_updates = time.time(), global_step, updates
                means |= {"charts/updates_per_second": update_speed, "charts/distill_weight": lambda_}
                means["charts/learning_rate"] = lambda_ * rate + (1 - lambda_) * last_rate
                if mentor:
                    means["charts/teacher_score"] = progress["teacher_score"]
                online = global_step > 0
                if online:
                    means |= {"charts/SPS": speed, "charts/epsilon": epsilon(global_step)}
                if len(last_returns) == 20:
                    means["charts/episodic_return_20"] = float(np.mean(last_returns))
                logger.log(global_step, means)
                left, of = (total_timesteps - global_step, total_timesteps) if online else (-global_step, offline_steps)
                returned = means.get("charts/episodic_return_20", np.nan)
                td_loss, distill_loss = (means.get(f"losses/{name}", np.nan) for name in ("td_loss", "distill_loss"))
                playing = f"return (20 games) {returned:8.2f}   SPS {speed:5.0f}   " if online else ""
                print(f"{'online' if online else 'offline'} step {global_step:>10,} {1 - left / of:4.0%}   {playing}"
                      f"updates/s {update_speed:5.0f}   lambda {lambda_:4.2f}   td loss {td_loss:7.4f}   distill loss "
                      f"{distill_loss:7.4f}   {left / speed / 60:4.0f} min left", flush=True)  # fmt: skip
            if save_now:
                progress |= {"global_step": global_step, "last_returns": list(last_returns), "distill_weight": lambda_}
                progress["wall_seconds"] = time.time() - logger.started
                save_checkpoint(run_dir, state, progress)
    finally:
        for s, handler in old_handlers.items():
            signal.signal(s, handler)

    # --- evaluate and save ---
    result = {"final_return": float(np.mean(last_returns)) if last_returns else None, "eval_return": None}
    result |= {"teacher_score": progress["teacher_score"], "global_step": global_step, "run_dir": run_dir}
    if global_step < total_timesteps:
        print(f"interrupted at step {global_step}; continue with --resume {run_dir}")
        return result
    if args.save_model:
        model = {"format": f"{Path(__file__).stem} 1", "args": json.dumps(asdict(args))}
        model["params"] = jax.device_get(state.params)
        write_whole(run_dir / "model.msgpack", flax.serialization.msgpack_serialize(model))
    # The replay first: a resumed run can make up for an evaluation, not for the replay.
    if args.save_replay and len(replay) == 0:
        print("nothing to save: no step was played since the run was resumed")
    elif args.save_replay:
        print(f"saves the {len(replay):,} steps in the replay", flush=True)
        shards = (replay.export(i, {"env_id": args.env_id, "protocol": args.protocol}) for i in range(args.num_envs))
        try:
            teachers.save_replay(run_dir / "replay", shards, args.num_envs)
        except (OSError, teachers.TeacherError) as error:
            refuse(f"--save-replay: {error}; the model is saved", code=1)
    returns = evaluate_student(run_dir if args.capture_video else None)
    return result | {"eval_return": float(returns.mean())}


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:  # before the first step, during an evaluation, or the second Ctrl-C
        refuse("interrupted", code=130)
