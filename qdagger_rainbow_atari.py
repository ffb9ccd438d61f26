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
and the residual network; the rest of Rainbow by flags: --double --dueling --noisy. Lambda, the two phases, the other
workflows and the differences from the paper are those of qdagger_dqn_atari.py, the network's padding apart; and the
updates of one step of the environments are sampled together, before any of them changes a priority.

One device, CPU or GPU; the package teachers/ lies beside this script. What is not the algorithm (`Run`, `refuse`,
`play`) is in the appendix, the same in every script.
    python qdagger_rainbow_atari.py --env-id Pong-v5                    with the bundled teacher
    python qdagger_rainbow_atari.py --env-id Breakout-v5 --teacher runs/Breakout-v5__qdagger_dqn_atari__1__1790000000
    python qdagger_rainbow_atari.py --teacher none --network nature --double --dueling --noisy     Rainbow of 2018
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
from dataclasses import dataclass, replace
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
from flax.training.train_state import TrainState

import teachers


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
        may_be_0 = "seed total_timesteps offline_steps wean_steps distill_coef eval_steps epsilon_decay_steps"
        may_be_0 += " learning_rate final_learning_rate importance_exponent"
        check_numbers(self, may_be_0, "gamma epsilon eval_epsilon collect_epsilon", v_min=-1e9, v_max=-1e9)
        if self.num_atoms < 2 or self.v_min >= self.v_max:
            refuse("--num-atoms, --v-min, --v-max: need two atoms or more, from a lower to a higher value")
        if self.finetune and self.teacher not in (None, "none"):
            refuse("--teacher: a fine-tuned agent has none; leave out --teacher or --finetune")
        taught, least = not self.finetune and self.teacher != "none", self.num_envs * ((self.n_step or 3) + 5)
        has_data = taught and self.offline_steps > 0
        if self.teacher_data and not has_data:
            refuse("--teacher-data: is for the offline phase, which --finetune, --teacher none and --offline-steps 0 "
                   "leave out; leave it out as well")  # fmt: skip
        if self.total_timesteps < self.num_envs and not has_data:
            refuse("--total-timesteps 0: leaves nothing to do without a teacher and --offline-steps; raise one of them")
        if self.total_timesteps < self.num_envs and self.save_replay:
            refuse("--save-replay: the offline phase plays nothing to save; raise --total-timesteps, or leave it out")
        steps = {"learning-starts": self.learning_starts} | ({"collect-steps": self.collect_steps} if has_data else {})
        for flag in [flag for flag, x in steps.items() if x < least]:
            refuse(f"--{flag} {steps[flag]}: must be at least {least}, a window in each environment")
        if self.final_learning_rate is not None and not taught:
            refuse("--final-learning-rate: is for after a teacher; without one, --learning-rate is all there is")
        if (capacity := self.replay_capacity) // self.num_envs * self.num_envs < self.learning_starts:
            refuse(f"--replay-capacity {capacity}: must be at least --learning-starts, rounded to --num-envs")
        size = 84 * 84 * max(capacity, steps.get("collect-steps", 0))
        if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
            refuse(f"--replay-capacity, --collect-steps: {size // 7056:,} frames take {size:,} bytes, this machine has "
                   f"{memory:,}; choose fewer")  # fmt: skip


def check_numbers(args, may_be_0: str, fractions: str, **least: float):
    """Refuses numbers out of range: above 0 and at most a billion; fractions, 0 to 1; or as named here."""
    for name, x in vars(args).items():
        low, high = (0, 1) if name in fractions.split() else (least.get(name, 1e-12), 10**9)
        low = 0 if name in may_be_0.split() else low
        if type(x) in (int, float) and not low <= x <= high:  # NaN does not hold either
            at_least = "above 0" if 0 < low < 1 else f"at least {low}"
            refuse(f"--{name.replace('_', '-')} {x}: must be {at_least} and at most {high:,}")


# --- environment ------------------------------------------------------------------------------------------------------
PROTOCOLS = {  # Machado et al. (2018), as in Dopamine; Mnih et al. (2015)
    "dopamine": dict(repeat_action_probability=0.25, episodic_life=False, noop_max=1, use_fire_reset=False),
    "classic": dict(repeat_action_probability=0.0, episodic_life=True, noop_max=30, use_fire_reset=True),
}


def make_game(args: Args, num_envs: int, entropy: tuple[int, ...], render: bool = False):
    """EnvPool's vector of one Atari game: observations `[num_envs, 4, 84, 84]` uint8, the oldest frame first. Its
    seeds are drawn from `entropy`, since with seed + i two runs of neighbouring seeds would share nearly all games."""
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
        return nn.relu(x).reshape(x.shape[0], -1)
    layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if network == "nature" else [(16, 8, 4), (32, 4, 2)]
    for channels, size, stride in layers:
        x = nn.relu(conv(channels, (size, size), stride)(x))
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
        n, sigma = x.shape[-1], nn.initializers.constant(self.sigma * x.shape[-1] ** -0.5)
        uniform = lambda key, shape: jax.random.uniform(key, shape, minval=-(n**-0.5), maxval=n**-0.5)  # noqa: E731
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
        x, units = features(obs, self.network), 256 if self.network == "shallow" else 512
        hidden = nn.relu(dense(units)(x))
        logits = dense(self.num_actions * self.num_atoms)(hidden).reshape(-1, self.num_actions, self.num_atoms)
        if self.dueling:  # the stream above is that of the advantages (Wang et al., 2016, equation 9)
            value = dense(self.num_atoms)(nn.relu(dense(units)(x)))
            logits = value[:, None] + logits - logits.mean(axis=1, keepdims=True)
        return logits


# --- state and replay -------------------------------------------------------------------------------------------------
@flax.struct.dataclass
class Transitions:
    """A batch of n-step transitions; m is n, or less where the episode ends before."""

    obs: jax.Array  # [B, 4, H, W] uint8, s_t
    action: jax.Array  # [B] a_t
    n_step_reward: jax.Array  # [B] sum over k < m of gamma^k r_{t+k}
    discount: jax.Array  # [B] gamma^m, or 0 if a termination is in the window
    next_obs: jax.Array  # [B, 4, H, W] uint8, s_{t+m}
    teacher_policy: jax.Array  # [B, A] pi_T(. | s_t); zeros where the teacher was not asked


class QState(TrainState):
    """Flax's train state (`step` counts updates, `params` are the online network), and the target network."""

    target_params: Any


class ReplayBuffer:
    """The newest steps of E environments in single frames: a ring of rows for each environment.

    A row: the newest frame of s_t, a_t, and what the step with a_t returned. EnvPool's dummy row after an end keeps the
    episode's last frame, from which a time limit bootstraps; no transition starts there. States are rebuilt as EnvPool
    stacks them: the first frame of a game fills the stack, a lost life does not empty it."""

    def __init__(self, num_envs: int, rows: int, frame_shape: tuple[int, int], num_actions: int):
        self.rows, self.written = rows, 0  # rows written, also those overwritten since
        self.frames = np.zeros((num_envs, rows, *frame_shape), np.uint8)  # takes its memory as it is written
        self.action = np.zeros((num_envs, rows), np.int32)
        self.reward = np.zeros((num_envs, rows), np.float32)
        self.teacher_policy = np.zeros((num_envs, rows, num_actions), np.float32)
        self.history = np.zeros((num_envs, rows), np.int8)  # earlier frames of the same episode in the stack, at most 3
        self.terminated, self.truncated = np.zeros((2, num_envs, rows), bool)
        self.first, self.starts = np.zeros((2, num_envs, rows), bool)  # a game begins; a transition may start here
        # Around an end: its last step (over, unless it is a life's), the dummy row, the next game's first row (begins).
        self.over, self.dummy, self.begins = *np.zeros((2, num_envs), bool), np.ones(num_envs, bool)

    def __len__(self) -> int:
        return min(self.written, self.rows) * len(self.action)

    def add(self, obs: np.ndarray, action, reward, terminated, truncated, game_over, teacher_policy=0.0):
        """One row for each environment: arrays `[E, ...]`, of which obs `[E, 4, H, W]` came before the action."""
        t = self.written % self.rows
        self.frames[:, t], self.action[:, t], self.reward[:, t] = obs[:, -1], action, reward
        self.terminated[:, t], self.truncated[:, t] = terminated, truncated
        self.history[:, t] = np.where(self.begins, 0, np.minimum(self.history[:, t - 1] + 1, 3))
        self.first[:, t], self.starts[:, t], self.teacher_policy[:, t] = self.begins, ~self.dummy, teacher_policy
        self.begins, self.dummy, self.over = self.dummy & self.over, terminated | truncated, game_over
        self.written += 1

    def known(self, env: np.ndarray, t: np.ndarray, n_step: int) -> np.ndarray:
        """Whether transitions start in these rows: the state's frames and the n rows after it are in the ring."""
        age = (t - max(self.written - self.rows, 0)) % self.rows  # rows since the oldest
        window = age + n_step < min(self.written, self.rows)
        return self.starts[env, t] & (age >= self.history[env, t]) & window

    def sample(self, rng: np.random.Generator, shape: tuple[int, int], n_step: int) -> tuple[np.ndarray, np.ndarray]:
        """Environments and rows `[updates, B]` of which transitions start, uniformly, with replacement."""
        env, t = np.zeros((2, 0), int)
        while need := shape[0] * shape[1] - len(env):
            drawn = rng.integers(len(self.action), size=need), rng.integers(min(self.written, self.rows), size=need)
            good = self.known(*drawn, n_step)
            env, t = np.append(env, drawn[0][good]), np.append(t, drawn[1][good])
        return env.reshape(shape), t.reshape(shape)

    def states(self, env: np.ndarray, t: np.ndarray) -> np.ndarray:
        """`[..., 4, H, W]` uint8 of environments and rows `[...]`."""
        back = np.minimum(np.arange(3, -1, -1), self.history[env, t][..., None])
        return self.frames[env[..., None], (t[..., None] - back) % self.rows]

    def transitions(self, env: np.ndarray, t: np.ndarray, n_step: int, gamma: float) -> Transitions:
        """The transitions that start in these rows `[...]`."""
        window = (env[..., None], (t[..., None] + np.arange(n_step)) % self.rows)
        columns = self.reward[window], self.terminated[window], self.truncated[window]
        reward, discount, steps = n_step_return(*columns, gamma)
        next_obs, policy = self.states(env, (t + steps) % self.rows), self.teacher_policy[env, t]
        return Transitions(self.states(env, t), self.action[env, t], reward, discount, next_obs, policy)

    def fill(self, data: teachers.Replay, n_step: int):
        """Takes rows of a file, as if the environments had played a share each. Files lack an episode's last frame, so
        windows that a time limit ends are lost."""
        data = replace(data, truncated=data.truncated.copy())
        self.written = rows = len(data.action) // len(self.action)
        ends = slice(rows - 1, None, rows)
        data.truncated[ends] |= ~data.terminated[ends]  # where a share ends, its story breaks off
        columns = {name: getattr(data, name) for name in teachers.replay.COLUMNS} | {"starts": data.usable(n_step)}
        columns["history"] = np.minimum(np.arange(len(data.action)) - data.begin, 3).astype(np.int8)
        for name, column in columns.items():
            column = column[: rows * len(self.action)].reshape(-1, rows, *column.shape[1:])
            if rows == self.rows:
                setattr(self, name, column)  # gigabytes of frames are not copied
            else:
                getattr(self, name)[:, :rows] = column

    def export(self, env: int, protocol: dict) -> teachers.Replay:
        """One environment's rows in the order of play."""
        order = np.arange(max(0, self.written - self.rows), self.written) % self.rows
        columns = {name: getattr(self, name)[env][order] for name in teachers.replay.COLUMNS}
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
        self.tree.set(env * self.rows + t, np.where(self.known(env, t, self.n_step), priority, 0.0))

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
        env, t = np.divmod(leaf, self.rows)
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


def rainbow_loss(params, state: QState, batch: tuple[Transitions, jax.Array], lambda_: jax.Array, args: Args):
    """Mean of w (L_C51 + c lambda L_distill); w `[B]` comes with the batch. The metrics hold the next priorities."""
    (given, weight), atoms = batch, jnp.linspace(args.v_min, args.v_max, args.num_atoms)
    take_action = jax.vmap(lambda one, i: one[i])  # x [B, A, ...] of the actions [B]: [B, ...]
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
    loss = jnp.mean(weight * (c51_loss + args.distill_coef * lambda_ * distill_loss))
    metrics = {"losses/td_loss": jnp.mean(c51_loss), "losses/distill_loss": jnp.mean(distill_loss)}
    metrics["losses/q_values"] = jnp.mean(take_action(q, given.action))
    return loss, metrics | {"priority": jnp.sqrt(c51_loss + 1e-10)}


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
        scale = 1.0 if teacher.kind == "policy" else temperature
        self.compiled = jax.jit(lambda params, obs: nn.softmax(teacher.apply(obs, params) / scale))
        self.teacher = teacher

    def policy(self, obs: np.ndarray) -> np.ndarray:
        """pi_T `[B, A]` of obs `[B, 4, 84, 84]`: softmax(Q / tau) if value-based, softmax(logits) if it is a policy."""
        return np.asarray(self.compiled(self.teacher.params, obs))

    def act(self, obs: np.ndarray, rng: np.random.Generator, epsilon) -> tuple[np.ndarray, np.ndarray]:
        """Actions `[B]`: its most probable ones if value-based, else samples; random with epsilon `[B]`. And pi_T."""
        action = (policy := self.policy(obs)).argmax(axis=1)
        if self.teacher.kind == "policy":
            action = (policy.cumsum(axis=1) > rng.random((len(policy), 1))).argmax(axis=1)
        random = rng.integers(policy.shape[1], size=len(policy))
        return np.where(rng.random(len(policy)) < epsilon, random, action).astype(np.int32), policy

    def score(self, args: Args) -> float:
        """Its mean return. There must be something to learn from it."""
        print(f"             the teacher is evaluated, {args.eval_steps:,} steps or more", flush=True)
        rng, games = np.random.default_rng((args.seed, 2**31)), make_game(args, args.eval_episodes, (args.seed, 2**31))
        act = lambda obs, _: self.act(obs, rng, args.eval_epsilon)[0]  # noqa: E731
        returns = play(args.eval_episodes, games, step_env, act, args.eval_steps)
        score, random_score = returns.mean(), teachers.scores_of(args.env_id).random
        print(f"             {score:.2f} +- {returns.std():.2f} in {len(returns)} whole games", flush=True)
        if score <= random_score:
            refuse(f"--teacher: its score is {score:.2f}, a random policy's {random_score}; choose another, or another "
                   "--protocol")  # fmt: skip
        return float(score)

    def complete(self, replay: ReplayBuffer, args: Args):
        """D_T: it sees every state of its replay or, where it came without, it plays: with more random actions from
        environment to environment, so that mistakes and the way back from them are in the data too."""
        started, total = time.time(), len(replay) or replay.action.size

        def progress(what: str, done: int, step: int):  # a line at every tenth of a long wait
            if done * 10 // total > (done - step) * 10 // total and time.time() - started > 2:
                left = max((time.time() - started) * (total - done) / done / 60, 0)
                print(f"             {what} {min(done, total):>10,} of {total:,}   {left:4.0f} min left", flush=True)

        for first in range(0, len(replay), 256):  # of one environment
            t, env = np.arange(first, first + 256) % total, np.zeros(256, int)  # always 256: one compilation
            replay.teacher_policy[0, t] = self.policy(replay.states(env, t))
            progress("shown to the teacher", first + 256, 256)
        if len(replay) == 0:
            env, rng = make_game(args, args.num_envs, (args.seed, 2**30)), np.random.default_rng(args.seed)
            (obs, _), epsilon = env.reset(), np.linspace(args.collect_epsilon, 0.0, args.num_envs)
        while len(replay) < total:
            action, policy = self.act(obs, rng, epsilon)
            next_obs, *row, _ = step_env(env, action)
            replay.add(obs, action, *row, policy)
            obs = next_obs
            progress("collected", len(replay), args.num_envs)


# --- teacher and data -------------------------------------------------------------------------------------------------
def prepare(args: Args, run, state, same: tuple[str, ...], num_actions: int, n_step: int, new_replay: Callable):
    """The student (to fine-tune: one of the `same` settings), its teacher, and the replay to begin with: D_T before
    the offline phase, or else the student's own. What is wrong with files is said before any time is spent, and a run
    folder made; then the teacher is evaluated, and D_T completed."""
    mentor, folder, taught = None, None, not args.finetune and args.teacher != "none"
    replay = new_replay(args.num_envs, args.replay_capacity // args.num_envs)
    if args.finetune and not args.resume:
        saved, source = read_checkpoint("--finetune", args.finetune)
        for name in same:
            if saved.get(name) != getattr(args, name):
                refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: --finetune goes on with {saved.get(name)}")
        state = flax.serialization.from_state_dict(state, source["state"])

    def check(who: str, given: dict, wrong_game: str):
        given = {"env_id": args.env_id} | PROTOCOLS.get(given.get("protocol"), {}) | given
        if len({name.partition("-")[0].removesuffix("NoFrameskip") for name in (given["env_id"], args.env_id)}) > 1:
            refuse(wrong_game.format(given["env_id"], args.env_id))
        if any(given.get(name, x) != x for name, x in PROTOCOLS[args.protocol].items()):
            print(f"warning      {who} under another protocol: {given}")

    settings, limit = ", ".join(f"{name} {x}" for name, x in PROTOCOLS[args.protocol].items()), args.max_episode_steps
    resumed = " (resumed: new games, and an empty replay online)" if args.resume else ""
    told = {"environment": f"{args.env_id}: 4 grey frames of 84 x 84, {num_actions} actions (minimal), limit {limit} "
                           f"steps = {4 * limit} frames, {settings}, rewards clipped for learning only",
            "plan": f"{args.offline_steps * taught:,} offline updates, {args.total_timesteps:,} steps in "
                    f"{args.num_envs} environments, on {jax.devices()[0].device_kind}, from {run.step:,}, up to "
                    f"{args.replay_capacity * 7056 / 1e9:.1f} GB of replay{resumed}"}  # fmt: skip
    try:
        if taught:
            teachers.scores_of(args.env_id)
            path = args.teacher or teachers.bundled_teacher(args.env_id)
            mentor = Mentor(teacher := teachers.load_teacher(path, num_actions=num_actions), args.temperature)
            check("the teacher learned", teacher.protocol,
                  f"--teacher {path}: it learned {{}}, not {{}}; choose one of this game")  # fmt: skip
            told["teacher"] = f"{teacher.source}: {teacher.network} network, {teacher.kind}"
        if run.step < 0:
            folder = args.teacher_data or teachers.replay_beside(path)
            replay = new_replay(args.num_envs, args.collect_steps // args.num_envs)
            again = " (again: checkpoints hold none)" if args.resume else ""
            told["data"] = (f"none beside the teacher: it plays {args.collect_steps:,} steps{again}; the paper's data "
                            "are of all its training")  # fmt: skip
        elif args.finetune and not args.resume:
            folder = teachers.replay_beside(args.finetune)
            told["data"] = "that run kept no replay (--save-replay), so it begins with an empty one"
        if folder:
            newest = args.collect_steps if taught else replay.action.size
            data = teachers.load_replay(folder, num_actions=num_actions, start=-newest)
            check("the data were played", data.protocol,
                  f"{folder}: data of {{}}, not of {{}}; choose those of this game")  # fmt: skip
            replay = new_replay(1, len(data.action)) if taught else replay
            if len(data.action) >= len(replay.action):
                replay.fill(data, n_step)
            if not replay.known(*np.indices(replay.action.shape), n_step).any():
                refuse(f"{folder}: its {len(data.action)} rows hold no window of {n_step} steps; name longer data")
            told["data"] = f"{len(replay):,} steps from {folder}"
    except teachers.TeacherError as error:
        refuse(f"{'--teacher, --teacher-data' if taught else '--finetune'}: {error}")
    run.open(**told)
    if mentor and run.progress["teacher_score"] is None:
        run.progress["teacher_score"] = mentor.score(args)
    if run.step < 0:
        mentor.complete(replay, args)
    return run.restore(state), mentor, replay


def save_replay(replay: ReplayBuffer, args: Args, folder: Path):
    """The student's replay, as teacher data for other runs."""
    print(f"saves the {len(replay):,} steps in the replay" if len(replay) else
          "nothing to save: no step was played since the run was resumed", flush=True)  # fmt: skip
    shards = (replay.export(i, {"env_id": args.env_id, "protocol": args.protocol}) for i in range(args.num_envs))
    try:
        if len(replay):
            teachers.save_replay(folder / "replay", shards, args.num_envs)
    except (OSError, teachers.TeacherError) as error:
        refuse(f"--save-replay: {error}; the model is saved", code=1)


# --- main -------------------------------------------------------------------------------------------------------------
def main(args: Args) -> dict:
    """Trains, evaluates, saves. Returns final_return (20 games), eval_return, teacher_score, global_step, run_dir."""
    run = Run(args)
    args = run.args  # with --resume those of that run
    # Reincarnation, fine-tuning or tabula rasa: n, and the learning rates while lambda is 1 and once it is 0.
    taught = not args.finetune and args.teacher != "none"
    rate, n_step = (1e-4, 3) if taught else (1e-5, 1) if args.finetune else (6.25e-5, 3)
    rate, n_step = rate if args.learning_rate is None else args.learning_rate, args.n_step or n_step
    last_rate = args.final_learning_rate if args.final_learning_rate is not None else 1e-5 if taught else rate
    offline_steps, total_steps = args.offline_steps * taught, args.total_timesteps // args.num_envs * args.num_envs
    if not args.resume:  # the offline phase counts its updates up to step 0
        run.step, run.progress["distill_weight"], run.progress["teacher_score"] = -offline_steps, float(taught), None

    env = make_game(args, args.num_envs, (args.seed, max(run.step, 0)))
    num_actions, obs_shape = int(env.action_space.n), env.observation_space.shape
    noise = args.noisy_sigma if args.noisy else None
    network = RainbowNetwork(args.network, num_actions, args.num_atoms, args.dueling, noise)
    init_key, act_key, eval_key = jax.random.split(jax.random.key(args.seed), 3)
    params = network.init(init_key, np.zeros((1, *obs_shape), np.uint8))
    optimizer = optax.scale_by_adam(eps=1.5e-4)  # the learning rate follows lambda, not the number of updates
    state = QState.create(apply_fn=network.apply, params=params, tx=optimizer, target_params=params)
    new_replay = lambda num_envs, rows: PrioritizedReplay(n_step, num_envs, rows, obs_shape[1:], num_actions)  # noqa: E731
    same = "network", "env_id", "protocol", "num_atoms", "v_min", "v_max", "dueling", "noisy"
    state, mentor, replay = prepare(args, run, state, same, num_actions, n_step, new_replay)
    updates, lambda_ = int(state.step), run.progress["distill_weight"]

    def evaluate_student(last: bool = False) -> np.ndarray:
        if last and args.save_replay:  # first: a resumed run can make up for an evaluation, not for the replay
            save_replay(replay, args, run.folder)
        film = run.folder if last and args.capture_video else None
        start, key, entropy = time.time(), jax.random.fold_in(eval_key, updates), (args.seed, 2**31, updates)
        explore = partial(choose, network.apply, state.params)
        act = lambda obs, i: np.asarray(explore(obs, key, i, args.eval_epsilon, False, args))  # noqa: E731
        games = make_game(args, args.eval_episodes, entropy, render=film is not None)
        returns = play(args.eval_episodes, games, step_env, act, args.eval_steps, film)
        run.since = run.since[0] + time.time() - start, run.since[1]  # not the training's time
        return returns

    def log(line: str, **more: float):
        run.progress["distill_weight"] = lambda_
        more |= {"charts/learning_rate": lambda_ * rate + (1 - lambda_) * last_rate, "charts/distill_weight": lambda_}
        more |= {"charts/teacher_score": run.progress["teacher_score"]} if mentor else {}
        line += "updates/s {charts/updates_per_second:5.0f}   lambda {charts/distill_weight:4.2f}   td loss "
        line += "{losses/td_loss:7.4f}   distill loss {losses/distill_loss:7.4f}   {left:4.0f} min left"
        run.log(state, more, line)

    with run:
        # Offline the student learns from D_T, and plays nothing.
        while run.step < 0 and not run.stop:
            start, made = time.time(), min(args.updates_per_call, -run.step)
            rng = np.random.default_rng((args.seed, updates))  # so a resumed run goes on with the same stream
            shape = made, args.batch_size
            chosen, weight = replay.sample(rng, shape, n_step), np.ones(shape, np.float32)
            batches = replay.transitions(*chosen, n_step, args.gamma), weight
            run.add({"time/sample": time.time() - start}, updates_per_second=made)
            state, metrics = q_learn(state, batches, rate, lambda_, rainbow_loss, args)
            metrics.pop("priority")
            run.add(metrics)
            updates, run.step = updates + made, run.step + made
            if run.step == 0:  # the online phase begins with the online network as its target
                state = state.replace(target_params=jax.tree.map(jnp.copy, state.params))
            if run.step % args.iteration_steps < made and run.step < total_steps:
                run.evaluated(evaluate_student())
            if run.due(run.step, made, 0, -offline_steps):
                log("offline step {step:>10,} {share:4.0%}   ")

        # Online it plays, and learns from what it played itself, with less and less of the teacher.
        if offline_steps:
            replay = new_replay(args.num_envs, args.replay_capacity // args.num_envs)
        highest = args.epsilon if args.finetune or offline_steps else 1.0  # it has learned before
        falls = args.learning_starts, args.learning_starts + args.epsilon_decay_steps
        epsilon = lambda: 0.0 if args.noisy else float(np.interp(run.step, falls, (highest, args.epsilon)))  # noqa: E731
        drawn = priority = None  # rows of the last updates, and the priorities that these give them
        (obs, _), made, ended = env.reset(), args.num_envs, np.zeros(args.num_envs, bool)
        game_return, game_length = np.zeros(made), np.zeros(made, int)
        while run.step < total_steps and not run.stop:
            start = time.time()
            policy = mentor.policy(obs) if lambda_ > 0 else 0.0  # a student past its teacher does not ask
            explore = act_key, run.step, epsilon(), args.noisy, args
            action = np.asarray(choose(network.apply, state.params, obs, *explore))  # sync
            if drawn:  # the last updates are done
                replay.update(*drawn, np.asarray(priority))
                drawn = None
            next_obs, reward, terminated, truncated, game_over, game_reward = step_env(env, action)
            replay.add(obs, action, reward, terminated, truncated, game_over, policy)
            game_return, game_length = game_return + game_reward, game_length + ~ended
            run.add({"charts/episodic_return": game_return[game_over].tolist(),
                     "charts/episodic_length": game_length[game_over].tolist()}, SPS=made)  # fmt: skip
            game_return[game_over], game_length[game_over] = 0, 0
            obs, ended, run.step = next_obs, terminated | truncated, run.step + made
            due = run.step // args.train_frequency - (run.step - made) // args.train_frequency
            due = due if len(replay) >= args.learning_starts else 0
            run.add({"time/act": time.time() - start}, updates_per_second=due)
            if due:
                start, rng, shape = time.time(), np.random.default_rng((args.seed, updates)), (due, args.batch_size)
                if args.prioritized:
                    *drawn, weight = replay.sample_by_priority(rng, shape, args.importance_exponent)
                chosen = drawn or replay.sample(rng, shape, n_step)
                weight = weight if drawn else np.ones(shape, np.float32)
                batches = replay.transitions(*chosen, n_step, args.gamma), weight
                run.add({"time/sample": time.time() - start})
                learning_rate = lambda_ * rate + (1 - lambda_) * last_rate
                state, metrics = q_learn(state, batches, learning_rate, lambda_, rainbow_loss, args)
                priority = metrics.pop("priority")
                run.add(metrics)
                updates += due
            if run.step % args.iteration_steps < made and run.step < total_steps:
                score = run.evaluated(evaluate_student())
                if mentor:
                    scores = score, run.progress["teacher_score"], teachers.scores_of(args.env_id).random
                    lambda_ = distill_weight(lambda_, *scores, run.step, args.wean_steps)
            lambda_ = lambda_ if run.step < args.wean_steps else 0.0
            if run.due(run.step, made, total_steps):
                playing = "return (20 games) {charts/episodic_return_20:8.2f}   SPS {charts/SPS:5.0f}   "
                log("online step {step:>10,} {share:4.0%}   " + playing, **{"charts/epsilon": epsilon()})

    result = run.end(total_steps, state.params, partial(evaluate_student, last=True))
    return result | {"teacher_score": run.progress["teacher_score"]}


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
