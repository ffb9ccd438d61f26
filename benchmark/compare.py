"""IMPACT, IMPALA and PPO on one game: one network, one frame size, as many environments, the same machine.

    python benchmark/compare.py --env-id Breakout-v5 --threshold 30 --seeds 1 2
    python benchmark/compare.py --env-id Pong-v5 --threshold 18 --total-timesteps 5000000

Runs the scripts one after another, seed by seed, on an otherwise idle machine. A run ends when the mean of its last 20
games stands at the threshold (or at its budget) and becomes benchmark/results/{script}/{env_id}__compare__{seed}.csv;
`report.py` draws them and prints the times to the threshold. Ctrl-C stops the current run at a checkpoint; the same
command goes on from there, with the clock of training continued, and skips what is finished.
"""

import csv
import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import keep
import tyro

ROOT = Path(__file__).resolve().parent.parent
# Settings for a small machine, the same for both games. What two scripts share is set alike in both.
SHARED = "--network shallow --frame-size 42 --num-envs 32 --num-steps 32 --num-minibatches 4 --learning-rate 1e-3"
SETTINGS = {
    "ppo_atari": f"{SHARED} --update-epochs 3 --clip-coef 0.2 --gae-lambda 1.0",
    "impact_atari": f"{SHARED} --passes 3 --clip-coef 0.2 --norm-adv --vf-coef 0.5 --max-grad-norm 0.5 --queue-size 0",
    "impala_atari": f"{SHARED} --rms-eps 1e-4 --queue-size 0",
}


@dataclass(frozen=True)
class Compare:
    """Compares the three scripts on one game."""

    env_id: str = "Breakout-v5"  # EnvPool's name of the game
    threshold: float = 30.0  # mean of the last 20 games at which a run ends
    total_timesteps: int = 3_000_000  # budget of a run in environment steps; the step size is annealed over it
    seeds: tuple[int, ...] = (1,)  # one run of each script for each seed
    scripts: tuple[str, ...] = tuple(SETTINGS)  # in this order
    variant: str = "compare"  # name of the results
    extra: str = ""  # more flags for every script, in one string
    runs_dir: str = "runs/compare"  # folder of the run folders


def reached(run_dir: Path, threshold: float) -> bool:
    """Whether the 20-game mean has ever stood at the threshold."""
    rows = csv.DictReader((run_dir / "metrics.csv").open())
    return any(r["metric"] == "charts/episodic_return_20" and float(r["value"] or "-inf") >= threshold for r in rows)


def run(compare: Compare, script: str, seed: int) -> bool:
    """Runs or continues one run until the threshold or its budget; False if it was interrupted before."""
    runs_dir = Path(compare.runs_dir) / compare.variant / script
    flags = f"--env-id {compare.env_id} --seed {seed} --total-timesteps {compare.total_timesteps} {SETTINGS[script]}"
    flags = " ".join([flags, compare.extra]).strip()
    earlier = sorted(runs_dir.glob(f"{compare.env_id}__{script}__{seed}__*/checkpoint.msgpack"))
    given = ["--resume", str(earlier[-1].parent)] if earlier else [*shlex.split(flags), "--runs-dir", str(runs_dir)]
    print(f"\n{script}.py {flags}{'   (resumed)' if earlier else ''}", flush=True)
    job = subprocess.Popen([sys.executable, str(ROOT / f"{script}.py"), *given], start_new_session=True)
    interrupted, run_dir = False, None
    try:
        while job.poll() is None:
            time.sleep(5)
            run_dir = max(runs_dir.glob(f"{compare.env_id}__{script}__{seed}__*"), default=None)
            if run_dir and (run_dir / "metrics.csv").exists() and reached(run_dir, compare.threshold):
                job.send_signal(signal.SIGINT)
                job.wait(120)
    except KeyboardInterrupt:
        interrupted = True
        job.send_signal(signal.SIGINT)
        job.wait(120)
    if job.returncode:
        raise SystemExit(f"error: {script}.py ended with exit code {job.returncode}")
    if interrupted and not (run_dir and reached(run_dir, compare.threshold)):
        return False
    note = f"ended at a 20-game mean of {compare.threshold:g}, or at its budget"
    keep.main(str(run_dir), compare.variant, f"python {script}.py {flags}", note)
    return True


def main(compare: Compare):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for seed in compare.seeds:
        for script in compare.scripts:
            result = ROOT / f"benchmark/results/{script}/{compare.env_id}__{compare.variant}__{seed}.json"
            if result.exists():
                print(f"{result.relative_to(ROOT)} is there: {json.loads(result.read_text())['steps']:,} steps")
            elif not run(compare, script, seed):
                raise SystemExit("interrupted; the same command goes on")


if __name__ == "__main__":
    main(tyro.cli(Compare))
