"""What this machine does with the six scripts, in one CSV of twelve minutes: see gpu_check.sh.

Every measurement is a run of a script as a user starts it, ended as by Ctrl-C after its share of the time; speeds are
read off the second half of its metrics.csv, so that compilation does not count. A run that fails shows as nan.
"""

import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Check:
    """Measures this machine."""

    quick: bool = False  # smaller networks, environments and shares of time, for two CPU cores
    out: str = ""  # CSV to write (default: benchmark/results/gpu_check__{device}.csv)


def run_for(seconds: float, script: str, flags: str, until: float | None = None) -> dict[str, list[tuple]]:
    """(step, wall seconds, value) of each metric of a run that gets so many seconds, or until a 20-game mean."""
    series = defaultdict(list)
    with tempfile.TemporaryDirectory() as runs_dir:
        command = [sys.executable, str(ROOT / script), *flags.split(), "--runs-dir", runs_dir]
        log = Path(runs_dir) / "log"
        with log.open("w") as file:
            job = subprocess.Popen(command, stdout=file, stderr=file)
            deadline = time.time() + seconds
            while job.poll() is None and time.time() < deadline:
                time.sleep(0.5)
                text = log.read_text()
                returns = re.findall(r"return \(20 games\)\s+(\S+)", text)
                if until is not None and returns and float(returns[-1]) >= until:
                    break
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)  # like Ctrl-C, which jobs in the background may ignore
                try:
                    job.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
        for path in Path(runs_dir).glob("*/metrics.csv"):
            for row in csv.reader(path.open()):
                if len(row) == 4 and row[0] != "global_step":
                    series[row[2]].append((int(row[0]), float(row[1]), float(row[3])))
        if not series:
            print(log.read_text()[-2000:], flush=True)
    return series


def second_half(series: list[tuple]) -> float:
    """Median of the second half of a metric."""
    values = sorted(value for *_, value in series[len(series) // 2 :])
    return values[len(values) // 2] if values else float("nan")


def roofline(quick: bool) -> list[tuple]:
    """Seconds of one of IMPACT's SGD steps, its floating-point operations by XLA's count, and the share of the rate of
    a large matrix product that it reaches."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import impact_atari as script

    def seconds(work) -> float:
        jax.block_until_ready(work())
        start, calls = time.time(), 0
        while time.time() - start < (2 if quick else 4):
            result = work()
            calls += 1
        jax.block_until_ready(result)
        return (time.time() - start) / calls

    size = 2048 if jax.default_backend() == "cpu" else 8192
    matrix, product = jnp.ones((size, size)), jax.jit(lambda x: x @ x)
    peak = 2 * size**3 / seconds(lambda: product(matrix))
    rows = [("matrix product", "float32, default precision", "rate", peak / 1e12, "TFLOP/s")]
    for network in ("shallow",) if quick else ("shallow", "nature", "resnet"):
        args = script.Args(network=network, num_envs=16, num_steps=16 if quick else 50)
        model, shape = script.ActorCritic(network, 6), (args.num_envs, args.num_steps)
        params = model.init(jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8))
        rng = np.random.default_rng(0)
        obs = rng.integers(0, 256, (shape[0], shape[1] + 1, 4, 84, 84), np.uint8)
        ones, action = np.ones(shape, np.float32), rng.integers(0, 6, shape)
        rollout = script.Rollout(obs, action, -ones, ones, ones, np.zeros(shape, bool), np.ones(shape, bool))
        state = script.TrainState.create(
            apply_fn=model.apply, params=params, target_params=params, kl_coef=np.float32(0), tx=optax.adam(1e-4)
        )
        batch = jax.device_put(script.evaluate_batch(state, rollout, args))
        loss = jax.jit(jax.value_and_grad(script.impact_loss, has_aux=True), static_argnames="args")
        cost = loss.lower(params, state, batch, args).compile().cost_analysis() or {}
        took, flops = seconds(lambda: loss(params, state, batch, args)), cost.get("flops", float("nan"))  # noqa: B023
        setting = f"{network}, {shape[0] * shape[1]} rows"
        rows += [("gradient", setting, "time", took, "s"), ("gradient", setting, "operations", flops / 1e9, "GFLOP")]
        rows.append(("gradient", setting, "share of the matrix product's rate", flops / took / peak, ""))
    return rows


def main(check: Check):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # here only: the runs need the device's memory
    import jax

    jax.devices()
    del os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
    device, cores = jax.devices()[0].device_kind, os.cpu_count() or 1
    slug = re.sub(r"\W+", "-", device).strip("-").lower()
    out = Path(check.out or ROOT / f"benchmark/results/gpu_check__{slug}.csv")
    rows, started = [], time.time()

    def record(*row):
        rows.append((*row[:3], f"{row[3]:.4g}", row[4]))
        print(
            f"{time.time() - started:5.0f} s   {row[0]:16s} {row[1]:70s} {row[2]:24s} {row[3]:10.4g} {row[4]}",
            flush=True,
        )

    record("machine", f"{device}, {cores} cores, jax {jax.__version__}", "devices", len(jax.devices()), "")
    share = 20 if check.quick else 25
    envs = 16 if check.quick else 64
    small = " --frame-size 42" if check.quick else ""
    atari = f"--env-id Pong-v5 --network shallow --log-every 2000 --eval-episodes 0{small}"
    student = f"--teacher none --learning-starts 1000 --log-every 1000 --num-envs {envs // 4}"
    student += " --replay-capacity 50000 --network shallow" if check.quick else " --replay-capacity 200000"
    speeds = {
        "impact_atari.py": f"{atari} --num-envs {envs}",
        "impala_atari.py": f"{atari} --num-envs {envs}",
        "ppo_atari.py": f"{atari} --num-envs {envs // 2}",
        "impact_mujoco.py": "--env-id HalfCheetah-v4 --log-every 10000 --eval-episodes 0",
        "qdagger_dqn_atari.py": student,
        "qdagger_rainbow_atari.py": student,
    }
    for script, flags in speeds.items():
        series = run_for(share, script, flags)
        record("speed", f"{script} {flags}", "environment", second_half(series["charts/SPS"]), "steps/s")
        if updates := series["charts/updates_per_second"]:
            record("speed", f"{script} {flags}", "learner", second_half(updates), "updates/s")
    for row in roofline(check.quick):
        record(*row)
    settings = [(1, 0), (1, 4)] if check.quick else [(1, 0), (1, 1), (1, 4), (2, 1), (4, 1), (4, 8)]
    for actors, queue in settings:
        flags = f"{atari} --num-envs {envs} --num-actors {actors} --queue-size {queue}"
        series = run_for(share, "impact_atari.py", flags)
        for name, metric, unit in ("speed", "SPS", "steps/s"), ("lag", "policy_lag", "SGD steps"):
            record(
                "queue",
                f"impact_atari.py, {actors} actors, queue {queue}",
                name,
                second_half(series[f"charts/{metric}"]),
                unit,
            )
    learn = "--env-id Pong-v5 --network shallow --frame-size 42 --num-envs 32 --num-steps 32 --num-minibatches 4"
    learn += " --total-timesteps 5000000 --log-every 5000 --eval-episodes 0"
    adam = f"{learn} --learning-rate 1e-3 --clip-coef 0.2 --gae-lambda 1.0 --norm-adv --vf-coef 0.5 --max-grad-norm 0.5"
    for script, flags in {
        "impact_atari.py": f"{adam} --passes 3",
        "impala_atari.py": f"{learn} --learning-rate 1e-3 --rms-eps 1e-4",
        "ppo_atari.py": f"{adam} --update-epochs 3",
    }.items():
        series = run_for(15 if check.quick else 120, script, flags, until=18.0)["charts/episodic_return_20"]
        step, seconds, value = max(series, key=lambda row: row[2], default=(0, 0.0, float("nan")))
        record("Pong", f"{script}, 42 x 42, 32 environments", "best 20-game mean", value, "points")
        record("Pong", f"{script}, 42 x 42, 32 environments", "reached after", seconds, "s")
        record("Pong", f"{script}, 42 x 42, 32 environments", "reached after", step, "steps")
    with out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("check", "setting", "quantity", "value", "unit"), *rows])
    print(f"{out}   {time.time() - started:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Check))
