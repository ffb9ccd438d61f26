"""benchmark/stats.py on cases that can be computed by hand, and against rliable's definitions restated."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))
import stats


def test_aggregates_by_hand():
    scores = np.array([[0.0, 10.0], [1.0, 20.0], [2.0, 30.0], [3.0, 100.0]])  # four runs of two tasks
    assert stats.mean(scores) == pytest.approx(166 / 8)
    assert stats.median(scores) == pytest.approx((1.5 + 40) / 2)
    assert stats.iqm(scores) == pytest.approx((2 + 3 + 10 + 20) / 4)  # without 0, 1 and 30, 100
    assert stats.iqm(np.array([[1.0], [2.0], [9.0]])) == pytest.approx(4.0)  # a quarter of three is none
    assert stats.iqm(np.array([[-50.0], [2.0], [3.0], [4.0], [900.0]])) == pytest.approx(3.0)


def test_iqm_is_scipys_trimmed_mean():
    trim_mean = pytest.importorskip("scipy.stats").trim_mean
    for shape in (3, 1), (5, 4), (7, 3), (10, 10):
        scores = np.random.default_rng(sum(shape)).normal(size=shape)
        assert stats.iqm(scores) == pytest.approx(trim_mean(scores, 0.25, axis=None))


def test_interval_is_stratified_and_covers():
    """Between tasks of very different levels nothing varies: only the runs of a task are exchanged."""
    assert stats.interval(np.array([[0.0, 100.0]] * 5)) == (50.0, 50.0)
    rng, covered = np.random.default_rng(0), 0
    for trial in range(60):
        low, high = stats.interval(rng.normal(size=(20, 3)), stats.mean, samples=300, seed=trial)
        covered += low <= 0 <= high
    assert 50 <= covered  # 95% in theory; a percentile bootstrap of twenty runs is a little narrow
    few, many = (stats.interval(rng.normal(size=(n, 2)), stats.mean) for n in (5, 500))
    assert few[1] - few[0] > 3 * (many[1] - many[0])


def test_performance_profile_by_hand():
    scores = np.array([[0.1, 0.9], [0.5, 0.2]])
    np.testing.assert_allclose(stats.performance_profile(scores, [0.0, 0.2, 0.5, 1.0]), [1.0, 0.5, 0.25, 0.0])


def test_normalisation():
    assert stats.normalised(-5.7, -20.7, 9.3) == pytest.approx(0.5)
    np.testing.assert_allclose(stats.normalised([1.7, 30.5], 1.7, 30.5), [0.0, 1.0])
