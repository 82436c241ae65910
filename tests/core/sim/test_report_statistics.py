"""Percentiles, intervals by batch means, and trends: against numpy, and against processes whose truth is known."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.sim.statistics import (
    BATCHES,
    estimate_mean,
    estimate_percentiles,
    estimate_share,
    percentile,
    split,
    thirds,
)

times = st.lists(st.floats(0, 1e6), min_size=1, max_size=400)


@given(times, st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@given(times)
def test_a_split_keeps_order_and_all(values: list[float]) -> None:
    parts = split(values, BATCHES)
    assert [value for part in parts for value in part] == values
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_too_few_values_have_no_interval() -> None:
    assert estimate_mean([1.0] * 239).half_width is None
    assert estimate_mean([1.0] * 240).half_width == 0
    assert [estimate.half_width for estimate in estimate_percentiles([1.0, 2.0], (50.0, 99.0))] == [None, None]


def correlated(seed: int, count: int = 4800, memory: float = 0.9) -> list[float]:
    """Values of mean 10 of which each takes over most of the one before it, as waits in a queue do."""
    rng = random.Random(seed)
    state, values = rng.gauss(0, 1), []
    for _ in range(count):
        state = memory * state + math.sqrt(1 - memory * memory) * rng.gauss(0, 1)
        values.append(10 + state)
    return values


RUNS = 200


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """95 % of the runs, less what chance takes (binomial, 4 deviations) and some for batches that still depend."""
    mean_holds = p90_holds = naive_holds = 0
    p90 = 10 + statistics.NormalDist().inv_cdf(0.9)
    for seed in range(RUNS):
        values = correlated(seed)
        mean, tail = estimate_mean(values), estimate_percentiles(values, (90.0,))[0]
        assert mean.half_width is not None
        assert tail.half_width is not None
        mean_holds += abs(mean.value - 10) <= mean.half_width
        p90_holds += abs(tail.value - p90) <= tail.half_width
        naive_holds += abs(mean.value - 10) <= 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    assert mean_holds / RUNS > 0.88
    assert p90_holds / RUNS > 0.88
    assert naive_holds / RUNS < 0.6


def test_a_share_s_interval_holds_the_truth_and_never_vanishes() -> None:
    holds = 0
    for seed in range(RUNS):
        hits = [value > 9 for value in correlated(seed)]
        share = estimate_share(hits)
        assert share.half_width is not None
        holds += abs(share.value - statistics.NormalDist().cdf(1)) <= share.half_width
    assert holds / RUNS > 0.88
    for hits in ([True] * 1000, [False] * 1000, [False] * 10):
        share = estimate_share(hits)
        assert share.value == float(hits[0])
        assert share.half_width is not None
        # The rule of three: with no miss among n, up to 3 / n are likely.
        assert share.half_width >= 3 / len(hits) * 0.9


def test_steady_runs_show_no_trend_and_drifting_ones_do() -> None:
    false_alarms = sum(thirds(correlated(seed)).differs for seed in range(RUNS))
    assert false_alarms / RUNS <= 0.03
    for seed in range(20):
        drift = [value + 3 * index / 4800 for index, value in enumerate(correlated(seed))]
        assert thirds(drift).differs
        assert thirds(drift[::-1]).differs


def test_a_hump_is_no_trend() -> None:
    means = [0.0] * 8 + [100.0] * 8 + [1.0] * 8
    found = thirds(means)
    assert (found.first, found.middle, found.last, found.differs) == (0, 100, 1, False)
