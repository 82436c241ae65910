"""Draws the same traffic again at any rate: lengths from a table, gaps of a law, SLO classes by their shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import final

from headrace_core.sim.arrivals import gamma, poisson
from headrace_core.sim.lengths import Lengths, draw
from headrace_core.sim.workload import Workload, WorkloadError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What arrives, but for its rate.

    Raises:
        WorkloadError: there are no lengths, or a field is out of range.
    """

    lengths: Lengths
    variation: float = 1.0
    """Standard deviation of a gap over its mean. 1: Poisson."""
    class_shares: tuple[float, ...] = (1.0,)
    """Share of the requests by SLO class. They are taken in proportion, so they need not add up to 1."""

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise WorkloadError(f"lengths: {self.lengths.source} holds no pair; give at least one")
        if not 0 <= self.variation < math.inf:
            raise WorkloadError(f"variation: {self.variation:g}; give a number from 0 on (1: Poisson)")
        if not all(0 <= share < math.inf for share in self.class_shares) or not sum(self.class_shares) > 0:
            shares = ", ".join(f"{share:g}" for share in self.class_shares) or "none"
            raise WorkloadError(f"class_shares: {shares}; give one from 0 on for each SLO class, and one above 0")


def draw_traffic(traffic: Traffic, count: int, rate_per_s: float, seed: int) -> Workload:
    """`count` requests at a mean rate.

    Lengths are stratified (see `lengths.draw`). With the same seed and count, another rate gives the same requests in
    the same order with all gaps stretched: what differs between two runs is then the rate alone.

    Raises:
        WorkloadError: rate or count is not positive.
    """
    rows = draw(traffic.lengths, count, _stream(seed, 1), stratified=True)
    gaps = _stream(seed, 2)
    if traffic.variation == 1.0:
        arrival_ms = poisson(count, rate_per_s, gaps)
    else:
        arrival_ms = gamma(count, rate_per_s, traffic.variation, gaps)
    classes = _classes(traffic.class_shares, count, _stream(seed, 3)) if len(traffic.class_shares) > 1 else []
    law = "Poisson" if traffic.variation == 1.0 else f"gamma (variation {traffic.variation:g})"
    source = f"{rows.source}, {law} arrivals at {rate_per_s:g}/s, seed {seed}"
    return Workload(arrival_ms, rows.prompt_tokens, rows.output_tokens, classes, [], 0, source)


def _stream(seed: int, number: int) -> Random:
    """One of a seed's independent streams, so that another count of one draw leaves the others as they are."""
    return Random(f"traffic {seed} {number}")  # noqa: S311 - a simulation, not a secret


def _classes(shares: tuple[float, ...], count: int, randomness: Random) -> list[int]:
    """As many of each class as its share says, in random order."""
    total = sum(shares)
    classes: list[int] = []
    reached = 0.0
    for number, share in enumerate(shares):
        reached += share
        classes.extend([number] * (round(count * reached / total) - len(classes)))
    randomness.shuffle(classes)
    return classes
