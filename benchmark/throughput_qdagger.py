"""How fast are the two QDagger scripts here, and what do sampling, acting and priorities cost?

    python benchmark/throughput_qdagger.py                             qdagger_dqn_atari.py
    python benchmark/throughput_qdagger.py qdagger_rainbow_atari --network nature

Prints medians over the repeats: the bare update, which is the jitted step in a loop over batches that lie ready in
memory; the offline phase as `main` runs it, from sampling to logging; acting alone; the online phase; and the last two
against the serial bound 1 / (1/acting + 1/updating). For Rainbow, what drawing by priority and updating the priorities
cost beside drawing uniformly, as a share of an update.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SCRIPTS = "qdagger_dqn_atari", "qdagger_rainbow_atari"
script = importlib.import_module(sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in SCRIPTS else SCRIPTS[0])
RAINBOW = script.__name__ == SCRIPTS[1]
DEFAULT = script.Args(network="shallow", replay_capacity=100_000)


@dataclass(frozen=True)
class Benchmark:
    """Measures the speed of a script; all of its own flags are accepted too."""

    repeats: int = 3  # measurements of each speed
    updates: int = 2_000  # updates of each measurement
    args: Annotated[script.Args, tyro.conf.arg(name="")] = field(default_factory=lambda: DEFAULT)


def random_replay(args, steps: int, n_step: int):
    """A replay of a run's size with so many steps of random play in it."""
    env = script.make_game(args, args.num_envs, (args.seed,))
    shape = (
        args.num_envs,
        args.replay_capacity // args.num_envs,
        env.observation_space.shape[1:],
        int(env.action_space.n),
    )
    replay = script.PrioritizedReplay(n_step, *shape) if RAINBOW else script.ReplayBuffer(*shape)
    (obs, _), rng = env.reset(), np.random.default_rng(0)
    for _ in range(steps // args.num_envs):
        action = rng.integers(env.action_space.n, size=args.num_envs)
        next_obs, reward, terminated, truncated, game_over, _ = script.step_env(env, action)
        replay.add(obs, action, reward, terminated, truncated, game_over)
        obs = next_obs
    return replay


def new_state(args, num_actions: int):
    if RAINBOW:
        noise = args.noisy_sigma if args.noisy else None
        network = script.RainbowNetwork(args.network, num_actions, args.num_atoms, args.dueling, noise)
    else:
        network = script.QNetwork(args.network, num_actions)
    params = network.init(jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8))
    tx = optax.scale_by_adam(eps=1.5e-4)
    state = script.QState.create(apply_fn=network.apply, params=params, target_params=params, tx=tx)
    return jax.device_put(jax.tree.map(np.array, state))


def bare_update(args, replay, n_step: int, updates: int) -> float:
    """Updates per second of the jitted step alone, on 50 batches that are on the device already."""
    chosen = replay.sample(np.random.default_rng(0), (50, args.batch_size), n_step)
    batches = replay.transitions(*chosen, n_step, args.gamma)
    loss = script.rainbow_loss if RAINBOW else script.dqn_loss
    if RAINBOW:
        batches = batches, np.ones((50, args.batch_size), np.float32)
    batches = [jax.device_put(jax.tree.map(itemgetter(i), batches)) for i in range(50)]
    state = new_state(args, replay.teacher_policy.shape[-1])
    for i in range(updates + 50):
        if i == 50:  # compiled and warm
            jax.block_until_ready(state)
            start = time.time()
        state, _ = script.q_update(state, batches[i % 50], 1e-5, 1.0, loss, args)
    jax.block_until_ready(state)
    return updates / (time.time() - start)


def priorities(args, replay, n_step: int, updates: int) -> float:
    """Seconds per update that drawing by priority and updating the priorities take beyond drawing uniformly."""
    due, rng = max(args.num_envs // args.train_frequency, 1), np.random.default_rng(0)
    times = []
    for by_priority in (True, False):
        start = time.time()
        for _ in range(updates // due):
            if by_priority:
                *drawn, _ = replay.sample_by_priority(rng, (due, args.batch_size), args.importance_exponent)
                replay.update(*drawn, rng.random((due, args.batch_size)))
            else:
                replay.sample(rng, (due, args.batch_size), n_step)
        times.append((time.time() - start) / (updates // due * due))
    return times[0] - times[1]


def run(args, metric: str, **changes) -> float:
    """Median of a metric over the second half of a run through `main`."""
    with tempfile.TemporaryDirectory() as runs_dir, open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        never = dict(iteration_steps=10**9, checkpoint_every=10**9, eval_episodes=1, eval_steps=1, save_model=False)
        script.main(replace(args, runs_dir=runs_dir, **never, **changes))
        rows = next(Path(runs_dir).iterdir()).joinpath("metrics.csv").read_text().splitlines()[1:]
    values = [float(row.split(",")[3]) for row in rows if row.split(",")[2] == metric]
    return float(np.median(values[len(values) // 2 :]))


def main(bench: Benchmark):
    args, n_step, steps = bench.args, bench.args.n_step or 3, bench.updates * bench.args.train_frequency
    replay = random_replay(args, 20_000, n_step)
    offline = dict(collect_steps=20_000, offline_steps=bench.updates, total_timesteps=0, log_every=bench.updates // 10)
    online = dict(teacher="none", total_timesteps=steps + 2000, log_every=steps // 10)
    measured = {"bare update": [], "offline phase": [], "acting": [], "online phase": [], "priorities": []}
    for _ in range(bench.repeats):  # by turns, so that a slow minute of the machine does not fall on one of them alone
        measured["bare update"].append(bare_update(args, replay, n_step, bench.updates))
        measured["offline phase"].append(run(args, "charts/updates_per_second", **offline))
        measured["acting"].append(run(args, "charts/SPS", learning_starts=args.replay_capacity, **online))
        measured["online phase"].append(run(args, "charts/SPS", learning_starts=1000, **online))
        measured["priorities"].append(priorities(args, replay, n_step, bench.updates) if RAINBOW else 0.0)
    bare, offline, acting, online, extra = (float(np.median(x)) for x in measured.values())
    serial = 1 / (1 / acting + 1 / (bare * args.train_frequency))
    print(f"\n{script.__name__}, {args.network} network, batches of {args.batch_size}")
    print(f"bare update      {bare:8.1f} updates/s")
    print(f"offline phase    {offline:8.1f} updates/s   {offline / bare:.2f} of the bare update")
    print(f"acting           {acting:8.0f} steps/s")
    print(f"online phase     {online:8.0f} steps/s     {online / serial:.2f} of the serial bound of {serial:.0f}")
    if RAINBOW:
        print(f"priorities       {extra * 1e3:8.3f} ms an update, {extra * bare:.1%} of the bare update's time")


if __name__ == "__main__":
    main(tyro.cli(Benchmark))
