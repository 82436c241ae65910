"""Runs one simulation of a candidate and says how many of its requests were in time: what all searches ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, final

from headrace_core.sim.attainment import Stage, blame, judge
from headrace_core.sim.outcome import Outcome
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.statistics import thirds
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
    requests: int = SCREEN_REQUESTS
    replication: int = 0
    """Seed of what arrives and of the run."""
    prompt_factor: float = 1.0
    output_factor: float = 1.0
    prefill_only: bool = False
    """Answers of one token: nothing is left to decode."""
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
    falling: bool = False
    """In time less and less from third to third: the queue grows."""
    misses: tuple[tuple[Stage, int], ...] = field(default=())
    """By stage, most first, for a trial `to_the_end`."""

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
    return max(SCREEN_REQUESTS, min(MOST_REQUESTS, math.ceil(TURNOVERS * resident)))


def unit_workload(trial: Trial, traffic: Traffic) -> Workload:
    """What arrives in a trial, at a rate of 1/s: all that trials at different rates have in common."""
    workload = draw_traffic(traffic, trial.requests, 1.0, trial.replication)
    prompts, outputs = workload.prompt_tokens, workload.output_tokens
    if trial.prompt_factor != 1.0:
        workload = replace(workload, prompt_tokens=[max(1, round(tokens * trial.prompt_factor)) for tokens in prompts])
    if trial.prefill_only:
        workload = replace(workload, output_tokens=[1] * len(workload))
    elif trial.output_factor != 1.0:
        workload = replace(workload, output_tokens=[max(1, round(tokens * trial.output_factor)) for tokens in outputs])
    return workload


def run(trial: Trial, unit: Workload, simulate: Simulate) -> Verdict:
    """Simulates and counts. `unit`: the trial's `unit_workload`."""
    workload = replace(unit, arrival_ms=[arrival_ms / trial.rate_per_s for arrival_ms in unit.arrival_ms])
    first = math.floor(len(workload) * WARMUP)
    measured = len(workload) - first
    allowed = measured - math.ceil(trial.target * measured - 1e-9)
    # The simulator counts misses of the warm-up too, so that the verdict is certain that much later.
    scenario = replace(
        trial.scenario, seed=trial.replication, stop_after_misses=None if trial.to_the_end else allowed + first
    )
    outcome = simulate(scenario, workload)
    verdicts = judge(scenario, outcome)
    met = verdicts.met[first:]
    parts = thirds([1.0 if one else 0.0 for one in met]) if trial.to_the_end else None
    misses: dict[Stage, int] = {}
    if trial.to_the_end:
        for index in range(first, len(workload)):
            if not verdicts.met[index]:
                stage = blame(scenario, outcome, verdicts, index)
                misses[stage] = misses.get(stage, 0) + 1
    return Verdict(
        measured=measured,
        met=sum(met),
        ttft_met=sum(verdicts.ttft_met[first:]),
        tpot_met=sum(verdicts.tpot_met[first:]),
        target=trial.target,
        stopped_early=outcome.stopped_early,
        falling=parts is not None and parts.differs and parts.last < parts.first,
        misses=tuple(sorted(misses.items(), key=lambda item: -item[1])),
    )
