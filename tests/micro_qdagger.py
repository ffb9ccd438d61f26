"""Both QDagger scripts on micro-environments: frames stacked as EnvPool stacks them, and a teacher that knows."""

import csv
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import numpy as np
import pytest
from micro_envs import MicroEnv

import teachers

GAMMA = 0.9


def stacked(kind: type[MicroEnv]) -> type[MicroEnv]:
    """Its frames stacked as EnvPool stacks them."""

    class Stacked(kind):
        def observe(self):
            new, frame = self.time == 0, super().observe()[:, -1:]
            stack = self.stack[:, 1:] if hasattr(self, "stack") else frame
            stack = np.concatenate([stack, frame], axis=1) if stack is not frame else np.repeat(frame, 4, axis=1)
            self.stack = np.where(new[:, None, None, None], np.repeat(frame, 4, axis=1), stack)
            return self.stack.copy()

    return Stacked


def fake_teacher(right: bool = True, kind="q"):
    """Knows the bit that MatchTheBit shows (or, worse than random, its opposite)."""

    def apply(obs, params):
        bit = (obs[:, 0].mean(axis=(1, 2)) > 130) ^ (not right)
        return jax.nn.one_hot(bit.astype(int), 2) * (1.0 if kind == "q" else 10.0)

    return SimpleNamespace(kind=kind, apply=apply, params={}, protocol={}, source="fake", network="none")


SMALL = dict(network="shallow", num_envs=4, learning_starts=200, eval_steps=1, eval_episodes=20, collect_steps=400,
             replay_capacity=4000, learning_rate=1e-3, gamma=GAMMA, target_period=50, log_every=200)  # fmt: skip


class Micro:
    """`main` of a script on micro-environments: micro(environment, teacher, **settings)."""

    size = 42  # of its frames; data files have 84

    def __init__(self, script, monkeypatch, tmp_path):
        self.script, self.monkeypatch, self.runs_dir = script, monkeypatch, str(tmp_path)

    def __call__(self, kind, teacher=None, **settings):
        self.play(kind)
        self.monkeypatch.setattr(self.script.teachers, "load_teacher", lambda path, num_actions: teacher)
        settings = {"teacher": "fake" if teacher else "none"} | settings
        return self.script.main(self.script.Args(**SMALL | dict(runs_dir=self.runs_dir) | settings))

    def play(self, kind):
        def make_game(args, num_envs, entropy, render=False):
            return stacked(kind)(num_envs, self.size, int(np.random.SeedSequence(entropy).generate_state(1)[0]))

        scores = teachers.Scores(1.5, 3.0)  # of MatchTheBit
        self.monkeypatch.setattr(self.script, "make_game", make_game)
        self.monkeypatch.setattr(self.script.teachers, "scores_of", lambda env_id: scores)


def action_values(result, kind, q_values) -> list[tuple[int, int, np.ndarray]]:
    """(time, bit, action values) of the saved network; `q_values(args, num_actions, params, obs)` computes them."""
    model = flax.serialization.msgpack_restore((result["run_dir"] / "model.msgpack").read_bytes())
    game, out = stacked(kind)(16, Micro.size, seed=0), []
    obs, _ = game.reset()
    for _ in range(game.length):
        q = np.asarray(q_values(json.loads(model["args"]), game.num_actions, model["params"], obs))
        out += list(zip(game.time.tolist(), game.bit.tolist(), q))
        obs = game.step(np.ones(16, int))[0]
    return out


def rows_of(result, metric) -> dict[int, float]:
    rows = csv.DictReader((Path(result["run_dir"]) / "metrics.csv").open())
    return {int(row["global_step"]): float(row["value"]) for row in rows if row["metric"] == metric}


def params_of(result):
    return flax.serialization.msgpack_restore((result["run_dir"] / "model.msgpack").read_bytes())["params"]


def interrupt_at(script, monkeypatch, updates):
    """Ctrl-C as soon as that many updates were made. Call what it returns to undo it."""
    q_learn = script.q_learn

    def interrupting(state, *rest):
        state, metrics = q_learn(state, *rest)
        if int(state.step) == updates:
            signal.raise_signal(signal.SIGINT)
        return state, metrics

    monkeypatch.setattr(script, "q_learn", interrupting)
    return lambda: monkeypatch.setattr(script, "q_learn", q_learn)


def refused(capsys, run, message):
    with pytest.raises(SystemExit) as caught:
        run()
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err
