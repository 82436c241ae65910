"""What a sample of a simulation says: percentiles, 95 % intervals by batch means, and whether there is a trend.

Requests of one run are not independent: a long queue makes many of them slow together. So an interval comes from
BATCHES consecutive batches, each long enough to be nearly independent of the next, and not from the single values
(Law, Simulation Modeling and Analysis, section 9.5.3). A batch whose statistic is biased when taken alone, such as a
high percentile, is compared with the statistic of the whole sample (sectioning: Asmussen and Glynn, Stochastic
Simulation, section III.5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

THIRDS: Final = 3
BATCHES_A_THIRD: Final = 8
BATCHES: Final = THIRDS * BATCHES_A_THIRD
LEAST_IN_BATCH: Final = 10
"""With fewer values in a batch there is no interval."""
STUDENT_23: Final = 2.0687
"""97.5 % quantile of Student's t with BATCHES - 1 degrees of freedom."""
STUDENT_14: Final = 2.9768
"""99.5 % quantile of Student's t with 2 * (BATCHES_A_THIRD - 1) degrees of freedom. A trend is called one at 99 %, as
batches of a busy queue are not fully independent."""
NORMAL_975: Final = 1.959964
"""97.5 % quantile of the normal distribution."""
LEAST_BEYOND: Final = 100
"""Values that must lie beyond a percentile for it to be more than a hint."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of a sample and the half of its 95 % interval; None where the sample is too small for one."""

    value: float
    half_width: float | None


@final
@dataclass(frozen=True, slots=True)
class Thirds:
    """A mean in the three thirds of a run, in order, and whether the last differs from the first beyond chance."""

    first: float
    middle: float
    last: float
    differs: bool


def mean(values: list[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def percentile(ordered: list[float], percent: float) -> float:
    """The percentile of at least one sorted value, linear between neighbours (Hyndman and Fan's definition 7)."""
    position = (len(ordered) - 1) * percent / 100.0
    below = math.floor(position)
    value = ordered[below]
    return value if below + 1 == len(ordered) else value + (position - below) * (ordered[below + 1] - value)


def estimate_mean(values: list[float]) -> Estimate:
    """The mean of at least one value, in the order in which they arose."""
    whole = mean(values)
    if len(values) < BATCHES * LEAST_IN_BATCH:
        return Estimate(whole, None)
    return Estimate(whole, _half_width(batch_means(values), whole))


def estimate_percentiles(values: list[float], percents: tuple[float, ...]) -> list[Estimate]:
    """Percentiles (0 to 100) of at least one value, in the order in which the values arose."""
    ordered = sorted(values)
    wholes = [percentile(ordered, percent) for percent in percents]
    if len(values) < BATCHES * LEAST_IN_BATCH:
        return [Estimate(whole, None) for whole in wholes]
    parts = [sorted(part) for part in split(values, BATCHES)]
    return [
        Estimate(whole, _half_width([percentile(part, percent) for part in parts], whole))
        for percent, whole in zip(percents, wholes, strict=True)
    ]


def estimate_share(hits: list[bool]) -> Estimate:
    """The share of hits among at least one, in the order in which they arose.

    The half-width is the larger of the batch means' and of the one for independent hits (Agresti and Coull 1998), which
    does not shrink to nothing where all or none hit. So a small sample has one too.
    """
    count = len(hits)
    share = sum(hits) / count
    weight = NORMAL_975 * NORMAL_975
    centre = (share * count + weight / 2) / (count + weight)
    half_width = NORMAL_975 * math.sqrt(centre * (1 - centre) / (count + weight)) + abs(centre - share)
    if count >= BATCHES * LEAST_IN_BATCH:
        half_width = max(half_width, _half_width(batch_means([1.0 if hit else 0.0 for hit in hits]), share))
    return Estimate(share, half_width)


def thirds(values: list[float]) -> Thirds:
    """The means of the three thirds of a run, from at least BATCHES values in the order of time.

    The thirds differ when Welch's test of the batch means says so at 99 % and the middle lies between the two ends.
    """
    return thirds_of_batches(batch_means(values))


def thirds_of_batches(means: list[float]) -> Thirds:
    """The same from the means of the BATCHES batches."""
    parts = [mean(part) for part in split(means, THIRDS)]
    head, tail = means[:BATCHES_A_THIRD], means[-BATCHES_A_THIRD:]
    noise = math.sqrt((_variance(head, parts[0]) + _variance(tail, parts[2])) / BATCHES_A_THIRD)
    ordered = min(parts[0], parts[2]) <= parts[1] <= max(parts[0], parts[2])
    return Thirds(parts[0], parts[1], parts[2], ordered and abs(parts[2] - parts[0]) > STUDENT_14 * noise)


def batch_means(values: list[float]) -> list[float]:
    """The means of the BATCHES consecutive batches of at least as many values."""
    return [mean(part) for part in split(values, BATCHES)]


def split(values: list[float], parts: int) -> list[list[float]]:
    """Consecutive parts of nearly equal length."""
    size = len(values)
    return [values[part * size // parts : (part + 1) * size // parts] for part in range(parts)]


def _half_width(parts: list[float], whole: float) -> float:
    return STUDENT_23 * math.sqrt(_variance(parts, whole) / len(parts))


def _variance(values: list[float], centre: float) -> float:
    return math.fsum((value - centre) * (value - centre) for value in values) / (len(values) - 1)
