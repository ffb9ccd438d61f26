"""Draws the README's figures and prints its tables from the committed CSVs alone: `python benchmark/report.py`."""

import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from teachers.scores import SCORES

RETURN, EVALUATED, TEACHER = "charts/episodic_return_20", "eval/episodic_return", "charts/teacher_score"
COLOURS = {"impact_atari": "C0", "impala_atari": "C1", "ppo_atari": "C2"}


@dataclass
class Run:
    """A committed run: results/{script}/{env_id}__{variant}__{seed}.csv and the .json beside it."""

    script: str
    env_id: str
    variant: str
    seed: str
    facts: dict
    points: list[tuple[int, float, float]]  # (step, wall seconds, mean return of the last 20 games; QDagger: evaluated)
    teacher: float | None = None  # QDagger: what its teacher scored

    def final(self) -> float:
        """Mean of the last tenth of the curve (QDagger: of the last three evaluations)."""
        tenth = 3 if self.script.startswith("qdagger") else max(1, len(self.points) // 10)
        tenth = min(tenth, len(self.points))
        return sum(value for _, _, value in self.points[-tenth:]) / tenth

    def reach(self, threshold: float, rows: int = 1) -> tuple[int, float] | None:
        """Step and wall seconds of the first of so many rows in succession that stand at the threshold, if ever."""
        for i in range(len(self.points) - rows + 1):
            if all(value >= threshold for _, _, value in self.points[i : i + rows]):
                return self.points[i][:2]
        return None


def teacher_score(runs: list[Run]) -> float:
    """Mean of what the teachers of these runs scored."""
    scores = [run.teacher for run in runs if run.teacher is not None]
    return sum(scores) / len(scores) if scores else float("nan")


def read_runs(results: Path) -> list[Run]:
    """All runs under a folder of results, sorted by script, game, variant and seed."""
    runs = []
    for path in sorted(results.glob("*/*.csv")):
        metric = EVALUATED if path.parent.name.startswith("qdagger") else RETURN
        rows = list(csv.DictReader(path.open()))
        points = [
            (int(r["global_step"]), float(r["wall_seconds"]), float(r["value"])) for r in rows if r["metric"] == metric
        ]
        teacher = [float(r["value"]) for r in rows if r["metric"] == TEACHER]
        facts = json.loads(path.with_suffix(".json").read_text())
        runs.append(Run(path.parent.name, *path.stem.split("__"), facts, points, *teacher))
    return runs


def draw(path: Path, title: str, curves: list[tuple[str, str, Run]], threshold: float | None = None):
    """Return against steps and against minutes; each curve is (label, colour, run). Where a label has several runs,
    each is a thin line, and their mean a thick one as far as all of them reach."""
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), sharey=True, constrained_layout=True)
    groups = defaultdict(list)
    for label, colour, run in curves:
        if run.points:
            groups[label, colour].append(np.array(run.points))
    for (label, colour), group in groups.items():
        for axis, column, unit in (axes[0], 0, 1e6), (axes[1], 1, 60):
            thin = dict(lw=0.7, alpha=0.4) if len(group) > 1 else dict(lw=1.3, label=label)
            for points in group:
                axis.plot(points[:, column] / unit, points[:, 2], color=colour, **thin)
            if len(group) > 1:
                end, start = (f(points[i, column] for points in group) for f, i in ((min, -1), (max, 0)))
                grid = np.linspace(start, end, 200)
                mean = np.mean([np.interp(grid, points[:, column], points[:, 2]) for points in group], axis=0)
                axis.plot(grid / unit, mean, color=colour, lw=1.5, label=label)
    cores = curves[0][2].facts["machine"].split(" (")[0]
    axes[0].set(xlabel="environment steps (millions)", ylabel="return")
    axes[1].set(xlabel=f"minutes on {cores}")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if threshold is not None:
            axis.axhline(threshold, color="0.4", lw=0.8, ls="--")
    if len(groups) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_reincarnation(path: Path, env_id: str, runs: list[Run]):
    """QDagger: the student's evaluations against offline updates, and against all environment steps, the teacher's data
    included, beside agents that learn from nothing; means over seeds, each seed a thin line."""
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), sharey=True, constrained_layout=True)
    groups = defaultdict(list)
    for run in runs:
        student = "Rainbow" if "rainbow" in run.script else "DQN"
        groups[f"{student}, {'taught' if run.teacher is not None else 'tabula rasa'}"].append(run)
    for i, (label, group) in enumerate(groups.items()):
        args, taught = group[0].facts["args"], group[0].teacher is not None
        curves = [np.array(run.points) for run in group]
        curves = [curve[: min(map(len, curves))] for curve in curves]
        steps, mean = curves[0][:, 0], np.mean([curve[:, 2] for curve in curves], axis=0)
        offline, online = (steps <= 0) & taught, steps >= 0
        parts = (
            (axes[0], steps + args["offline_steps"], offline),
            (axes[1], steps + args["collect_steps"] * taught, online),
        )
        for axis, x, part in parts:
            for curve in curves if len(curves) > 1 else []:
                axis.plot(x[part] / 1e3, curve[part, 2], color=f"C{i}", lw=0.7, alpha=0.4)
            axis.plot(x[part] / 1e3, mean[part], color=f"C{i}", lw=1.4, marker=".", label=label)
    for axis in axes:
        axis.axhline(teacher_score(runs), color="0.4", lw=0.8, ls="--", label="the teacher")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlabel("offline updates (thousands)", fontsize=8)
    axes[0].set_ylabel("return")
    axes[1].set_xlabel("environment steps, the teacher's included (thousands)", fontsize=8)
    axes[1].legend(frameon=False, fontsize=7)
    figure.suptitle(f"Reincarnation on {env_id}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_ablation(path: Path, title: str, runs: list[Run]):
    """One panel for each thing varied (`ablation-{panel}-{value}`), the unvaried runs (`ablation-base`; QDagger:
    `small`) in all; means over seeds, each seed a thin line."""
    panels = defaultdict(lambda: defaultdict(list))
    base = [run for run in runs if run.variant in ("ablation-base", "small")]
    unit, name = (1e6, "environment steps (millions)")
    if base and base[0].teacher is not None:
        unit, name = (1e3, "updates (to 0), then steps (thousands)")
    for run in runs:
        if run not in base and run.points:
            _, panel, value = run.variant.split("-", 2)
            panels[panel][value].append(run)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    size = dict(figsize=(3.5 * columns, 2.5 * rows), squeeze=False, sharex=True, sharey=True, constrained_layout=True)
    figure, axes = plt.subplots(rows, columns, **size)
    for axis, (panel, values) in zip(axes.flat, sorted(panels.items())):
        curves = [("default", base)] if base else []
        curves += sorted(values.items(), key=lambda item: (not item[0].isdigit(), item[0].zfill(9)))
        for i, (value, group) in enumerate(curves):
            colour = "0.3" if group is base else f"C{i - bool(base)}"
            points = [np.array(run.points) for run in group]
            for p in points if len(points) > 1 else []:
                axis.plot(p[:, 0] / unit, p[:, 2], color=colour, lw=0.5, alpha=0.4)
            grid = np.linspace(max(p[0, 0] for p in points), min(p[-1, 0] for p in points), 200)
            mean = np.mean([np.interp(grid, p[:, 0], p[:, 2]) for p in points], axis=0)
            axis.plot(grid / unit, mean, color=colour, lw=1.4, label=value, marker="o" if len(points[0]) < 2 else None)
        axis.set_title(panel, fontsize=9)
        axis.legend(frameon=False, fontsize=7)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(name, fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("return")
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


def reincarnated(env_id: str, runs: list[Run]):
    """Prints a row for each kind of student: its evaluations, as they are and normalised by random play and teacher."""
    random, _ = SCORES[env_id.partition("-")[0]]
    teacher = teacher_score(runs)
    groups = defaultdict(list)
    for run in runs:
        groups[run.script, run.variant].append(run)
    for (script, variant), group in groups.items():
        args, taught = group[0].facts["args"], group[0].teacher is not None
        data = args["collect_steps"] * (taught and args["offline_steps"] > 0)
        after = [value for run in group for step, _, value in run.points if step == 0 and data]
        scores = [interval(values, ".1f") if values else "-" for values in (after, [run.final() for run in group])]
        share = interval([(run.final() - random) / (teacher - random) for run in group], ".2f")
        steps = f"{data:,} + {group[0].facts['steps']:,}"
        columns = [env_id, f"`{script}`", variant, len(group), steps, f"{teacher:.1f}", *scores, share]
        print(f"| {' | '.join(map(str, columns))} |")


def final_scores(groups: dict[tuple[str, str, str], list[Run]]):
    """Prints mean, interquartile mean and its 95% bootstrap interval over seeds of what each run ended with."""
    print("\n| environment | script | variant | seeds | mean | IQM (95% interval) | normalised by human | steps/s |")
    print("|---|---|---|---|---|---|---|---|")
    for (env_id, script, variant), runs in sorted(groups.items()):
        scores = np.array([[run.final()] for run in runs])
        low, high = stats.interval(scores)
        iqm = f"{stats.iqm(scores):.1f}" + (f" ({low:.1f} to {high:.1f})" if len(runs) > 1 else "")
        human = SCORES.get(env_id.partition("-")[0])
        human = f"{stats.mean(stats.normalised(scores, *human)):.2f}" if human else "-"
        speed = interval([run.facts["steps"] / run.facts["wall_seconds"] for run in runs], ".0f")
        mean = f"{stats.mean(scores):.1f}"
        print(f"| {env_id} | `{script}` | {variant} | {len(runs)} | {mean} | {iqm} | {human} | {speed} |")


def time_to_the_other(env_id: str, runs: list[Run], other: list[Run], name: str):
    """Prints when a group of runs reached what another ended with, as shares of the other's steps and time."""
    goal = sum(run.final() for run in other) / len(other)
    reached = [r for r in (run.reach(goal) for run in runs) if r]
    whole = [sum(run.points[-1][i] for run in other) / len(other) for i in (0, 1)]
    print(f"{env_id}: {len(reached)} of {len(runs)} runs reach {goal:.0f}, the end of {name}", end="")
    for i, unit in (0, "steps"), (1, "time"):
        print(f", {interval([r[i] / whole[i] for r in reached], '.2f')} of its {unit}" if reached else "", end="")
    print()


def main(results: Path = HERE / "results", figures: Path = HERE / "figures"):
    figures.mkdir(exist_ok=True)
    families, groups, students = defaultdict(list), defaultdict(list), defaultdict(list)
    for run in read_runs(results):
        if run.variant == "compare":
            families["compare", run.env_id].append(run)
        elif run.script.startswith("qdagger"):
            students[run.env_id].append(run)
            if not run.variant.startswith("ablation-"):
                families["reincarnation", run.env_id].append(run)
            if run.variant.startswith("ablation-") or run.variant == "small":
                families[run.script + "__ablation", run.env_id].append(run)
        else:
            families[run.script + "__ablation" * run.variant.startswith("ablation-"), run.env_id].append(run)
            groups[run.env_id, run.script, run.variant].append(run)

    print("| game, 20-game mean | script | held | by seeds | steps (millions) | minutes | steps/s |")
    print("|---|---|---|---|---|---|---|")
    for (family, env_id), runs in families.items():
        path = figures / f"{family}__{env_id}.png"
        if family == "compare":
            curves = [(run.script.removesuffix("_atari").upper(), COLOURS[run.script], run) for run in runs]
            draw(path, f"{env_id}, the same network and environments", curves, runs[0].facts["threshold"])
            seconds = time_to_threshold(env_id, runs)
            if {"impact_atari", "impala_atari"} <= seconds.keys():
                print(f"wall-clock of IMPACT / IMPALA: {seconds['impact_atari'] / seconds['impala_atari']:.2f}")
            continue
        title = f"{runs[0].script}.py on {env_id}"
        if family == "reincarnation":
            draw_reincarnation(path, env_id, runs)
            continue
        if family.endswith("__ablation"):
            if any(run.variant.startswith("ablation-") for run in runs):
                draw_ablation(path, title, runs)
            continue
        variants = sorted({run.variant for run in runs})
        draw(path, title, [(run.variant, f"C{variants.index(run.variant)}", run) for run in runs])
    final_scores(groups)
    print("\n| game | student | variant | seeds | teacher's + own steps | teacher | after the offline phase | "
          "last three evaluations | normalised by the teacher |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for env_id, runs in students.items():
        reincarnated(env_id, runs)
    print()
    for env_id, script, variant in sorted(groups):
        if variant == "default" and (env_id, script, "zero-lag") in groups:
            both = groups[env_id, script, "default"], groups[env_id, script, "zero-lag"]
            time_to_the_other(env_id, *both, "the synchronous form")


if __name__ == "__main__":
    main()
