"""Asks how a deployment fares when things are not as planned: a worker less, more load, longer requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, final

from headrace_core.planner.caps import lowest
from headrace_core.planner.deployment import Deployment, caps_of, trial_of
from headrace_core.planner.goodput import Interval
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.runner import Runner
from headrace_core.planner.settle import assess
from headrace_core.planner.space import Space
from headrace_core.sim.lengths import Lengths

OFF: Final = 0.2
"""By how much rate and lengths may be off."""


class Surprise(StrEnum):
    """What is not as planned."""

    NONE = "AsPlanned"
    MEAN = "MeanRate"
    """The trace's rate over all its time."""
    PEAK = "PeakRate"
    """The trace's rate in its busiest window."""
    RATE_UP = "RateUp20"
    RATE_DOWN = "RateDown20"
    PROMPTS_UP = "PromptsUp20"
    ANSWERS_UP = "AnswersUp20"
    LENGTHS_DOWN = "LengthsDown20"
    ALL_UP = "RateAndLengthsUp20"
    PREFILL_LOST = "PrefillWorkerLost"
    DECODE_LOST = "DecodeWorkerLost"
    WORKER_LOST = "WorkerLost"
    """A colocated worker."""
    PAIR_LOST = "PairLost"
    """A pair on the same nodes: each of its workers is of no use without the other."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One surprise, and how many requests are in time all the same."""

    surprise: Surprise
    rate_per_s: float
    cap_per_s: float
    """The rate that could be sustained at all. 0: no worker of a role is left."""
    share: Interval | None
    """Of the requests in time. None: the rate is above the cap, or so many missed that the runs were stopped."""
    holds: bool


def headroom(
    question: Question,
    space: Space,
    deployment: Deployment,
    runner: Runner,
    others: Sequence[tuple[Surprise, float]] = (),
) -> tuple[Case, ...]:
    """All surprises, for a question with a rate. `others`: further rates to look at, in requests/s."""
    rate_per_s = question.rate_per_s
    if rate_per_s is None:
        return ()
    asked = _Asked(question, space, runner)
    cases = [asked.case(deployment, Surprise.NONE, rate_per_s)]
    cases += [asked.case(deployment, surprise, rate) for surprise, rate in others]
    cases += [asked.case(fewer, surprise, rate_per_s) for surprise, fewer in _losses(deployment)]
    up, down = 1 + OFF, 1 - OFF
    for surprise, rate, prompts, answers in (
        (Surprise.RATE_UP, up, 1.0, 1.0),
        (Surprise.RATE_DOWN, down, 1.0, 1.0),
        (Surprise.PROMPTS_UP, 1.0, up, 1.0),
        (Surprise.ANSWERS_UP, 1.0, 1.0, up),
        (Surprise.LENGTHS_DOWN, 1.0, down, down),
        (Surprise.ALL_UP, up, up, up),
    ):
        cases.append(asked.case(deployment, surprise, rate_per_s * rate, (prompts, answers)))
    return tuple(cases)


def _losses(deployment: Deployment) -> list[tuple[Surprise, Deployment | None]]:
    counts = [side.workers for side in deployment.sides]
    if deployment.layout is Layout.APART:
        lost = [(Surprise.PREFILL_LOST, (1, 0)), (Surprise.DECODE_LOST, (0, 1))]
    else:
        lost = [(Surprise.PAIR_LOST if deployment.layout is Layout.PAIRED else Surprise.WORKER_LOST, (1, 1))]
    cases: list[tuple[Surprise, Deployment | None]] = []
    for surprise, gone in lost:
        left = [count - less for count, less in zip(counts, gone, strict=False)]
        cases.append((surprise, deployment.with_workers(*left) if min(left) > 0 else None))
    return cases


@final
@dataclass(frozen=True, slots=True)
class _Asked:
    question: Question
    space: Space
    runner: Runner

    def case(
        self,
        deployment: Deployment | None,
        surprise: Surprise,
        rate_per_s: float,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> Case:
        """`factors`: of the prompts' lengths and of the answers'."""
        if deployment is None:
            return Case(surprise=surprise, rate_per_s=rate_per_s, cap_per_s=0.0, share=None, holds=False)
        question, (prompts, answers) = self.question, factors
        if factors != (1.0, 1.0):
            lengths = scaled(question.traffic.lengths, prompts, answers)
            question = replace(question, traffic=replace(question.traffic, lengths=lengths))
        cap_per_s = lowest(caps_of(question, self.space, deployment)).rate_per_s
        if rate_per_s > cap_per_s:
            return Case(surprise=surprise, rate_per_s=rate_per_s, cap_per_s=cap_per_s, share=None, holds=False)
        trial = trial_of(question, self.space, deployment, rate_per_s)
        found = assess(replace(trial, prompt_factor=prompts, output_factor=answers), self.runner)
        return Case(surprise=surprise, rate_per_s=rate_per_s, cap_per_s=cap_per_s, share=found.share, holds=found.holds)


def scaled(lengths: Lengths, prompts: float, answers: float) -> Lengths:
    """The same requests, longer or shorter, at least a token each."""
    return Lengths(
        [max(1, round(tokens * prompts)) for tokens in lengths.prompt_tokens],
        [max(1, round(tokens * answers)) for tokens in lengths.output_tokens],
        lengths.source,
    )
