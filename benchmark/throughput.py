"""How fast is IMPACT here, and how well do acting and learning overlap?

    python benchmark/throughput.py                                   impact_atari.py with its default settings
    python benchmark/throughput.py --repeats 5 --num-envs 32 --frame-size 42
    python benchmark/throughput.py impact_mujoco --env-id Humanoid-v4

Prints, in environment steps per second, medians over the repeats: the actor alone, the learner alone (target network,
K visits, publishing), both together as `main` runs them in steady state, and what that is of the smaller of the first
two and of the serial bound 1 / (1/actor + 1/learner). Then the seconds from starting Python to the end of a run of one
single update, compilation included.
"""

import importlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SCRIPTS = "impact_atari", "impact_mujoco"
script = importlib.import_module(sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in SCRIPTS else SCRIPTS[0])
ATARI = script.__name__ == "impact_atari"


@dataclass(frozen=True)
class Benchmark:
    """Measures the speed of a script; all of its own flags are accepted too."""

    repeats: int = 3  # measurements of each speed
    seconds: float = 15.0  # length of each measurement, in seconds
    args: Annotated[script.Args, tyro.conf.arg(name="")] = field(default_factory=script.Args)


def speed_of(work, steps: int, seconds: float) -> float:
    """Steps per second of calling `work` again and again, after one call that compiles."""
    work()
    start, calls = time.time(), 0
    while time.time() - start < seconds:
        work()
        calls += 1
    return calls * steps / (time.time() - start)


def network_and_example(args: script.Args) -> tuple:
    """The script's network, and observations to initialise it with."""
    if ATARI:
        env = script.make_env(args, 1, (0,))
        network = script.ActorCritic(args.network, int(env.action_space.n))
        return network, np.zeros((1, *env.observation_space.shape), np.uint8)
    env = script.make_task(args, 1, (0,))
    return script.GaussianActorCritic(env.action_space.shape[0], args.free_log_std), script.flat(env.reset()[0])


def learn_rollouts(state, rollouts: list, rng: np.random.Generator, args: script.Args):
    """A generation's work: N rollouts are evaluated by the target network, and visited K times each."""
    if ATARI:
        for rollout in rollouts:
            batch = script.evaluate_batch(state, rollout, args)
            rows = script.deal_rows(rng, args.passes, args.num_envs, args)
            state, _ = script.learn(state, batch, rows, script.impact_loss, args)
        return state
    slots = script.fill_buffer(*(script.evaluate_task_batch(state, rollout, args) for rollout in rollouts))
    for i in range(len(rollouts)):
        rows = script.deal_rows(rng, args.passes, args.num_envs, args)
        order = (i * args.passes + np.arange(args.passes)).repeat(args.num_minibatches) % len(rollouts)
        state, _ = script.visit(state, slots, order, rows, args)
    return state


def main(bench: Benchmark):
    args, steps = bench.args, bench.args.num_envs * bench.args.num_steps
    network, example = network_and_example(args)
    params = network.init(jax.random.key(0), example)
    tx = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(args.learning_rate, eps=1e-5))
    state = script.TrainState.create(
        apply_fn=network.apply, params=params, target_params=params, kl_coef=np.float32(args.kl_coef), tx=tx
    )
    state = jax.device_put(jax.tree.map(np.array, state))
    scales = tuple(np.ones((), np.float32) for _ in range(3))  # a normaliser that changes nothing
    device, exchange, rng = jax.local_devices()[0], script.Exchange(1, jax.local_devices()[0]), np.random.default_rng(0)

    def publish():
        exchange.publish(state.params if ATARI else (state.params, jax.device_put(scales, device)), 0)

    publish()
    worker = (script.Worker if ATARI else script.TaskWorker)(args, network.apply, (0,), jax.random.key(1))
    rollouts = [jax.device_put(worker.rollout(exchange.published[0])[0]) for _ in range(args.buffer_size)]

    def act():
        worker.rollout(exchange.published[0])

    def learn():
        nonlocal state
        state = learn_rollouts(state, rollouts, rng, args)
        publish()

    def both() -> float:
        """From the first row of metrics to the last: compilation lies before it."""
        with tempfile.TemporaryDirectory() as runs_dir:
            total = int(bench.seconds * (1000 if ATARI else 5000)) + 8 * steps * args.buffer_size
            script.main(replace(args, runs_dir=runs_dir, total_timesteps=total, log_every=2 * steps * args.buffer_size,
                                checkpoint_every=10**9, eval_episodes=0))  # fmt: skip
            rows = next(Path(runs_dir).iterdir()).joinpath("metrics.csv").read_text().splitlines()[1:]
        marks = sorted({(int(row.split(",")[0]), float(row.split(",")[1])) for row in rows})
        (first_step, first_time), (last_step, last_time) = marks[len(marks) // 4], marks[-1]
        return (last_step - first_step) / (last_time - first_time)

    def one_update() -> float:
        with tempfile.TemporaryDirectory() as runs_dir:
            flags = ["--total-timesteps", str(steps * args.buffer_size), "--eval-episodes", "0", "--runs-dir", runs_dir]
            names = ["env_id", "num_envs", "num_steps", "num_minibatches", "passes", "buffer_size"]
            names += ["frame_size", "network"] if ATARI else []
            flags += [x for name in names for x in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
            start = time.time()
            subprocess.run([sys.executable, script.__file__, *flags], check=True, stdout=subprocess.DEVNULL)
            return time.time() - start

    measured = defaultdict(list)
    for _ in range(bench.repeats):  # by turns, so that a slow minute of the machine does not fall on one of them alone
        measured["actor alone"].append(speed_of(act, steps, bench.seconds))
        measured["learner alone"].append(speed_of(learn, steps * args.buffer_size, bench.seconds))
        measured["both together"].append(both())
        measured["one update"].append(one_update())
    actor, learner, together, seconds = (float(np.median(x)) for x in measured.values())
    serial = 1 / (1 / actor + 1 / learner)
    print()
    for name, x in list(measured.items())[:3]:
        print(f"{name:15s} {np.median(x):8.0f} steps/s   ({min(x):.0f} to {max(x):.0f})")
    print(f"fraction of the smaller of actor and learner   {together / min(actor, learner):.2f}")
    print(f"fraction of the serial bound {serial:5.0f} steps/s       {together / serial:.2f}")
    print(f"start to the end of one update                 {seconds:.1f} s")


if __name__ == "__main__":
    main(tyro.cli(Benchmark))
