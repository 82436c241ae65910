"""Searches the shapes and numbers of workers for a question: DistServe's Algorithms 1 and 2, and colocated workers.

Source: DistServe (OSDI 2024), section 4.2 and 4.3, Algorithms 1 and 2. Ours are the pruning (`race`), the whole plan in
one simulation with workers added until it holds (`settle`), the count of a price in place of GPUs, and the colocated
layouts that are searched in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from headrace_core.planner.caps import floor_tpot_ms, floor_ttft_ms, lowest
from headrace_core.planner.deployment import Deployment, caps_of, total_weight, trial_of
from headrace_core.planner.errors import PlanError
from headrace_core.planner.goodput import Candidate, Interval, measure
from headrace_core.planner.question import COLOCATED, Layout, Question
from headrace_core.planner.runner import Runner
from headrace_core.planner.settle import Assessment, settle, within
from headrace_core.planner.sides import Alone, apart_plans
from headrace_core.planner.space import Space
from headrace_core.planner.units import colocated_units, paired_units, unit_plans

WHOLE_PLANS: Final = 3
"""Plans of a layout that are simulated as a whole, at most."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A deployment that serves the rate, or the best that the GPUs allow."""

    deployment: Deployment
    goodput: Interval
    """Requests/s of the whole."""
    assessment: Assessment | None
    """At the rate asked for. None: no rate was asked for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a search came to."""

    found: tuple[Found, ...]
    """Best first."""
    alone: tuple[Alone, ...]
    """What the finalists of Algorithm 1 serve by themselves."""
    without: tuple[Layout, ...]
    """Layouts asked for of which no plan serves the rate with the GPUs that there are, or any rate at all."""


def search(question: Question, space: Space, runner: Runner, announce: Callable[[str], None] | None = None) -> Results:
    """The layouts of the question, and colocated workers. `announce` is told which one is being looked at.

    Raises:
        PlanError: an SLO lies under the floor of every shape.
    """
    check_floors(question, space)
    found: list[Found] = []
    alone: list[Alone] = []
    without: list[Layout] = []
    for layout in question.layouts:
        if announce is not None:
            announce(layout.value)
        if layout is Layout.APART:
            apart, alone = apart_plans(question, space, runner)
            plans = [(plan, None) for plan in apart]
            whole = _whole(question, space, plans, runner)
        else:
            pairs = unit_plans(question, space, paired_units(question, space), runner, survivors=2)
            whole = _whole(question, space, [(pair.deployment, pair.unit_goodput) for pair in pairs], runner)
        found.extend(whole)
        if not whole:
            without.append(layout)
    if announce is not None:
        announce("Colocated")
    colocated = unit_plans(question, space, colocated_units(question, space, COLOCATED), runner, survivors=1)
    found.extend(_whole(question, space, [(one.deployment, None) for one in colocated[:1]], runner))
    found.sort(key=lambda one: better_first(question, one))
    return Results(found=tuple(found), alone=tuple(alone), without=tuple(without))


def _whole(
    question: Question, space: Space, plans: Sequence[tuple[Deployment, Interval | None]], runner: Runner
) -> list[Found]:
    """Simulates the most promising plans as a whole, and finds how many workers they need.

    With a plan comes the goodput of its units where they share nothing, as pairs do: it says all of many. Colocated
    workers share the requests.
    """
    found: list[Found] = []
    for plan, unit_goodput in plans[:WHOLE_PLANS]:
        now, assessment, holds_per_s = plan, None, 0.0
        if question.rate_per_s is not None:
            settled = settle(question, space, plan, runner)
            if settled is None:
                continue
            now, assessment = settled
            holds_per_s = question.rate_per_s
        elif not within(question, plan):
            continue
        if unit_goodput is not None:
            goodput = unit_goodput.times(now.units)
        else:
            goodput = measured(question, space, now, runner, holds_per_s=holds_per_s)
        if goodput.mean > 0:
            found.append(Found(deployment=now, goodput=goodput, assessment=assessment))
    return found


def check_floors(question: Question, space: Space) -> None:
    """Refuses SLOs that no shape meets with a single request in the system.

    Raises:
        PlanError: TTFT or TPOT of every class is under what the fastest shape takes.
    """
    lengths, rules = question.traffic.lengths, question.rules.prefill
    ttft_ms = max(slo.ttft_ms for slo in question.slos)
    floors = [(floor_tpot_ms(shape.instance.costs, question.work), shape) for shape in space.shapes]
    least_ms, fastest = min(floors, key=lambda pair: pair[0])
    if least_ms > question.tpot_ms:
        raise PlanError(
            f"slo: TPOT {question.tpot_ms:g} ms is under the {least_ms:.3g} ms that one decode step takes on "
            f"{fastest.name}, the fastest shape here; raise it, or offer a faster accelerator or more GPUs a worker"
        )
    floors = [(floor_ttft_ms(shape.instance.costs, rules, lengths, question.target), shape) for shape in space.shapes]
    least_ms, fastest = min(floors, key=lambda pair: pair[0])
    if least_ms > ttft_ms:
        raise PlanError(
            f"slo: TTFT {ttft_ms:g} ms is under the {least_ms:.3g} ms in which {question.target:.0%} of the prompts "
            f"can be computed on {fastest.name}, the fastest shape here, with nothing ahead; raise it, or offer a "
            "faster accelerator or more GPUs a worker"
        )


def measured(
    question: Question, space: Space, deployment: Deployment, runner: Runner, *, holds_per_s: float = 0.0
) -> Interval:
    """The goodput of a whole deployment, which is known to hold `holds_per_s`."""
    units = deployment.units
    cap_per_s = lowest(caps_of(question, space, deployment)).rate_per_s
    trial = trial_of(question, space, deployment, holds_per_s or cap_per_s)
    candidate = Candidate(trial=trial, cap_per_s=cap_per_s / units)
    candidate.bracket.low = holds_per_s / units
    return measure(candidate, runner).times(units)


def better_first(question: Question, found: Found) -> tuple[float, float]:
    """Sorts: the cheapest for a rate, and of equal cost the one with more goodput; for GPUs the most goodput."""
    weight = total_weight(question, found.deployment)
    if question.rate_per_s is None:
        return (-found.goodput.mean, weight)
    return (weight, -found.goodput.mean)
