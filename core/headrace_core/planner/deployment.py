"""Describes what could be deployed, as the simulator sees it: workers of one side alone, or a whole plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.perf.costs import StepCosts
from headrace_core.planner.caps import Cap, colocated_caps, decode_caps, prefill_cap, transfer_cap
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.space import Shape, Space, network_between
from headrace_core.planner.trial import Trial, requests_for
from headrace_core.policy.admission import Admission
from headrace_core.policy.chunking import Batching
from headrace_core.sim.scenario import (
    Colocation,
    DecodeRules,
    Duty,
    Instance,
    Network,
    Pool,
    PrefillRules,
    Scenario,
    Slo,
)

REPORT_INTERVAL_MS: Final = 100.0
"""How often workers report (T2)."""
_AT_ONCE: Final = StepCosts(
    prefill_base_ms=0.0,
    prefill_token_ms=0.0,
    prefill_square_ms=0.0,
    decode_base_ms=0.0,
    decode_kv_token_ms=0.0,
    decode_request_ms=0.0,
    large_decode_base_ms=0.0,
    large_decode_kv_token_ms=0.0,
    large_decode_request_ms=0.0,
)
_ENDLESS: Final = Instance(costs=_AT_ONCE, kv_blocks=1 << 40, gpus=0)
"""A worker that takes no time: it stands for the side that is not looked at."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Workers of one kind."""

    shape: Shape
    workers: int

    @property
    def gpus(self) -> int:
        """Of all its workers."""
        return self.shape.gpus * self.workers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A whole plan. Colocated ones have one side, the others two: prefill, then decode."""

    layout: Layout
    sides: tuple[Side, ...]
    token_budget: int
    """Tokens of a step that carries prompts with decodes."""

    @property
    def gpus(self) -> int:
        """Of all workers."""
        return sum(side.gpus for side in self.sides)

    @property
    def price_per_hour(self) -> float:
        """Of all workers. 0: not known."""
        return sum(side.shape.instance.price_per_hour * side.workers for side in self.sides)

    @property
    def units(self) -> int:
        """Parts that share no requests: pairs of workers, or the whole."""
        return self.sides[0].workers if self.layout is Layout.PAIRED else 1

    def with_workers(self, *workers: int) -> Deployment:
        """The same with other numbers of workers, one for each side."""
        sides = tuple(replace(side, workers=count) for side, count in zip(self.sides, workers, strict=True))
        return replace(self, sides=sides)


def weight_of(question: Question, shape: Shape) -> float:
    """What one worker counts in comparisons: its price where one is known and a rate is to be served, else its GPUs."""
    if question.rate_per_s is None:
        return float(shape.gpus)
    return shape.instance.price_per_hour or float(shape.gpus)


def total_weight(question: Question, deployment: Deployment) -> float:
    """The same of all workers."""
    return sum(weight_of(question, side.shape) * side.workers for side in deployment.sides)


def scenario_of(question: Question, space: Space, deployment: Deployment) -> Scenario:
    """The deployment to simulate; of a paired one a single unit."""
    rules = question.rules
    pools = _pools(deployment)
    # With one worker a side nobody chooses between any, so that no report matters.
    chooses = rules.deflection is not None or any(pool.workers > 1 for pool in pools)
    return Scenario(
        pools=pools,
        slos=question.slos,
        network=network_of(space, deployment),
        prefill=rules.prefill,
        decode=_decode_rules(question, deployment),
        colocation=deployment.layout.colocation or Colocation.MIXED,
        dispatching=rules.dispatching,
        prediction=rules.prediction,
        deflection=None if deployment.layout.colocation else rules.deflection,
        report_interval_ms=REPORT_INTERVAL_MS if chooses else math.inf,
    )


def _decode_rules(question: Question, deployment: Deployment) -> DecodeRules:
    """Colocated workers admit as vLLM does: what they reserve for would wait for prefill, not for a transfer."""
    rules = replace(question.rules.decode, token_budget=deployment.token_budget)
    return replace(rules, admission=Admission.GREEDY) if deployment.layout.colocation else rules


def _pools(deployment: Deployment) -> tuple[Pool, ...]:
    duties = (Duty.COLOCATED,) if deployment.layout.colocation else (Duty.PREFILL, Duty.DECODE)
    return tuple(
        Pool(
            name=duty.value.lower(),
            duty=duty,
            instance=side.shape.instance,
            workers=side.workers // deployment.units,
        )
        for duty, side in zip(duties, deployment.sides, strict=True)
    )


def network_of(space: Space, deployment: Deployment) -> Network | None:
    """The way of the KV; None where it does not travel."""
    if deployment.layout.colocation is not None:
        return None
    prefill, decode = deployment.sides
    return network_between(space, prefill.shape, decode.shape, same_node=deployment.layout is Layout.PAIRED)


def prefill_alone(question: Question, shape: Shape) -> Scenario:
    """One prefill worker whose requests end with their first token."""
    return Scenario(
        pools=(
            _one(Duty.PREFILL, shape.instance),
            _one(Duty.DECODE, _ENDLESS),
        ),
        slos=tuple(Slo(ttft_ms=slo.ttft_ms, tpot_ms=math.inf, name=slo.name) for slo in question.slos),
        prefill=question.rules.prefill,
        report_interval_ms=math.inf,
    )


def decode_alone(question: Question, shape: Shape) -> Scenario:
    """One decode worker whose requests come with their prefill done."""
    return Scenario(
        pools=(
            _one(Duty.PREFILL, _ENDLESS),
            _one(Duty.DECODE, shape.instance),
        ),
        slos=tuple(Slo(ttft_ms=math.inf, tpot_ms=slo.tpot_ms, name=slo.name) for slo in question.slos),
        prefill=PrefillRules(batching=Batching.WHOLE_QUEUE, limit_tokens=1 << 40),
        decode=question.rules.decode,
        prediction=question.rules.prediction,
        report_interval_ms=math.inf,
    )


def _one(duty: Duty, instance: Instance) -> Pool:
    return Pool(name=duty.value.lower(), duty=duty, instance=instance, workers=1)


def caps_of(question: Question, space: Space, deployment: Deployment) -> list[Cap]:
    """The rates of the whole deployment that no stable system passes, by resource."""
    rules, work = question.rules, question.work
    if deployment.layout.colocation is not None:
        side = deployment.sides[0]
        decode_rules = replace(rules.decode, token_budget=deployment.token_budget)
        caps = colocated_caps(
            side.shape.instance,
            decode_rules,
            work,
            tpot_ms=question.tpot_ms,
            target=question.target,
            mixed=deployment.layout is Layout.MIXED,
        )
        return [replace(cap, rate_per_s=cap.rate_per_s * side.workers) for cap in caps]
    prefill, decode = deployment.sides
    link = transfer_cap(network_of(space, deployment), work)
    decode_side = decode_caps(decode.shape.instance, rules.decode, work, question.tpot_ms, question.target)
    return [
        replace(cap, rate_per_s=cap.rate_per_s * workers)
        for cap, workers in (
            (prefill_cap(prefill.shape.instance, work), prefill.workers),
            (link, min(prefill.workers, decode.workers)),
            *((cap, decode.workers) for cap in decode_side),
        )
    ]


def trial_of(question: Question, space: Space, deployment: Deployment, rate_per_s: float) -> Trial:
    """A trial of a deployment at a rate of the whole; a paired one is tried with a unit and its share of the rate."""
    share_per_s = rate_per_s / deployment.units
    decode = deployment.sides[-1]
    workers = decode.workers // deployment.units
    return Trial(
        scenario=scenario_of(question, space, deployment),
        rate_per_s=share_per_s,
        target=question.target,
        requests=requests_for(resident_requests(question, decode.shape, workers, share_per_s)),
    )


def resident_requests(question: Question, decode: Shape, workers: int, rate_per_s: float) -> float:
    """Requests that decode at once, about: by Little's law within the TPOT, and no more than fit."""
    work, instance = question.work, decode.instance
    by_time = rate_per_s * work.decode_tokens * question.tpot_ms / 1000.0
    by_memory = instance.kv_blocks * instance.block_tokens / work.context_tokens
    return min(by_time, workers * min(by_memory, float(question.rules.decode.max_running)))
