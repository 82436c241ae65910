"""When synthetic requests arrive: Poisson, gamma and burst arrivals from a seeded generator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import final

from headrace_core.sim.workload import WorkloadError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """A rate that jumps between two levels in a fixed rhythm, its mean kept."""

    period_ms: float
    """From the start of one burst to the start of the next."""
    share: float
    """Part of the period that the burst takes, 0 to 1."""
    factor: float
    """The rate inside a burst over the rate outside."""


def poisson(count: int, rate_per_s: float, randomness: Random) -> list[float]:
    """Arrival times in ms of a Poisson process, the first one gap after 0.

    Raises:
        WorkloadError: the rate is not a positive number, or the count is under 1.
    """
    _check(count, rate_per_s)
    now_ms = 0.0
    arrivals_ms: list[float] = []
    for _ in range(count):
        now_ms += randomness.expovariate(1.0) * 1000.0 / rate_per_s
        arrivals_ms.append(now_ms)
    return arrivals_ms


def gamma(count: int, rate_per_s: float, variation: float, randomness: Random) -> list[float]:
    """Arrival times in ms with gamma gaps, the first one gap after 0.

    Args:
        count: arrivals.
        rate_per_s: their mean rate.
        variation: standard deviation of a gap over its mean. 0: even gaps; 1: Poisson in law, though not in the
            numbers drawn; above 1: clustered.
        randomness: where the gaps come from.

    Raises:
        WorkloadError: rate, count or variation is out of range.
    """
    _check(count, rate_per_s)
    if not 0 <= variation < math.inf:
        raise WorkloadError(f"variation: {variation:g} is not a coefficient of variation; give a number from 0 on")
    gap_ms = 1000.0 / rate_per_s
    if variation == 0:
        return [gap_ms * (number + 1) for number in range(count)]
    shape = 1.0 / (variation * variation)
    now_ms = 0.0
    arrivals_ms: list[float] = []
    for _ in range(count):
        now_ms += randomness.gammavariate(shape, gap_ms / shape)
        arrivals_ms.append(now_ms)
    return arrivals_ms


def bursty(count: int, rate_per_s: float, bursts: Bursts, randomness: Random) -> list[float]:
    """Arrival times in ms of a Poisson process whose rate follows `bursts`; the run begins with a burst.

    A Poisson process of rate 1 is laid over the integral of the rate, so the law is exact at the jumps too.

    Raises:
        WorkloadError: rate, count or a field of `bursts` is out of range.
    """
    _check(count, rate_per_s)
    _check_bursts(bursts)
    high_ms = bursts.period_ms * bursts.share
    low_per_ms = rate_per_s / 1000.0 / (bursts.share * bursts.factor + 1.0 - bursts.share)
    high_per_ms = low_per_ms * bursts.factor
    period_count = rate_per_s / 1000.0 * bursts.period_ms
    high_count = high_per_ms * high_ms
    done = 0.0
    arrivals_ms: list[float] = []
    for _ in range(count):
        done += randomness.expovariate(1.0)
        periods = math.floor(done / period_count)
        inside = done - periods * period_count
        offset_ms = inside / high_per_ms if inside < high_count else high_ms + (inside - high_count) / low_per_ms
        arrivals_ms.append(periods * bursts.period_ms + offset_ms)
    return arrivals_ms


def _check(count: int, rate_per_s: float) -> None:
    if not 0 < rate_per_s < math.inf:
        raise WorkloadError(f"rate: {rate_per_s:g} requests/s is not a positive number; give the mean arrival rate")
    if count < 1:
        raise WorkloadError(f"requests: {count} leaves nothing to simulate; give at least 1")


def _check_bursts(bursts: Bursts) -> None:
    if not 0 < bursts.period_ms < math.inf:
        raise WorkloadError(f"bursts.period_ms: {bursts.period_ms:g} is not a length of time; give milliseconds")
    if not 0 < bursts.share < 1:
        raise WorkloadError(
            f"bursts.share: {bursts.share:g} is not a part of the period; give a number between 0 and 1"
        )
    if not 1 <= bursts.factor < math.inf:
        raise WorkloadError(f"bursts.factor: {bursts.factor:g} is no burst; give a number from 1 on")
