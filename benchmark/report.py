"""Draws the README's figures from the committed CSVs alone: `python benchmark/report.py`, without network."""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


def curve(path: Path, metric: str) -> list[tuple[int, float, float]]:
    """(step, wall seconds, value) of one metric of a committed run."""
    rows = csv.DictReader(path.open())
    return [(int(r["global_step"]), float(r["wall_seconds"]), float(r["value"])) for r in rows if r["metric"] == metric]


def first_reach(points: list[tuple[int, float, float]], threshold: float) -> tuple[int, float] | None:
    """Step and wall seconds at which the curve first stands at the threshold, if ever."""
    return next(((step, seconds) for step, seconds, value in points if value >= threshold), None)


def main():
    for folder in sorted((HERE / "results").iterdir()):
        for path in sorted(folder.glob("*.csv")):
            points, facts = curve(path, "charts/episodic_return_20"), json.loads(path.with_suffix(".json").read_text())
            figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), sharey=True, constrained_layout=True)
            values = [value for _, _, value in points]
            axes[0].plot([step / 1e6 for step, _, _ in points], values, lw=1.5)
            axes[1].plot([seconds / 60 for _, seconds, _ in points], values, lw=1.5)
            axes[0].set(xlabel="environment steps (millions)", ylabel="return (mean of 20 games)")
            axes[1].set(xlabel=f"minutes on {facts['machine'].split(' (')[0]}")
            for axis in axes:
                axis.grid(alpha=0.3)
                axis.spines[["top", "right"]].set_visible(False)
            figure.suptitle(f"{folder.name}, {path.stem.replace('__', ', ')}", fontsize=9)
            figure.savefig(HERE / "figures" / f"{folder.name}__{path.stem}.png", dpi=150)
            plt.close(figure)
            print(f"{folder.name:14s} {path.stem:40s} last {values[-1]:7.2f}   best {max(values):7.2f}")
            for threshold in (0, 10, 18):
                if reached := first_reach(points, threshold):
                    print(f"    {threshold:+d} at {reached[0] / 1e6:.2f}M steps, {reached[1] / 60:.0f} minutes")


if __name__ == "__main__":
    (HERE / "figures").mkdir(exist_ok=True)
    main()
