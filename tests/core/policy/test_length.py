"""The arithmetic of predicted lengths against the probabilities of single lengths."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from headrace_core.policy.length import LengthDistribution, next_bound

FOUR = LengthDistribution([0.1, 0.2, 0.4, 0.3], max_tokens=1000)  # the last one: 300 and more

CASES: dict[str, tuple[list[float], int, int, int, tuple[int, int]]] = {
    "granularity 100": ([0.1, 0.2, 0.4, 0.3], 1000, 100, 2, (200, 300)),
    "granularity 200 joins two": ([0.1, 0.2, 0.4, 0.3], 1000, 200, 1, (200, 1000)),
    "granularity 400 joins all": ([0.1, 0.2, 0.4, 0.3], 1000, 400, 0, (1, 1000)),
    "the last class is open": ([0.0, 0.0, 1.0], 5000, 100, 2, (200, 5000)),
    "the lower of equals": ([0.5, 0.5], 1000, 100, 0, (1, 100)),
    "joined buckets beat the largest one": ([0.3, 0.3, 0.4, 0.0], 1000, 200, 0, (1, 200)),
    "no bound is over max_tokens": ([0.1, 0.2, 0.7], 150, 100, 1, (100, 150)),
    "longer answers end at max_tokens": ([0.4, 0.1, 0.0, 0.5], 150, 100, 1, (100, 150)),
    "one token": ([0.1, 0.9], 1, 100, 0, (1, 1)),
    "shares need not add up to 1": ([1, 3, 2], 1000, 100, 1, (100, 200)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_class_and_its_bounds(case: str) -> None:
    shares, max_tokens, granularity, length_class, bounds = CASES[case]
    made = LengthDistribution(shares, max_tokens)
    assert made.predicted_class(granularity) == length_class
    assert made.bounds(length_class, granularity) == bounds


def test_quantiles_by_hand() -> None:
    assert LengthDistribution([0.0, 1.0], 199).quantile(0.01) == 100
    assert LengthDistribution([0.0, 1.0], 199).median == 149
    assert LengthDistribution([0.0, 1.0], 199).p90 == 189
    assert LengthDistribution([0.0, 1.0], 120).p90 == 118
    assert FOUR.median == 249
    assert FOUR.quantile(1.0) == 1000


def test_odds_of_a_heavy_decode_by_hand() -> None:
    assert FOUR.heavy_probability() == pytest.approx(0.7 + 0.2 * 71 / 100)
    assert FOUR.heavy_probability(99) == pytest.approx(0.9)
    assert LengthDistribution([0.1, 0.9], 128).heavy_probability() == 0.0


def test_passed_buckets_are_dropped() -> None:
    left = FOUR.given(199)
    assert left.shares == pytest.approx([0.0, 0.0, 4 / 7, 3 / 7])
    assert left.bounds(left.predicted_class(100), 100) == (200, 300)
    half = FOUR.given(249)
    assert half.shares == pytest.approx([0.0, 0.0, 0.4, 0.6])
    assert half.heavy_probability() == 1.0
    assert half.bounds(2, 100) == (250, 300)


def test_a_request_past_all_that_was_predicted_moves_up() -> None:
    short = LengthDistribution([1.0, 0.0, 0.0], 1000)
    assert short.given(100).predicted_class(100) == 1
    assert short.given(99).predicted_class(100) == 1
    assert short.given(98).predicted_class(100) == 0
    assert short.given(700).bounds(2, 100) == (701, 1000)


def test_the_next_bound_is_the_end_of_the_class() -> None:
    assert [next_bound(generated, 200, 1000) for generated in (0, 199, 200, 399, 999)] == [200, 200, 400, 400, 1000]
    assert next_bound(450, 200, 500) == 500


BAD: dict[str, Callable[[], object]] = {
    "shares add up to 0": lambda: LengthDistribution([0.0, 0.0], 100),
    "give one of 0 or more": lambda: LengthDistribution([1.0, -0.5], 100),
    "shares add up to nan": lambda: LengthDistribution([float("nan")], 100),
    "max_tokens is 0": lambda: LengthDistribution([1.0], 0),
    "fewer than max_tokens": lambda: FOUR.given(1000),
    "the 200 of before": lambda: FOUR.given(200).given(100),
    "granularity is 150": lambda: FOUR.predicted_class(150),
    "granularity is 0": lambda: FOUR.bounds(0, 0),
    "probability is 0": lambda: FOUR.quantile(0.0),
    "probability is 1.5": lambda: FOUR.quantile(1.5),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input_names_the_field(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BAD[said]()


def literal(shares: list[float], max_tokens: int, generated: int) -> np.ndarray:
    """The probability of each length from 0 to `max_tokens`: spread evenly in buckets, then conditioned, then cut.

    Zero when nothing of it is longer than what was generated.
    """
    top = max(len(shares) * 100, max_tokens + 1)
    lengths = np.zeros(top)
    for bucket, share in enumerate(shares):
        first = max(1, bucket * 100)
        end = (bucket + 1) * 100 if bucket < len(shares) - 1 else max(max_tokens, first) + 1
        lengths[first:end] += share / (end - first)
    lengths[: generated + 1] = 0
    lengths[max_tokens] += lengths[max_tokens + 1 :].sum()
    lengths = lengths[: max_tokens + 1]
    return lengths / lengths.sum() if lengths.sum() > 0 else lengths


@pytest.mark.thorough
def test_it_is_as_the_literal_probabilities() -> None:
    """100,000 states: shares, a limit, a number of generated tokens, and what is asked."""
    source = random.Random(4)
    seen = 0
    while seen < 100_000:
        shares = [source.choice((0.0, source.random())) for _ in range(source.randrange(1, 6))]
        if sum(shares) == 0:
            continue
        max_tokens = source.randrange(1, 700)
        first = source.choice((0, source.randrange(max_tokens)))
        second = source.choice((first, source.randrange(first, max_tokens)))
        expected = literal(shares, max_tokens, second)
        if expected.sum() == 0:
            continue
        made = LengthDistribution(shares, max_tokens)
        made = made.given(first).given(second) if second else made
        cumulative = expected.cumsum()
        for _ in range(5):
            seen += 1
            probability = source.choice((0.5, 0.9, source.uniform(0.01, 1)))
            tokens = made.quantile(probability)
            assert second < tokens <= max_tokens
            assert cumulative[tokens] >= probability - 1e-8
            assert cumulative[tokens - 1] < probability + 1e-8
            heavy = source.choice((128, source.randrange(600)))
            assert made.heavy_probability(heavy) == pytest.approx(float(expected[heavy + 1 :].sum()), abs=1e-9)
        granularity = source.choice((100, 200, 400))
        classes = np.add.reduceat(expected, np.arange(0, max_tokens + 1, granularity))
        last = (len(shares) - 1) * 100 // granularity
        classes = np.append(classes[:last], classes[last:].sum())
        assert classes[made.predicted_class(granularity)] >= classes.max() - 1e-9
