"""Finds the highest rate at which a candidate keeps its SLOs: bisection by simulation, replicated (D1).

Source: DistServe (OSDI 2024), section 4.1, for what goodput is and for bisecting it. Ours are the cap above which
nothing is tried, the replications with the same arrivals for all candidates, and the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from headrace_core.planner.runner import BATCH, Runner
from headrace_core.planner.trial import Trial, Verdict

SCREEN_TOLERANCE: Final = 0.04
"""Relative width of the bracket that ends a screening bisection."""
TOLERANCE: Final = 0.03
"""The same for a replication. The root is then interpolated in the bracket, unless a run at its end stopped early."""
SHARP_TOLERANCE: Final = 0.01
"""The same where nothing can be interpolated."""
NEAR: Final = 0.01
"""How near to a run, relative, the goodput may lie that the slope leads to."""
FAR: Final = 0.06
"""How far the slope is trusted to lead to the next rate to try."""
LEAST_SLOPE: Final = 0.5
"""Where the share falls more slowly, no slope is drawn."""
REPLICATION_FACTOR: Final = 3
"""How much longer a run is that replicates than one that screens: near the cap queues take long to show."""
WANTED_HALF_WIDTH: Final = 0.02
"""Relative half-width of the 95 % interval at which no more replications are needed."""
LEAST_REPLICATIONS: Final = 3
MOST_REPLICATIONS: Final = 13
FIRST_STEP: Final = 0.03
"""How far from the screened goodput a replication looks first, relative. It doubles until the goodput is enclosed."""
NOTHING: Final = 1e-3
"""Share of the cap under which a candidate counts as unable to meet the SLO at any rate."""

_STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
)
"""97.5 % quantile of Student's t by degrees of freedom, from 1."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over replications and the half of its 95 % interval."""

    mean: float
    half_width: float
    replications: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width

    def times(self, factor: float) -> Interval:
        """Of so many that share nothing."""
        return Interval(mean=self.mean * factor, half_width=self.half_width * factor, replications=self.replications)


@final
@dataclass(slots=True)
class Bracket:
    """A rate that holds and one that does not, and what was found there."""

    low: float
    high: float
    low_verdict: Verdict | None = None
    high_verdict: Verdict | None = None

    def learn(self, rate: float, verdict: Verdict) -> None:
        """Narrow it by one trial."""
        if verdict.holds:
            self.low, self.low_verdict = rate, verdict
        else:
            self.high, self.high_verdict = rate, verdict

    @property
    def interpolates(self) -> bool:
        """Whether the shares at both ends are known."""
        return self.low_verdict is not None and self.high_verdict is not None and not self.high_verdict.stopped_early

    def root(self) -> float:
        """Where the share crosses the target: on the line between the ends, or in the middle where one is not known."""
        low, high = self.low_verdict, self.high_verdict
        if low is None or high is None or not self.interpolates or low.share <= high.share:
            return (self.low + self.high) / 2
        return self.low + (self.high - self.low) * (low.share - low.target) / (low.share - high.share)

    def slope(self) -> float | None:
        """By how much the share falls between the ends, for a rate higher by its own size; None where not known."""
        low, high = self.low_verdict, self.high_verdict
        if low is None or high is None or not self.interpolates:
            return None
        fall = (low.share - high.share) * self.high / (self.high - self.low)
        return fall if fall >= LEAST_SLOPE else None


@final
@dataclass(slots=True, kw_only=True)
class Candidate:
    """Something whose goodput is wanted."""

    trial: Trial
    """A trial of it; rate and replication are filled in."""
    cap_per_s: float
    """No stable rate lies above it."""
    bracket: Bracket = field(init=False)
    roots: list[float] = field(default_factory=list)
    """Goodput by replication."""
    slope: float | None = None
    """By how much the share falls around the goodput, for a rate higher by its own size. None: not known."""

    def __post_init__(self) -> None:
        self.bracket = Bracket(0.0, self.cap_per_s)

    @property
    def screened(self) -> bool:
        """Whether its bracket is narrow."""
        return self.bracket.high - self.bracket.low <= max(
            SCREEN_TOLERANCE * self.bracket.high, NOTHING * self.cap_per_s
        )

    @property
    def hopeless(self) -> bool:
        """Whether it meets the SLO at no rate."""
        return self.screened and self.bracket.low <= 0.0

    def next_rate(self) -> float:
        """The rate to try next. Goodput is rarely under half the cap, so the first is above its middle."""
        if self.bracket.low <= 0.0 and self.bracket.high == self.cap_per_s:
            return 0.75 * self.cap_per_s
        return (self.bracket.low + self.bracket.high) / 2

    def screening(self, rate: float) -> Trial:
        """The trial at a rate, to screen."""
        return replace(self.trial, rate_per_s=rate)

    def replicating(self, rate: float, replication: int) -> Trial:
        """A longer one, with other arrivals for each replication."""
        requests = self.trial.requests * REPLICATION_FACTOR
        return replace(self.trial, rate_per_s=rate, replication=replication, requests=requests)


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value and its 95 % interval by Student's t; of one value alone it is infinite."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean=mean, half_width=math.inf, replications=1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    student = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
    return Interval(mean=mean, half_width=student * math.sqrt(variance / count), replications=count)


def screen(candidates: Sequence[Candidate], runner: Runner) -> None:
    """One bisection of each, as narrow as SCREEN_TOLERANCE."""
    open_ones = [candidate for candidate in candidates if not candidate.screened]
    while open_ones:
        probe(open_ones[:BATCH], runner)
        open_ones = [candidate for candidate in open_ones if not candidate.screened]


def probe(candidates: Sequence[Candidate], runner: Runner) -> None:
    """One step of the bisection of each, side by side."""
    rates = [candidate.next_rate() for candidate in candidates]
    verdicts = runner.run([candidate.screening(rate) for candidate, rate in zip(candidates, rates, strict=True)])
    for candidate, rate, verdict in zip(candidates, rates, verdicts, strict=True):
        candidate.bracket.learn(rate, verdict)


def replicate(candidates: Sequence[Candidate], replications: int, runner: Runner) -> None:
    """Goodput of each screened candidate with its next `replications` seeds.

    The first replication encloses its goodput. It tells where and how steeply the share falls, so that the others
    mostly need a run or two.
    """
    first = [_Search(one, len(one.roots)) for one in candidates if not one.roots and replications > 0]
    _run(first, runner)
    begun = {id(search.candidate) for search in first}
    _run(
        [
            _Search(one, len(one.roots) + number)
            for one in candidates
            for number in range(replications - (id(one) in begun))
        ],
        runner,
    )


def _run(searches: list[_Search], runner: Runner) -> None:
    """Takes searches to their ends, side by side, and hands their roots to the candidates."""
    open_ones = searches
    while open_ones:
        rates = [search.next_rate() for search in open_ones]
        verdicts = runner.run(
            [
                search.candidate.replicating(rate, search.replication)
                for search, rate in zip(open_ones, rates, strict=True)
            ]
        )
        for search, rate, verdict in zip(open_ones, rates, verdicts, strict=True):
            search.learn(rate, verdict)
        open_ones = [search for search in open_ones if not search.done]
    for search in searches:
        search.candidate.roots.append(search.root())
        if search.candidate.slope is None:
            search.candidate.slope = search.bracket.slope()


def measure(candidate: Candidate, runner: Runner) -> Interval:
    """The goodput of one candidate with its interval, replicated as far as it takes."""
    screen([candidate], runner)
    if candidate.hopeless:
        return Interval(mean=0.0, half_width=0.0, replications=1)
    replicate([candidate], LEAST_REPLICATIONS - len(candidate.roots), runner)
    while not settled(candidate):
        replicate([candidate], 2, runner)
    return interval(candidate.roots)


def settled(candidate: Candidate) -> bool:
    """Whether its interval is narrow, or as many replications were made as are ever made."""
    if len(candidate.roots) < LEAST_REPLICATIONS:
        return False
    now = interval(candidate.roots)
    return now.half_width <= WANTED_HALF_WIDTH * now.mean or len(candidate.roots) >= MOST_REPLICATIONS


@final
class _Search:
    """The search for the goodput of one replication, which begins where the others were found."""

    __slots__ = ("_last", "_near", "_step", "bracket", "candidate", "replication")

    def __init__(self, candidate: Candidate, replication: int) -> None:
        self.candidate = candidate
        self.replication = replication
        self.bracket = Bracket(0.0, candidate.cap_per_s)
        self._step = FIRST_STEP
        self._last = 0.0
        self._near: float | None = None
        """Where the goodput is by the slope, from the last run, if that was whole."""

    @property
    def done(self) -> bool:
        """Whether the goodput is enclosed, or so near to a run that the slope leads there."""
        if self._near is not None and abs(self._near - self._last) <= NEAR * self._last:
            return True
        bracket = self.bracket
        tolerance = TOLERANCE if bracket.interpolates else SHARP_TOLERANCE
        return bracket.high - bracket.low <= max(tolerance * bracket.high, NOTHING * self.candidate.cap_per_s)

    def root(self) -> float:
        """The goodput, once the search is done."""
        return self.bracket.root() if self._near is None else min(self._near, self.candidate.cap_per_s)

    def next_rate(self) -> float:
        """The rate to try next."""
        bracket = self.bracket
        low_known, high_known = bracket.low_verdict is not None, bracket.high_verdict is not None
        if self._near is not None and bracket.low < self._near < bracket.high:
            return self._near
        if low_known and high_known:
            return (bracket.low + bracket.high) / 2
        if not low_known and not high_known:
            roots = self.candidate.roots
            return math.fsum(roots) / len(roots) if roots else self.candidate.bracket.root()
        step, self._step = self._step, 2 * self._step
        if low_known:
            # The cap itself is never tried, so the bracket may close against it.
            wider = bracket.low * (1 + step)
            return wider if wider < bracket.high else (bracket.low + bracket.high) / 2
        lower = bracket.high * (1 - step)
        return lower if step < 1 else bracket.high / 2

    def learn(self, rate: float, verdict: Verdict) -> None:
        """Take what a run at a rate came to."""
        self.bracket.learn(rate, verdict)
        self._last = rate
        slope = self.candidate.slope
        over = verdict.share - verdict.target
        steep = slope is not None and not verdict.stopped_early and abs(over) <= FAR * slope
        self._near = rate * (1 + over / slope) if steep and slope else None
