"""Micro-environments with EnvPool's interface and known values: what a script must learn in seconds, threads included.

Like EnvPool, they reset on the step after an end: that step ignores its action, pays nothing and returns the first
observation of the next episode.
"""

from types import SimpleNamespace

import numpy as np


class MicroEnv:
    """Episodes of `length` steps of B environments; observations are constant frames that show one bit."""

    length = 1
    num_actions = 2

    def __init__(self, num_envs: int, frame_size: int, seed: int):
        self.rng, self.num_envs, self.frame_size = np.random.default_rng(seed), num_envs, frame_size
        self.observation_space = SimpleNamespace(shape=(4, frame_size, frame_size))
        self.action_space = SimpleNamespace(n=self.num_actions)
        self.ended = np.zeros(num_envs, bool)

    def reset(self):
        self.begin(np.ones(self.num_envs, bool))
        return self.observe(), {}

    def step(self, action):
        dummy = self.ended
        reward, terminated, truncated = self.play(np.asarray(action))
        self.time += 1
        self.begin(dummy)
        reward = np.where(dummy, 0, reward).astype(np.float32)
        terminated, truncated = terminated & ~dummy, truncated & ~dummy
        self.ended = terminated | truncated
        info = {"reward": reward.copy(), "terminated": terminated.astype(np.int32)}
        return self.observe(), reward, terminated, truncated, info

    def begin(self, which):
        if not hasattr(self, "time"):
            self.time, self.bit = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.time[which] = 0
        self.bit[which] = self.rng.integers(0, 2, self.num_envs)[which]

    def observe(self):
        level = (60 + 120 * self.bit + 15 * self.time).astype(np.uint8)
        return np.broadcast_to(level[:, None, None, None], (self.num_envs, *self.observation_space.shape)).copy()

    def play(self, action):
        done = self.time + 1 >= self.length
        return self.reward(action), done, np.zeros_like(done)

    def reward(self, action):
        raise NotImplementedError


class ConstantReward(MicroEnv):
    """Pays 1 a step for ever; a time limit of 5 steps truncates. V = 1 / (1 - gamma), if truncation bootstraps."""

    length = 5

    def observe(self):  # not of the time: no row ever trains the value of a state seen only at the limit
        self.time_shown, self.time = self.time, np.zeros_like(self.time)
        frames = super().observe()
        self.time = self.time_shown
        return frames

    def play(self, action):
        limit = self.time + 1 >= self.length
        return np.ones(self.num_envs), np.zeros_like(limit), limit


class ObservedReward(MicroEnv):
    """Pays +1 or -1, as the observation shows. V = +1 or -1."""

    def reward(self, action):
        return 2.0 * self.bit - 1


class DelayedReward(MicroEnv):
    """Pays 1 at the last of three steps. V = gamma^2, gamma, 1."""

    length = 3

    def reward(self, action):
        return (self.time == 2).astype(float)


class RightAction(MicroEnv):
    """Pays 1 for action 1."""

    def reward(self, action):
        return (action == 1).astype(float)


class MatchTheBit(MicroEnv):
    """Pays 1 if the action is the bit shown, at each of three steps."""

    length = 3

    def reward(self, action):
        return (action == self.bit).astype(float)


class Catch(MicroEnv):
    """A ball falls through a 6 x 6 board, the paddle below moves left, not at all or right: +1 caught, -1 missed."""

    num_actions = 3

    def begin(self, which):
        super().begin(which)
        if not hasattr(self, "ball"):
            self.ball, self.paddle = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.ball[which] = self.rng.integers(0, 6, self.num_envs)[which]
        self.paddle[which] = self.rng.integers(0, 6, self.num_envs)[which]

    def observe(self):
        cell, board = self.frame_size // 6, np.zeros((self.num_envs, 4, self.frame_size, self.frame_size), np.uint8)
        for i in range(self.num_envs):
            row, left = min(self.time[i], 5) * cell, self.ball[i] * cell
            board[i, :, row : row + cell, left : left + cell] = 255
            left = self.paddle[i] * cell
            board[i, :, -cell // 2 :, left : left + cell] = 128
        return board

    def play(self, action):
        self.paddle = np.clip(self.paddle + action - 1, 0, 5)
        landed = self.time + 1 >= 5
        return np.where(landed, np.where(self.paddle == self.ball, 1.0, -1.0), 0.0), landed, np.zeros_like(landed)


def at_call(monkeypatch, script, name: str, number: int, happens):
    """Lets something happen at a call of a function of the script, before it is made."""
    function, calls = getattr(script, name), []

    def spy(*given):
        calls.append(1)
        if len(calls) == number:
            happens()
        return function(*given)

    monkeypatch.setattr(script, name, spy)


def die():
    """As good as a kill: nothing more is saved."""
    raise KeyboardInterrupt


def install(monkeypatch, script, kind: type[MicroEnv]):
    """Lets `script.main` play `kind` instead of an Atari game."""

    def make_env(args, num_envs, entropy, render=False):
        return kind(num_envs, args.frame_size, int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    monkeypatch.setattr(script, "make_env", make_env)
