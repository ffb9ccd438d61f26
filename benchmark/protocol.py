"""Runs a list of experiments one after another, each once: `paper_atari.sh` and its siblings pipe theirs into it.

    paper_atari.sh | python benchmark/protocol.py --dry-run

A line of the list is `variant<TAB>script flags`. A run that is finished (its model.msgpack is there) is skipped, one
that was interrupted goes on from its checkpoint, and each finished one becomes a result: benchmark/results/{script}/
{env_id}__{variant}__{seed}.csv. `--dry-run` prints every command with the hours that it would take at the speed of the
committed results of that script (or `--steps-per-second`), and runs nothing.
"""

import importlib
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import keep
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Protocol:
    """Runs the experiments that stand on its standard input."""

    dry_run: bool = False  # print what would run, and its hours
    steps_per_second: float | None = None  # speed to estimate with (default: the median of this script's results)
    runs_dir: str = "runs/paper"  # folder of the run folders
    only: str = ""  # run the lines that contain this text alone


def measured_speed(script: str) -> float | None:
    """Median steps per second of the committed results of a script."""
    facts = (json.loads(path.read_text()) for path in (ROOT / "benchmark/results" / script).glob("*.json"))
    speeds = sorted(fact["steps"] / fact["wall_seconds"] for fact in facts)
    return speeds[len(speeds) // 2] if speeds else None


def run_dirs(args, folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{args.env_id}__{args.exp_name}__{args.seed}__*"))


def main(protocol: Protocol, lines: list[str]):
    total, known = 0.0, True
    for line in lines:
        if not line.strip() or protocol.only not in line:
            continue
        variant, command = line.rstrip("\n").split("\t")
        script, *flags = shlex.split(command)
        args = tyro.cli(importlib.import_module(script.removesuffix(".py")).Args, args=flags)
        folder = Path(protocol.runs_dir) / variant
        runs = run_dirs(args, folder)
        finished = [run for run in runs if (run / "model.msgpack").exists()]
        unfinished = [run for run in runs if (run / "checkpoint.msgpack").exists()]
        if protocol.dry_run:
            speed = protocol.steps_per_second or measured_speed(script.removesuffix(".py"))
            taught = getattr(args, "teacher", "none") != "none"
            steps = args.total_timesteps + (args.offline_steps if taught else 0)
            hours = steps / speed / 3600 if speed else 0.0
            known, total = known and bool(speed), total + (0.0 if finished else hours)
            state = "finished" if finished else f"{hours:.2f} h" if speed else "? h"
            state += ", to be continued" if unfinished and not finished else ""
            print(f"{state:>8s}   {variant:24s} python {command}")
            continue
        if not finished:
            given = ["--resume", str(unfinished[-1])] if unfinished else [*flags, "--runs-dir", str(folder)]
            print(f"\npython {script} {shlex.join(given)}", flush=True)
            if subprocess.run([sys.executable, str(ROOT / script), *given]).returncode:
                raise SystemExit(f"error: {script} failed; what it printed says why. The same command goes on")
            finished = [run for run in run_dirs(args, folder) if (run / "model.msgpack").exists()]
            if not finished:
                raise SystemExit("interrupted; the same command goes on")
        keep.main(str(finished[-1]), variant, f"python {command}")
    if protocol.dry_run:
        print(f"\n{total:.1f} hours" + ("" if known else ", without the scripts whose speed is not known yet"))


if __name__ == "__main__":
    main(tyro.cli(Protocol), sys.stdin.readlines())
