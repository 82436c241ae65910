"""Decides how many workers of given shapes each hour of a trace takes, by replaying it window by window.

Ours. Each window is simulated with the requests of the trace itself, bursts and all. Its beginning is played twice, so
that it does not start empty: not the end of the window before, which other workers serve. The counts of a window have
to be there when it begins: a worker takes its start-up time before that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.planner.caps import lowest
from headrace_core.planner.deployment import Deployment, caps_of, scenario_of
from headrace_core.planner.errors import PlanError
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.runner import Runner
from headrace_core.planner.settle import grown, load_per_rate, short_side, within
from headrace_core.planner.space import Space
from headrace_core.planner.trial import Trial, Verdict
from headrace_core.sim.lengths import Lengths
from headrace_core.sim.workload import Workload, cut_time

LEAD: Final = 0.25
"""Part of a window that is played before it and not counted."""
MOST_ROUNDS: Final = 24
LEAST_REQUESTS: Final = 20
"""A window with fewer requests says too little of its own: it gets the fewest workers that there can be."""
MOST_WINDOWS: Final = 2000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of the trace and the workers that it takes."""

    from_s: float
    until_s: float
    requests: int
    rate_per_s: float
    workers: tuple[int, ...]
    """By side: prefill and decode, or colocated."""
    share: float | None
    """Of its requests in time. None: there were too few to tell."""
    holds: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Workers over the time of a trace."""

    windows: tuple[Window, ...]
    gpu_hours: float
    gpu_hours_at_peak: float
    """With the most workers of any window all the time."""


def schedule(
    question: Question, space: Space, deployment: Deployment, trace: Workload, runner: Runner, *, window_s: float
) -> Schedule:
    """Workers by window, all windows side by side.

    Raises:
        PlanError: the windows have no length, or there are too many.
    """
    spans = _spans(trace, window_s)
    searches = [_Search(question, space, deployment, trace, span) for span in spans]
    for _ in range(MOST_ROUNDS):
        rough = [search for search in searches if search.tries is not None]
        if not rough:
            break
        verdicts = runner.run([search.trial() for search in rough])
        for search, verdict in zip(rough, verdicts, strict=True):
            search.learn(verdict)
    windows = tuple(search.window() for search in searches)
    gpus = [side.shape.gpus for side in deployment.sides]
    most = [max(window.workers[side] for window in windows) for side in range(len(gpus))]
    return Schedule(
        windows=windows,
        gpu_hours=math.fsum(_gpu_hours(window.until_s - window.from_s, window.workers, gpus) for window in windows),
        gpu_hours_at_peak=_gpu_hours(windows[-1].until_s - windows[0].from_s, most, gpus),
    )


def _gpu_hours(duration_s: float, workers: Sequence[int], gpus: Sequence[int]) -> float:
    return duration_s / 3600.0 * sum(count * each for count, each in zip(workers, gpus, strict=True))


@final
@dataclass(frozen=True, slots=True)
class _Span:
    from_ms: float
    until_ms: float


def _spans(trace: Workload, window_s: float) -> list[_Span]:
    end_ms = trace.arrival_ms[-1]
    if not 0 < window_s < math.inf:
        raise PlanError(f"schedule: a window of {window_s:g} s has no length; give one such as 15m")
    count = max(1, math.ceil((end_ms + 1e-6) / (window_s * 1000.0)))
    if count > MOST_WINDOWS:
        raise PlanError(f"schedule: {count} windows of {window_s:g} s are too many; give a longer one than that")
    return [_Span(number * window_s * 1000.0, (number + 1) * window_s * 1000.0) for number in range(count)]


@final
class _Search:
    """One window: workers are added until it holds, and then taken away side by side while it does."""

    def __init__(self, question: Question, space: Space, deployment: Deployment, trace: Workload, span: _Span) -> None:
        self._space = space
        self._span = span
        first, last = (bisect_left(trace.arrival_ms, edge_ms) for edge_ms in (span.from_ms, span.until_ms))
        self._requests = last - first
        self._best = deployment.with_workers(*(1 for _ in deployment.sides))
        self._share: float | None = None
        self._holds = True
        self.tries: Deployment | None = None
        """What is simulated next; None: the search is over."""
        self._side = 0
        """The side that is being made smaller; -1 while workers are added."""
        if self._requests < LEAST_REQUESTS:
            return
        own = Lengths(trace.prompt_tokens[first:last], trace.output_tokens[first:last], "the window")
        traffic = replace(question.traffic, lengths=own)
        self._question = replace(question, traffic=traffic, rate_per_s=self.rate_per_s)
        window = cut_time(trace, span.from_ms, span.until_ms)
        self._played, self._warmup = _led_in(window, LEAD * (span.until_ms - span.from_ms))
        self._side = -1
        self._holds = False
        self.tries = self._as_busy_as(question, deployment)

    @property
    def rate_per_s(self) -> float:
        """Of the window."""
        return self._requests * 1000.0 / (self._span.until_ms - self._span.from_ms)

    def trial(self) -> Trial:
        """What to simulate next."""
        assert self.tries is not None  # noqa: S101 - the caller asks only while there is something to try
        return Trial(
            scenario=scenario_of(self._question, self._space, self.tries),
            rate_per_s=self.rate_per_s,
            target=self._question.target,
            requests=len(self._played),
            given=_of_one_unit(self._played, self.tries.units),
            given_warmup=-(-self._warmup // self.tries.units),
        )

    def learn(self, verdict: Verdict) -> None:
        """Take the verdict of the trial, and choose the next."""
        tried = self.tries
        assert tried is not None  # noqa: S101 - see `trial`
        if verdict.holds:
            self._best, self._share, self._holds = tried, verdict.share, True
            self._side = max(self._side, 0)
        elif self._side < 0:
            self._best, self._share = tried, verdict.share
            shares = (verdict.ttft_met / verdict.measured, verdict.tpot_met / verdict.measured)
            more = grown(tried, short_side(self._question, self._space, tried, shares))
            self.tries = more if within(self._question, more) else None
            return
        else:
            self._side += 1
        self.tries = self._smaller()

    def window(self) -> Window:
        """What was found."""
        return Window(
            from_s=self._span.from_ms / 1000.0,
            until_s=self._span.until_ms / 1000.0,
            requests=self._requests,
            rate_per_s=self.rate_per_s,
            workers=tuple(side.workers for side in self._best.sides),
            share=self._share,
            holds=self._holds,
        )

    def _smaller(self) -> Deployment | None:
        """The best so far with a worker less on the side that is being made smaller, or on the next."""
        counts = [side.workers for side in self._best.sides]
        apart = self._best.layout is Layout.APART
        while self._side < (len(counts) if apart else 1):
            fewer = [count - (place == self._side or not apart) for place, count in enumerate(counts)]
            if min(fewer) > 0:
                smaller = self._best.with_workers(*fewer)
                if lowest(caps_of(self._question, self._space, smaller)).rate_per_s >= self.rate_per_s:
                    return smaller
            self._side += 1
        return None

    def _as_busy_as(self, planned: Question, deployment: Deployment) -> Deployment:
        """As many workers as are as busy with the window as the plan's are with its rate."""
        counts: list[int] = []
        for place, side in enumerate(deployment.sides):
            busy = load_per_rate(planned, self._space, deployment, place) * (planned.rate_per_s or self.rate_per_s)
            alone = load_per_rate(
                self._question, self._space, deployment.with_workers(*(1 for _ in deployment.sides)), place
            )
            wanted = alone * self.rate_per_s / busy if busy > 0 else float(side.workers)
            counts.append(max(1, math.ceil(wanted - 1e-9)))
        if deployment.layout is Layout.PAIRED:
            counts = [max(counts)] * len(counts)
        start = deployment.with_workers(*counts)
        return start if within(self._question, start) else deployment


def _led_in(window: Workload, lead_ms: float) -> tuple[Workload, int]:
    """A window behind a copy of its first `lead_ms`, and how many requests that copy has."""
    count = bisect_left(window.arrival_ms, lead_ms)
    rows = [*range(count), *range(len(window))]
    later_ms = [0.0] * count + [lead_ms] * len(window)
    times_ms = [window.arrival_ms[row] + later for row, later in zip(rows, later_ms, strict=True)]
    return _rows(window, rows, times_ms), count


def _of_one_unit(workload: Workload, units: int) -> Workload:
    """Every `units`-th request: what one of so many units gets."""
    rows = list(range(0, len(workload), units))
    return _rows(workload, rows, [workload.arrival_ms[row] for row in rows])


def _rows(workload: Workload, rows: list[int], arrival_ms: list[float]) -> Workload:
    return Workload(
        arrival_ms,
        [workload.prompt_tokens[row] for row in rows],
        [workload.output_tokens[row] for row in rows],
        [workload.slo_class[row] for row in rows] if workload.slo_class else [],
        [workload.prefix[row] for row in rows] if workload.prefix else [],
        workload.prefix_block_tokens,
        workload.source,
    )
