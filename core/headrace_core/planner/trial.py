"""Runs one simulation of a candidate and says how many of its requests were in time: what all searches ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.sim.attainment import Stage, Verdicts, blame, judge
from headrace_core.sim.outcome import Outcome
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.traffic import Traffic, draw_traffic
from headrace_core.sim.workload import Workload

Simulate = Callable[[Scenario, Workload], Outcome]
"""`sim.cluster.simulate`, or what stands for it. A process pool needs a function of a module."""

WARMUP: Final = 0.25
"""Share of a run's requests that are not counted, at its start: the system fills first."""
SCREEN_REQUESTS: Final = 3000
"""Of a run that screens: a larger system gets more, see `requests_for`."""
TURNOVERS: Final = 10
"""How often, at least, the requests in the system change within a run."""
MOST_REQUESTS: Final = 40_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One simulation to run."""

    scenario: Scenario
    rate_per_s: float
    target: float
    """Share of the requests that must be in time, 0 to 1."""
    requests: int
    replication: int = 0
    """Seed of what arrives and of the run."""
    prompt_factor: float = 1.0
    output_factor: float = 1.0
    prefill_only: bool = False
    """Answers of one token: nothing is left to decode."""
    given: Workload | None = None
    """What arrives, in place of what is drawn at `rate_per_s`; its first `given_warmup` requests are not counted."""
    given_warmup: int = 0
    to_the_end: bool = False
    """Run on though the verdict is certain, and find the stages that caused the misses."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a trial, over the requests after the warm-up."""

    measured: int
    met: int
    ttft_met: int
    tpot_met: int
    target: float
    stopped_early: bool
    """Too many had missed: the shares are not those of a whole run."""
    misses: tuple[tuple[Stage, int], ...] = ()
    """By stage, most first, for a trial `to_the_end`."""
    mean_tpot_ms: float | None = None
    """For a trial `to_the_end`. None: no request has one."""

    @property
    def share(self) -> float:
        """Share of the measured requests that were in time."""
        return self.met / self.measured

    @property
    def holds(self) -> bool:
        """Whether the target is met."""
        return not self.stopped_early and self.share >= self.target


def requests_for(resident: float) -> int:
    """How many requests a run needs for a system that holds `resident` at once."""
    wanted = min(MOST_REQUESTS, TURNOVERS * resident)
    # Few sizes, so that runs share what is drawn for them.
    return SCREEN_REQUESTS << max(0, math.ceil(math.log2(max(1.0, wanted / SCREEN_REQUESTS))))


def drawn(traffic: Traffic, requests: int, replication: int) -> Workload:
    """What arrives, at a rate of 1/s: what trials of a replication have in common.

    The gaps are stretched so that warm-up and measured part have the rate exactly. Left to chance the rate of 2,250
    arrivals is off by 2 %, and the goodput with it.
    """
    workload = draw_traffic(traffic, requests, 1.0, replication)
    return replace(workload, arrival_ms=_evened(workload.arrival_ms))


def workload_for(trial: Trial, unit: Workload) -> Workload:
    """What arrives in a trial. `unit`: what was `drawn` for it."""
    workload = replace(unit, arrival_ms=[arrival_ms / trial.rate_per_s for arrival_ms in unit.arrival_ms])
    prompts, outputs = workload.prompt_tokens, workload.output_tokens
    if trial.prompt_factor != 1.0:
        workload = replace(workload, prompt_tokens=[max(1, round(tokens * trial.prompt_factor)) for tokens in prompts])
    if trial.prefill_only:
        workload = replace(workload, output_tokens=[1] * len(workload))
    elif trial.output_factor != 1.0:
        workload = replace(workload, output_tokens=[max(1, round(tokens * trial.output_factor)) for tokens in outputs])
    return workload


def _evened(arrival_ms: list[float]) -> list[float]:
    first = math.floor(len(arrival_ms) * WARMUP)
    evened_ms: list[float] = []
    for part in (arrival_ms[:first], arrival_ms[first:]):
        begin_ms, from_ms = len(evened_ms) * 1000.0, arrival_ms[len(evened_ms) - 1] if evened_ms else 0.0
        if part and part[-1] > from_ms:
            stretch = len(part) * 1000.0 / (part[-1] - from_ms)
            evened_ms.extend(begin_ms + (one_ms - from_ms) * stretch for one_ms in part)
        else:
            evened_ms.extend(begin_ms for _ in part)
    return evened_ms


def run(trial: Trial, unit: Workload, simulate: Simulate) -> Verdict:
    """Simulates and counts. `unit`: what was `drawn` for the trial."""
    if trial.given is not None:
        workload, first = trial.given, trial.given_warmup
    else:
        workload, first = workload_for(trial, unit), math.floor(len(unit) * WARMUP)
    measured = len(workload) - first
    allowed = measured - math.ceil(trial.target * measured - 1e-9)
    # The simulator counts misses of the warm-up too, so that the verdict is certain that much later.
    scenario = replace(
        trial.scenario, seed=trial.replication, stop_after_misses=None if trial.to_the_end else allowed + first
    )
    outcome = simulate(scenario, workload)
    verdicts = judge(scenario, outcome)
    met = verdicts.met[first:]
    verdict = Verdict(
        measured=measured,
        met=sum(met),
        ttft_met=sum(verdicts.ttft_met[first:]),
        tpot_met=sum(verdicts.tpot_met[first:]),
        target=trial.target,
        stopped_early=outcome.stopped_early,
    )
    return _looked_into(verdict, scenario, outcome, verdicts, first) if trial.to_the_end else verdict


def _looked_into(verdict: Verdict, scenario: Scenario, outcome: Outcome, verdicts: Verdicts, first: int) -> Verdict:
    """With what a trial `to_the_end` tells beside."""
    misses: dict[Stage, int] = {}
    for index in range(first, len(verdicts.met)):
        if not verdicts.met[index]:
            stage = blame(scenario, outcome, verdicts, index)
            misses[stage] = misses.get(stage, 0) + 1
    tpots_ms = [value for value in verdicts.tpot_ms[first:] if not math.isnan(value)]
    return replace(
        verdict,
        misses=tuple(sorted(misses.items(), key=lambda item: -item[1])),
        mean_tpot_ms=math.fsum(tpots_ms) / len(tpots_ms) if tpots_ms else None,
    )
