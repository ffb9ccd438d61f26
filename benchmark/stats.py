"""Statistics of few runs, as Agarwal et al. (2021, "Deep RL at the Edge of the Statistical Precipice") define them.

Scores are `[runs, tasks]`, normalised so that they may be averaged over tasks.
"""

from collections.abc import Callable

import numpy as np


def mean(scores: np.ndarray) -> float:
    """Mean over tasks of the means over runs."""
    return float(np.mean(scores))


def median(scores: np.ndarray) -> float:
    """Median over tasks of the means over runs."""
    return float(np.median(np.mean(scores, axis=0)))


def iqm(scores: np.ndarray) -> float:
    """Interquartile mean: of all runs of all tasks together, without the lowest and the highest quarter."""
    ordered = np.sort(np.ravel(scores))
    cut = int(0.25 * len(ordered))
    return float(np.mean(ordered[cut : len(ordered) - cut]))


def interval(
    scores: np.ndarray, statistic: Callable = iqm, samples: int = 2_000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the stratified bootstrap: the runs of each task are drawn anew, with replacement."""
    rng, (runs, tasks) = np.random.default_rng(seed), scores.shape
    drawn = [statistic(scores[rng.integers(runs, size=(runs, tasks)), np.arange(tasks)]) for _ in range(samples)]
    low, high = np.percentile(drawn, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)


def performance_profile(scores: np.ndarray, taus: np.ndarray) -> np.ndarray:
    """Share of runs whose score is above each of `taus` `[n]`, mean over tasks: `[n]`."""
    return np.mean(scores[None] > np.asarray(taus)[:, None, None], axis=(1, 2))


def normalised(score, low: float, high: float):
    """0 at `low` (a random policy), 1 at `high` (a human, or the teacher)."""
    return (np.asarray(score, float) - low) / (high - low)
