"""IMPACT, IMPALA and PPO on one game: one network, one frame size, as many environments, the same machine.

    python benchmark/compare.py --env-id Breakout-v5 --threshold 30 --seeds 1 2
    python benchmark/compare.py --env-id Pong-v5 --threshold 18 --total-timesteps 5000000

Runs the scripts one after another, seed by seed, on an otherwise idle machine. A run ends when the mean of its last
20 games has stood at the threshold in five rows of its log in succession, or at its budget, and becomes a result,
benchmark/results/{script}/{env_id}__compare__{seed}.csv; `report.py` draws them and prints the times to the threshold.
Ctrl-C stops the current run at a checkpoint; the same command goes on from there, the clock of training too, and skips
what is finished.

The ablation of IMPACT's ratio under a forced lag is three such commands, with X = impact, target, worker:

    python benchmark/compare.py --env-id Breakout-v5 --threshold inf --total-timesteps 1000000 --scripts impact_atari \
        --variant ablation-ratio-X --extra="--ratio X --no-concurrency --queue-size 15"
"""

import importlib
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import keep
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Settings for a small machine. What two scripts share is set alike in both.
SHARED = "--network shallow --num-envs 32 --num-steps 32 --num-minibatches 4 --log-every 20000"
ADAM = "--learning-rate 1e-3 --clip-coef 0.2 --gae-lambda 1.0 --norm-adv --vf-coef 0.5 --max-grad-norm 0.5"
SETTINGS = {
    "ppo_atari": f"{SHARED} {ADAM} --update-epochs 3",
    "impact_atari": f"{SHARED} {ADAM} --passes 3 --queue-size 0",
    "impala_atari": f"{SHARED} --learning-rate 1e-3 --rms-eps 1e-4 --queue-size 0",
}
FRAMES = {"Pong-v5": 42}  # as IMPACT's author; Breakout's ball would be one faint pixel there (84 elsewhere)


@dataclass(frozen=True)
class Compare:
    """Compares the three scripts on one game."""

    env_id: str = "Breakout-v5"  # EnvPool's name of the game
    threshold: float = 30.0  # mean of the last 20 games that ends a run, if it lasts
    total_timesteps: int = 3_000_000  # budget of a run in environment steps; the step size is annealed over it
    seeds: tuple[int, ...] = (1,)  # one run of each script for each seed
    scripts: tuple[str, ...] = tuple(SETTINGS)  # in this order
    variant: str = "compare"  # name of the results
    extra: str = ""  # more flags for every script, in one string
    runs_dir: str = "runs/compare"  # folder of the run folders


def flags_of(compare: Compare, script: str, seed: int) -> str:
    flags = f"--env-id {compare.env_id} --seed {seed} --total-timesteps {compare.total_timesteps} {SETTINGS[script]}"
    return f"{flags} --frame-size {FRAMES.get(compare.env_id, 84)} {compare.extra}".strip()


def settings(args: dict) -> dict:
    """A run's arguments but for those that do not matter to its result."""
    return {name: value for name, value in args.items() if name not in ("runs_dir", "resume")}


def arrived(run_dir: Path, threshold: float) -> bool:
    """Whether the 20-game mean has stood at the threshold in five rows in succession: no lucky game lasts that long."""
    lines = [line.split(",") for line in (run_dir / "metrics.csv").read_text().splitlines()[1:]]
    curve = [float(x[3]) for x in lines if len(x) == 4 and x[2] == "charts/episodic_return_20" and x[3]]
    return any(min(curve[i : i + 5]) >= threshold for i in range(len(curve) - 4))


def run(compare: Compare, script: str, seed: int) -> bool:
    """Runs or continues one run until the threshold or its budget; False if it was interrupted before."""
    runs_dir, flags = Path(compare.runs_dir) / compare.variant / script, flags_of(compare, script, seed)
    given = [*shlex.split(flags), "--runs-dir", str(runs_dir)]
    earlier = sorted(runs_dir.glob(f"{compare.env_id}__{script}__{seed}__*/checkpoint.msgpack"))
    if earlier:
        folder = earlier[-1].parent
        wanted = json.loads(json.dumps(asdict(tyro.cli(importlib.import_module(script).Args, args=given))))
        if settings(json.loads((folder / "args.json").read_text())) != settings(wanted):
            raise SystemExit(f"error: {folder} was run with other flags; remove it, or name another --runs-dir")
        given = ["--resume", str(folder)]
    print(f"\n{script}.py {flags}{'   (resumed)' if earlier else ''}", flush=True)
    job = subprocess.Popen([sys.executable, str(ROOT / f"{script}.py"), *given], start_new_session=True)
    interrupted, run_dir = False, None
    try:
        while job.poll() is None:
            time.sleep(5)
            run_dir = max(runs_dir.glob(f"{compare.env_id}__{script}__{seed}__*"), default=None)
            if run_dir and (run_dir / "metrics.csv").exists() and arrived(run_dir, compare.threshold):
                job.send_signal(signal.SIGINT)
                job.wait()
    except KeyboardInterrupt:
        interrupted = True
        job.send_signal(signal.SIGINT)
        job.wait()
    if interrupted and not (run_dir and arrived(run_dir, compare.threshold)):
        return False
    if job.returncode:
        raise SystemExit(f"error: {script}.py ended with exit code {job.returncode}; what it printed says why")
    note = "ended when the 20-game mean had stood at the threshold in five rows of the log, or at its budget"
    threshold = compare.threshold if math.isfinite(compare.threshold) else None
    keep.main(str(run_dir), compare.variant, f"python {script}.py {flags}", note if threshold else "", threshold)
    return True


def main(compare: Compare):
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has made background jobs deaf to Ctrl-C
        signal.signal(number, signal.default_int_handler)
    for seed in compare.seeds:
        for script in compare.scripts:
            result = ROOT / f"benchmark/results/{script}/{compare.env_id}__{compare.variant}__{seed}.json"
            if result.exists():
                print(f"{result.relative_to(ROOT)} is there: {json.loads(result.read_text())['steps']:,} steps")
            elif not run(compare, script, seed):
                raise SystemExit("interrupted; the same command goes on")


if __name__ == "__main__":
    main(tyro.cli(Compare))
