"""Searches prefill and decode workers apart, each for its own goodput: DistServe's Algorithm 1, for fast networks.

Source: DistServe (OSDI 2024), section 4.2. A price in place of the number of GPUs is ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headrace_core.planner.caps import decode_caps, lowest, prefill_cap
from headrace_core.planner.deployment import (
    Deployment,
    Side,
    decode_alone,
    prefill_alone,
    resident_requests,
    total_weight,
    weight_of,
)
from headrace_core.planner.goodput import Candidate, Interval, interval
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.race import Contender, race
from headrace_core.planner.runner import Runner
from headrace_core.planner.space import Shape, Space
from headrace_core.planner.trial import Trial, requests_for
from headrace_core.sim.scenario import Duty


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What one worker serves as one side of a plan, with the other side taking no time."""

    duty: Duty
    shape: Shape
    goodput: Interval


def apart_plans(question: Question, space: Space, runner: Runner) -> tuple[list[Deployment], list[Alone]]:
    """Plans of the best shapes of either side, the cheapest first, and what the shapes serve alone."""
    prefills = _alone(space, race(prefill_contenders(question, space), question.rate_per_s, runner), Duty.PREFILL)
    decodes = _alone(space, race(decode_contenders(question, space), question.rate_per_s, runner), Duty.DECODE)
    plans: list[tuple[Deployment, float]] = []
    for prefill, decode in itertools.product(prefills, decodes):
        counts = _counts(question, prefill, decode)
        if counts is not None:
            sides = (Side(shape=prefill.shape, workers=counts[0]), Side(shape=decode.shape, workers=counts[1]))
            plan = Deployment(layout=Layout.APART, sides=sides, token_budget=question.rules.decode.token_budget)
            plans.append((plan, min(counts[0] * prefill.goodput.mean, counts[1] * decode.goodput.mean)))
    if question.rate_per_s is None:
        plans.sort(key=lambda pair: -pair[1])
    else:
        plans.sort(key=lambda pair: (total_weight(question, pair[0]), -pair[1]))
    return [plan for plan, _ in plans], [*prefills, *decodes]


def prefill_contenders(question: Question, space: Space) -> list[Contender]:
    """Each shape as a prefill worker, with answers of one token."""
    contenders: list[Contender] = []
    for index, shape in enumerate(space.shapes):
        trial = Trial(
            scenario=prefill_alone(question, shape),
            rate_per_s=1.0,
            target=question.target,
            requests=requests_for(0.0),
            prefill_only=True,
        )
        candidate = Candidate(trial=trial, cap_per_s=prefill_cap(shape.instance, question.work).rate_per_s)
        contenders.append(Contender(candidate=candidate, weight=weight_of(question, shape), index=index))
    return contenders


def decode_contenders(question: Question, space: Space) -> list[Contender]:
    """Each shape as a decode worker, with prefill that takes no time."""
    contenders: list[Contender] = []
    for index, shape in enumerate(space.shapes):
        cap = lowest(
            decode_caps(shape.instance, question.rules.decode, question.work, question.tpot_ms, question.target)
        )
        trial = Trial(
            scenario=decode_alone(question, shape),
            rate_per_s=1.0,
            target=question.target,
            requests=requests_for(resident_requests(question, shape, 1, cap.rate_per_s)),
        )
        candidate = Candidate(trial=trial, cap_per_s=cap.rate_per_s)
        contenders.append(Contender(candidate=candidate, weight=weight_of(question, shape), index=index))
    return contenders


def _alone(space: Space, ranking: Sequence[Contender], duty: Duty) -> list[Alone]:
    return [Alone(duty=duty, shape=space.shapes[one.index], goodput=interval(one.candidate.roots)) for one in ranking]


def _counts(question: Question, prefill: Alone, decode: Alone) -> tuple[int, int] | None:
    """Workers of each side: for the rate, or so that the weaker side of the GPUs is as strong as can be."""
    if question.rate_per_s is not None:
        prefills = math.ceil(question.rate_per_s / prefill.goodput.mean - 1e-9)
        return prefills, math.ceil(question.rate_per_s / decode.goodput.mean - 1e-9)
    gpus = question.gpus or 0
    best: tuple[int, int] | None = None
    reached = 0.0
    for prefills in range(1, (gpus - decode.shape.gpus) // prefill.shape.gpus + 1):
        decodes = (gpus - prefills * prefill.shape.gpus) // decode.shape.gpus
        goodput = min(prefills * prefill.goodput.mean, decodes * decode.goodput.mean)
        if goodput > reached:
            best, reached = (prefills, decodes), goodput
    return best
