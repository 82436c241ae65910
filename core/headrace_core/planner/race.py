"""Decides among candidates by their goodput and simulates only as much as that takes: bounds first, then replications.

The method is ours. Each candidate has a bracket, from the rate that is known to hold to the one that does not; the
first upper end is its analytic cap. The candidate that could still be the cheapest is narrowed next, and one that could
not be among the survivors even at its upper end is dropped. What remains is replicated until the intervals are
narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from headrace_core.planner.goodput import LEAST_REPLICATIONS, Candidate, interval, probe, replicate, settled
from headrace_core.planner.runner import BATCH, Runner

SCREEN_ERROR: Final = 0.05
"""By how much one replication's goodput may be off: a bracket is taken to be that much wider, relative."""
SURVIVORS: Final = 2
"""Candidates that no pruning takes away, if the caller has no other wish: the best and a runner-up."""
FINALISTS: Final = 3
"""Candidates that are replicated, at most."""


@final
@dataclass(slots=True, kw_only=True)
class Contender:
    """A candidate with what one of it costs."""

    candidate: Candidate
    weight: float
    """Price or GPUs of one."""
    index: int
    """In the caller's list."""

    def cost(self, goodput: float, rate_per_s: float | None) -> float:
        """Least cost of serving a rate with any number of these, one at least; without a rate, of 1 request/s."""
        if goodput <= 0:
            return math.inf
        return self.weight / goodput if rate_per_s is None else self.weight * max(1.0, rate_per_s / goodput)

    def whole_cost(self, goodput: float, rate_per_s: float | None) -> float:
        """The cost of as many as the rate takes when each serves `goodput` and no more."""
        if goodput <= 0:
            return math.inf
        return self.weight / goodput if rate_per_s is None else self.weight * math.ceil(rate_per_s / goodput - 1e-9)


def race(
    contenders: Sequence[Contender], rate_per_s: float | None, runner: Runner, *, survivors: int = SURVIVORS
) -> list[Contender]:
    """The best contenders, at most FINALISTS, cheapest first, their goodput replicated; none if none meets the SLO."""
    alive = _screened(list(contenders), rate_per_s, runner, survivors)
    alive.sort(key=lambda one: (one.cost(one.candidate.bracket.root(), rate_per_s), one.index))
    alive = alive[:FINALISTS]
    replicate([one.candidate for one in alive], LEAST_REPLICATIONS, runner)
    while True:
        alive = _undecided(alive, rate_per_s, survivors)
        rough = [one.candidate for one in alive if not settled(one.candidate)]
        if not rough:
            return sorted(alive, key=lambda one: (one.cost(_mean(one), rate_per_s), one.index))
        replicate(rough, 2, runner)


def _screened(alive: list[Contender], rate_per_s: float | None, runner: Runner, survivors: int) -> list[Contender]:
    """Those that could be the best by one bisection each, the most promising narrowed first."""
    while True:
        costs = [one.whole_cost(one.candidate.bracket.low * (1 - SCREEN_ERROR), rate_per_s) for one in alive]
        limit = _limit(costs, survivors)
        alive = [one for one in alive if not one.candidate.hopeless and _least(one, rate_per_s) <= limit]
        rough = [one for one in alive if not one.candidate.screened]
        if not rough:
            return alive
        rough.sort(key=lambda one: (_least(one, rate_per_s), one.index))
        probe([one.candidate for one in rough[:BATCH]], runner)


def _least(one: Contender, rate_per_s: float | None) -> float:
    """The least that it could cost."""
    bracket = one.candidate.bracket
    tried = bracket.high < one.candidate.cap_per_s
    return one.cost(bracket.high * (1 + SCREEN_ERROR) if tried else bracket.high, rate_per_s)


def _undecided(alive: list[Contender], rate_per_s: float | None, survivors: int) -> list[Contender]:
    """Without those that are dearer than the survivors at the favourable end of their interval."""
    ends = {one.index: interval(one.candidate.roots) for one in alive}
    limit = _limit([one.whole_cost(ends[one.index].low, rate_per_s) for one in alive], survivors)
    return [one for one in alive if one.cost(ends[one.index].high, rate_per_s) <= limit]


def _limit(costs: list[float], survivors: int) -> float:
    """The cost of the last survivor: what is surely dearer has no place."""
    return sorted(costs)[survivors - 1] if len(costs) >= survivors else math.inf


def _mean(one: Contender) -> float:
    return interval(one.candidate.roots).mean
