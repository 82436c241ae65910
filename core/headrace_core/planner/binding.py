"""Says what a deployment runs up against when the rate grows: from its misses just past its goodput, and its caps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.planner.caps import Resource, lowest
from headrace_core.planner.deployment import Deployment, caps_of, trial_of
from headrace_core.planner.question import Question
from headrace_core.planner.runner import Runner
from headrace_core.planner.space import Space
from headrace_core.sim.attainment import Stage

PAST: Final = 1.08
"""The rate, over the goodput, at which the misses are looked at."""
RUNS: Final = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How near a rate comes to what a resource could sustain by itself."""

    resource: Resource
    share: float
    """1: the cap, which no stable system passes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What gives way first."""

    resource: Resource
    misses: tuple[tuple[Stage, float], ...]
    """Share of all requests that missed just past the goodput, by the stage that caused it, most first."""
    loads: tuple[Load, ...]
    """At the rate asked for, or at the goodput where none was; highest first."""


def loads_at(question: Question, space: Space, deployment: Deployment, rate_per_s: float) -> tuple[Load, ...]:
    """The load on each resource, highest first; those without a limit are left out."""
    loads = [
        Load(resource=cap.resource, share=rate_per_s / cap.rate_per_s)
        for cap in caps_of(question, space, deployment)
        if 0 < cap.rate_per_s < float("inf")
    ]
    return tuple(sorted(loads, key=lambda load: -load.share))


def binding_of(
    question: Question, space: Space, deployment: Deployment, goodput_per_s: float, runner: Runner
) -> Binding:
    """Simulates the deployment a little past its goodput; one without any at the rate asked for or at its cap."""
    if goodput_per_s <= 0:
        cap_per_s = lowest(caps_of(question, space, deployment)).rate_per_s
        goodput_per_s = question.rate_per_s or cap_per_s or 1.0
    trial = replace(trial_of(question, space, deployment, goodput_per_s * PAST), to_the_end=True)
    counts: dict[Stage, int] = {}
    measured = 0
    for verdict in runner.run([replace(trial, replication=number) for number in range(RUNS)]):
        measured += verdict.measured
        for stage, count in verdict.misses:
            counts[stage] = counts.get(stage, 0) + count
    misses = tuple(sorted(((stage, count / measured) for stage, count in counts.items()), key=lambda item: -item[1]))
    loads = loads_at(question, space, deployment, question.rate_per_s or goodput_per_s)
    return Binding(resource=_resource(deployment, misses, loads), misses=misses, loads=loads)


def _resource(deployment: Deployment, misses: tuple[tuple[Stage, float], ...], loads: tuple[Load, ...]) -> Resource:
    """The resource behind the stage with the most misses; where several stand behind it, the most loaded."""
    behind = _behind(deployment, misses[0][0]) if misses else tuple(Resource)
    for load in loads:
        if load.resource in behind:
            return load.resource
    return behind[0]


def _behind(deployment: Deployment, stage: Stage) -> tuple[Resource, ...]:
    if stage is Stage.TRANSFER:
        return (Resource.TRANSFER,)
    if stage is Stage.DECODE:
        return (Resource.DECODE_STEP,)
    if stage in (Stage.ADMISSION, Stage.PREEMPTION):
        return (Resource.DECODE_KV, Resource.DECODE_SLOTS)
    if deployment.layout.colocation is not None:
        # Prompts of colocated workers wait for steps, for KV and for each other.
        return (Resource.PREFILL_COMPUTE, Resource.DECODE_STEP, Resource.DECODE_KV, Resource.DECODE_SLOTS)
    return (Resource.PREFILL_COMPUTE,)
