"""Decides how many workers of given shapes a rate takes, by simulating the whole deployment: adds and removes workers.

Two sides at 90 % each leave about 81 % of the requests in time for both, so the counts that the sides' own goodputs
give are only where it starts (ours; DistServe stops there).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.planner.caps import Resource, lowest
from headrace_core.planner.deployment import Deployment, caps_of, trial_of, weight_of
from headrace_core.planner.goodput import Interval, interval
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.runner import Runner
from headrace_core.planner.space import Space
from headrace_core.planner.trial import Trial, Verdict

FIRST_REPLICATIONS: Final = 3
MORE_REPLICATIONS: Final = 2
MOST_REPLICATIONS: Final = 11
MOST_CHANGES: Final = 24
"""How often workers are added, at most."""
LINKS_FULL: Final = 0.8
"""Load of the links from which on a missed TPOT is taken to be theirs."""
SPAN: Final = 16
"""Of so many workers of a side one is added or removed at a time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """How a deployment fares at a rate."""

    share: Interval | None
    """Of the requests in time. None: the rate is above the cap, or most runs were stopped early."""
    holds: bool
    """Whether the whole interval is on the right side of the target."""
    ttft_share: float
    tpot_share: float


def assess(trial: Trial, runner: Runner) -> Assessment:
    """Replicates a trial at its rate until its share is told apart from the target."""
    verdicts: list[Verdict] = []
    while True:
        count = FIRST_REPLICATIONS if not verdicts else MORE_REPLICATIONS
        verdicts += runner.run([replace(trial, replication=len(verdicts) + number) for number in range(count)])
        share = interval([verdict.share for verdict in verdicts])
        certain = abs(share.mean - trial.target) > share.half_width
        if certain or len(verdicts) >= MOST_REPLICATIONS:
            return _assessment(verdicts, share)


def settle(question: Question, space: Space, start: Deployment, runner: Runner) -> tuple[Deployment, Assessment] | None:
    """The least workers of the same shapes, near `start`, that hold; None where the GPUs do not suffice."""
    if not _can_suffice(question, space, start):
        return None
    now, found = start, _at_rate(question, space, start, runner)
    if not found.holds:
        for _ in range(MOST_CHANGES):
            now = grown(now, short_side(question, space, now, (found.ttft_share, found.tpot_share)))
            if not within(question, now):
                return None
            found = _at_rate(question, space, now, runner)
            if found.holds:
                return now, found
        return None
    shrinks = True
    while shrinks:
        shrinks = False
        for smaller in _smaller(question, now):
            less = _at_rate(question, space, smaller, runner)
            if less.holds:
                now, found, shrinks = smaller, less, True
                break
    return (now, found) if within(question, now) else None


def within(question: Question, deployment: Deployment) -> bool:
    """Whether there are enough GPUs."""
    if question.gpus is not None and deployment.gpus > question.gpus:
        return False
    for side in deployment.sides:
        offer = side.shape.offer
        taken = sum(other.gpus for other in deployment.sides if other.shape.offer == offer)
        if offer.gpus is not None and taken > offer.gpus:
            return False
    return True


def load_per_rate(question: Question, space: Space, deployment: Deployment, place: int) -> float:
    """Share of a side's cap that 1 request/s takes."""
    prefill = place == 0 and len(deployment.sides) > 1
    caps = [
        cap.rate_per_s
        for cap in caps_of(question, space, deployment)
        if len(deployment.sides) == 1 or (cap.resource is Resource.PREFILL_COMPUTE) is prefill
    ]
    return 1.0 / min(caps) if min(caps) > 0 else math.inf


def _can_suffice(question: Question, space: Space, deployment: Deployment) -> bool:
    """Whether there are GPUs enough for the fewest workers whose caps are above the rate."""
    ones = deployment.with_workers(*(1 for _ in deployment.sides))
    rate_per_s = question.rate_per_s or 0.0
    loads = [load_per_rate(question, space, ones, place) * rate_per_s for place in range(len(ones.sides))]
    if any(math.isinf(load) for load in loads):
        return False
    counts = [max(1, math.ceil(load - 1e-9)) for load in loads]
    if deployment.layout is not Layout.APART:
        counts = [max(counts)] * len(counts)
    return within(question, ones.with_workers(*counts))


def _at_rate(question: Question, space: Space, deployment: Deployment, runner: Runner) -> Assessment:
    rate_per_s = question.rate_per_s
    assert rate_per_s is not None  # noqa: S101 - a plan without a rate settles on GPUs
    cap = lowest(caps_of(question, space, deployment))
    if rate_per_s > cap.rate_per_s:
        in_prefill = cap.resource is Resource.PREFILL_COMPUTE
        return Assessment(share=None, holds=False, ttft_share=1.0 - in_prefill, tpot_share=float(in_prefill))
    return assess(trial_of(question, space, deployment, rate_per_s), runner)


def _assessment(verdicts: list[Verdict], share: Interval) -> Assessment:
    measured = sum(verdict.measured for verdict in verdicts)
    target = verdicts[0].target
    stopped = sum(verdict.stopped_early for verdict in verdicts)
    whole = 2 * stopped < len(verdicts)
    return Assessment(
        share=share if whole else None,
        holds=whole and share.low >= target,
        ttft_share=sum(verdict.ttft_met for verdict in verdicts) / measured,
        tpot_share=sum(verdict.tpot_met for verdict in verdicts) / measured,
    )


def short_side(question: Question, space: Space, deployment: Deployment, shares: tuple[float, float]) -> int:
    """The side that lacks workers: the one whose SLO is missed more, or the one whose links carry too much KV.

    `shares`: of the requests within TTFT, and within TPOT.
    """
    if len(deployment.sides) == 1:
        return 0
    cap = lowest(caps_of(question, space, deployment))
    if cap.resource is Resource.TRANSFER and (question.rate_per_s or 0.0) > LINKS_FULL * cap.rate_per_s:
        return 0 if deployment.sides[0].workers <= deployment.sides[1].workers else 1
    return 0 if shares[0] <= shares[1] else 1


def grown(deployment: Deployment, side: int) -> Deployment:
    """More workers on a side, one for each SPAN that there are; pairs grow together."""
    counts = [one.workers for one in deployment.sides]
    more = max(1, counts[side] // SPAN)
    if deployment.layout is Layout.APART:
        counts[side] += more
        return deployment.with_workers(*counts)
    return deployment.with_workers(*(count + more for count in counts))


def _smaller(question: Question, deployment: Deployment) -> Iterator[Deployment]:
    """Fewer workers, the dearest first: one in SPAN, or one."""
    counts = [side.workers for side in deployment.sides]
    order = sorted(range(len(counts)), key=lambda index: -weight_of(question, deployment.sides[index].shape))
    for divisor in (SPAN, max(counts)):
        for index in order if deployment.layout is Layout.APART else order[:1]:
            cut = max(1, counts[index] // divisor)
            if counts[index] > cut and (divisor != SPAN or cut > 1):
                alone = deployment.layout is Layout.APART
                fewer = [count - cut * (place == index or not alone) for place, count in enumerate(counts)]
                yield deployment.with_workers(*fewer)
