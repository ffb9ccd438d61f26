"""Draws the README's figures and prints its tables from the committed CSVs alone: `python benchmark/report.py`."""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RETURN = "charts/episodic_return_20"
COLOURS = {"impact_atari": "C0", "impala_atari": "C1", "ppo_atari": "C2"}


@dataclass
class Run:
    """A committed run: results/{script}/{env_id}__{variant}__{seed}.csv and the .json beside it."""

    script: str
    env_id: str
    variant: str
    seed: str
    facts: dict
    points: list[tuple[int, float, float]]  # (step, wall seconds, mean return of the last 20 games)

    def reach(self, threshold: float, rows: int = 1) -> tuple[int, float] | None:
        """Step and wall seconds of the first of so many rows in succession that stand at the threshold, if ever."""
        for i in range(len(self.points) - rows + 1):
            if all(value >= threshold for _, _, value in self.points[i : i + rows]):
                return self.points[i][:2]
        return None


def read_runs(results: Path) -> list[Run]:
    """All runs under a folder of results, sorted by script, game, variant and seed."""
    runs = []
    for path in sorted(results.glob("*/*.csv")):
        rows = (row for row in csv.DictReader(path.open()) if row["metric"] == RETURN)
        points = [(int(r["global_step"]), float(r["wall_seconds"]), float(r["value"])) for r in rows]
        facts = json.loads(path.with_suffix(".json").read_text())
        runs.append(Run(path.parent.name, *path.stem.split("__"), facts, points))
    return runs


def draw(path: Path, title: str, curves: list[tuple[str, str, Run]], threshold: float | None = None):
    """Return against steps and against minutes; each curve is (label, colour, run), a label drawn once."""
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), sharey=True, constrained_layout=True)
    labelled = set()
    for label, colour, run in curves:
        steps, seconds, values = zip(*run.points)
        shown = None if label in labelled else label
        labelled.add(label)
        axes[0].plot([step / 1e6 for step in steps], values, lw=1.3, color=colour, label=shown)
        axes[1].plot([second / 60 for second in seconds], values, lw=1.3, color=colour)
    cores = curves[0][2].facts["machine"].split(" (")[0]
    axes[0].set(xlabel="environment steps (millions)", ylabel="return (mean of 20 games)")
    axes[1].set(xlabel=f"minutes on {cores}")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if threshold is not None:
            axis.axhline(threshold, color="0.4", lw=0.8, ls="--")
    if len(labelled) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def interval(values: list[float], form: str) -> str:
    """Mean over seeds, and from the lowest to the highest seed: with so few, no narrower interval would be honest."""
    text = format(sum(values) / len(values), form)
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def time_to_threshold(env_id: str, runs: list[Run]) -> dict[str, float]:
    """Prints two rows of the README's table for each script: when the 20-game mean first stood at the threshold
    (`once`), and from when on it did so in five rows of the log (`lasting`). Returns the mean seconds of the latter."""
    mean_seconds = {}
    for script in sorted({run.script for run in runs}):
        own = [run for run in runs if run.script == script]
        speed = interval([run.points[-1][0] / run.points[-1][1] for run in own], ".0f")
        for kind, rows in ("once", 1), ("lasting", 5):
            reached = [r for r in (run.reach(run.facts["threshold"], rows) for run in own) if r]
            when = "-", "-"
            if reached:
                steps, seconds = zip(*reached)
                when = interval([s / 1e6 for s in steps], ".2f"), interval([s / 60 for s in seconds], ".1f")
            if rows == 5 and len(reached) == len(own):
                mean_seconds[script] = sum(seconds) / len(seconds)
            columns = f"{env_id} {own[0].facts['threshold']:+g}", f"`{script}`", kind, f"{len(reached)} of {len(own)}"
            print(f"| {' | '.join([*columns, *when, speed])} |")
    return mean_seconds


def main(results: Path = HERE / "results", figures: Path = HERE / "figures"):
    figures.mkdir(exist_ok=True)
    compared, ablated = defaultdict(list), defaultdict(list)
    for run in read_runs(results):
        if run.variant == "compare":
            compared[run.env_id].append(run)
        elif run.variant.startswith("ablation-"):
            ablated[run.env_id].append(run)
        else:
            name = f"{run.script}__{run.env_id}__{run.variant}__{run.seed}"
            draw(figures / f"{name}.png", name.replace("__", ", "), [("", "C0", run)])
            values = [value for _, _, value in run.points]
            print(f"{name:50s} last {values[-1]:7.2f}   best {max(values):7.2f}")
            for threshold in (0, 10, 18):
                if reached := run.reach(threshold):
                    print(f"    {threshold:+d} at {reached[0] / 1e6:.2f}M steps, {reached[1] / 60:.0f} minutes")

    print("\n| game, 20-game mean | script | held | by seeds | steps (millions) | minutes | steps/s |")
    print("|---|---|---|---|---|---|---|")
    for env_id, runs in compared.items():
        curves = [(run.script.removesuffix("_atari").upper(), COLOURS[run.script], run) for run in runs]
        title = f"{env_id}, the same network and environments; one line a seed"
        draw(figures / f"compare__{env_id}.png", title, curves, runs[0].facts["threshold"])
        seconds = time_to_threshold(env_id, runs)
        if {"impact_atari", "impala_atari"} <= seconds.keys():
            print(f"wall-clock of IMPACT / IMPALA: {seconds['impact_atari'] / seconds['impala_atari']:.2f}")
    for env_id, runs in ablated.items():
        variants = sorted({run.variant for run in runs})
        curves = [(run.variant.removeprefix("ablation-"), f"C{variants.index(run.variant)}", run) for run in runs]
        draw(figures / f"ablation__{env_id}.png", f"IMPACT on {env_id} under a forced lag, by --ratio", curves)
        for run in runs:
            values = [value for _, _, value in run.points]
            print(f"{env_id} {run.variant:20s} seed {run.seed}   mean {sum(values) / len(values):6.2f}   best "
                  f"{max(values):6.2f}   last {values[-1]:6.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
