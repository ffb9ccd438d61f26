"""Keeps a finished run as evidence: `python benchmark/keep.py RUN_DIR VARIANT ["command" ["note" [threshold]]]`.

Writes benchmark/results/{script}/{env_id}__{variant}__{seed}.csv, at most 500 rows in the four columns of metrics.csv,
and beside it a .json with command, commit, versions, machine, wall time and seed. The curve of the 20-game mean keeps
250 points; other metrics share what is left.
"""

import csv
import json
import platform
import sys
from pathlib import Path

KEPT = {"charts/episodic_return_20": 250, "charts/episodic_return": 50, "eval/episodic_return": 40}
KEPT |= {"eval/episodic_return_std": 1, "charts/SPS": 28, "charts/policy_lag": 28, "losses/entropy": 28}
KEPT |= {
    "losses/explained_variance": 28,
    "losses/approx_kl": 28,
    "charts/distill_weight": 18,
    "charts/teacher_score": 1,
}


def thin(rows: list[dict], count: int) -> list[dict]:
    """`count` rows at equal distances, the last one included."""
    if len(rows) <= count:
        return rows
    return [rows[round((i + 1) * len(rows) / count) - 1] for i in range(count)]


def main(run_dir: str, variant: str, command: str = "", note: str = "", threshold: str | float | None = None):
    run_dir = Path(run_dir)
    args, versions = (json.loads((run_dir / f"{name}.json").read_text()) for name in ("args", "versions"))
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    kept = []
    for name, count in KEPT.items():
        kept += thin([row for row in rows if row["metric"] == name], count)
    kept = sorted(kept, key=lambda row: int(row["global_step"]))
    assert len(kept) <= 500, len(kept)
    script = next(path.stem for path in run_dir.glob("*.py"))
    folder = Path(__file__).resolve().parent / "results" / script
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{args['env_id']}__{variant}__{args['seed']}.csv"
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["global_step", "wall_seconds", "metric", "value"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    facts = {"command": command, "commit": versions.pop("git_commit"), "seed": args["seed"], "note": note,
             "threshold": None if threshold is None else float(threshold),
             "wall_seconds": float(rows[-1]["wall_seconds"]), "steps": int(rows[-1]["global_step"]),
             "machine": f"{versions['cpus']} CPU cores ({platform.machine()}), {versions['device']}",
             "versions": versions, "args": {k: v for k, v in args.items() if k != "runs_dir"}}  # fmt: skip
    target.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")
    print(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
