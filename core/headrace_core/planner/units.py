"""Searches units that serve requests from end to end: pairs that share their nodes (Algorithm 2), colocated workers.

Source: DistServe (OSDI 2024), section 4.2, Algorithm 2, for slow networks between nodes: prefill and decode have the
same number of stages across nodes, and within a node each has tensor and pipeline degrees of its own, so that KV never
leaves a node. The colocated workers with their parallelism searched are the paper's vLLM++ (section 6.4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headrace_core.perf.costs import StepCosts
from headrace_core.planner.caps import Work, lowest
from headrace_core.planner.deployment import Deployment, Side, caps_of, total_weight, trial_of
from headrace_core.planner.goodput import Candidate, Interval, interval
from headrace_core.planner.question import BUDGETS, Layout, Question
from headrace_core.planner.race import Contender, race
from headrace_core.planner.runner import Runner
from headrace_core.planner.space import Shape, Space


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A number of equal units."""

    deployment: Deployment
    unit_goodput: Interval
    """Of one."""


def unit_plans(
    question: Question, space: Space, units: Sequence[Deployment], runner: Runner, survivors: int
) -> list[UnitPlan]:
    """As many of the best units as the rate takes or the GPUs allow, the best first, `survivors` at least."""
    contenders: list[Contender] = []
    for index, unit in enumerate(units):
        cap_per_s = lowest(caps_of(question, space, unit)).rate_per_s
        candidate = Candidate(trial=trial_of(question, space, unit, cap_per_s or 1.0), cap_per_s=cap_per_s)
        contenders.append(Contender(candidate=candidate, weight=total_weight(question, unit), index=index))
    plans: list[UnitPlan] = []
    for one in race(contenders, question.rate_per_s, runner, survivors=survivors):
        unit, goodput = units[one.index], interval(one.candidate.roots)
        if question.rate_per_s is not None:
            count = math.ceil(question.rate_per_s / goodput.mean - 1e-9)
        else:
            count = (question.gpus or 0) // unit.gpus
        if count:
            deployment = unit.with_workers(*(count for _ in unit.sides))
            plans.append(UnitPlan(deployment=deployment, unit_goodput=goodput))
    return plans


def paired_units(question: Question, space: Space) -> list[Deployment]:
    """Pairs of a prefill and a decode worker on the same nodes, whose stages lie across the nodes alike."""
    units: list[Deployment] = []
    for prefill in space.shapes:
        for decode in space.shapes:
            if prefill.offer == decode.offer and _share_nodes(space, prefill, decode):
                sides = (Side(shape=prefill, workers=1), Side(shape=decode, workers=1))
                budget = question.rules.decode.token_budget
                units.append(Deployment(layout=Layout.PAIRED, sides=sides, token_budget=budget))
    return units


def colocated_units(question: Question, space: Space, layouts: Sequence[Layout]) -> list[Deployment]:
    """Each shape as a colocated worker; with mixed steps, for a large token budget and for one within the TPOT."""
    units: list[Deployment] = []
    for shape, layout in itertools.product(space.shapes, layouts):
        budgets = [question.rules.decode.token_budget]
        if layout is Layout.MIXED:
            fitting = budget_within(shape.instance.costs, question.work, question.tpot_ms)
            budgets = sorted({BUDGETS[0], fitting})
        units.extend(
            Deployment(layout=layout, sides=(Side(shape=shape, workers=1),), token_budget=budget) for budget in budgets
        )
    return units


def budget_within(costs: StepCosts, work: Work, tpot_ms: float) -> int:
    """The largest of BUDGETS with which a step that is full of prompt and carries one decode is within the TPOT."""
    squares_per_token = work.prompt_squares / work.prompt_tokens
    for budget in BUDGETS:
        if costs.mixed_ms(budget, budget * squares_per_token, 1, round(work.context_tokens)) <= tpot_ms:
            return budget
    return BUDGETS[-1]


def _share_nodes(space: Space, prefill: Shape, decode: Shape) -> bool:
    """Whether some number of stages across nodes divides both pipelines and leaves room for both in each node."""
    for stages in range(1, space.nodes.per_worker + 1):
        if prefill.pipeline % stages or decode.pipeline % stages:
            continue
        if (prefill.gpus + decode.gpus) // stages <= space.nodes.gpus:
            return True
    return False
