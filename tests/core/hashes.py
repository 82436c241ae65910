"""Prints where the core comes from and the hash of each of several simulations: for test_compiled.py."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from random import Random

from headrace_core.perf.costs import StepCosts
from headrace_core.policy.admission import Admission, Bound
from headrace_core.policy.chunking import Batching
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.policy.dispatch import Dispatching
from headrace_core.policy.prefill_order import Order
from headrace_core.sim import cluster
from headrace_core.sim.scenario import (
    Action,
    Colocation,
    DecodeRules,
    Duty,
    Elasticity,
    Instance,
    Lever,
    Network,
    Pool,
    Prediction,
    PrefillRules,
    Scenario,
    Slo,
    WorkerReport,
)
from headrace_core.sim.workload import Workload

COSTS = StepCosts(
    prefill_base_ms=8.0,
    prefill_token_ms=0.08,
    prefill_square_ms=2e-6,
    decode_base_ms=12.0,
    decode_kv_token_ms=5e-5,
    decode_request_ms=0.05,
    large_decode_base_ms=14.0,
    large_decode_kv_token_ms=4e-5,
    large_decode_request_ms=0.04,
    large_decode_from=24,
    stages=2,
    hop_ms=0.5,
    scheduler_ms=2.0,
    scheduler_token_ms=1e-4,
)
SLOS = (Slo(ttft_ms=2000.0, tpot_ms=100.0), Slo(ttft_ms=500.0, tpot_ms=50.0, name="fast"))
NETWORK = Network(kv_bytes_per_token=800_000.0, bytes_per_ms=25e6, latency_ms=0.3)


class OneFlip:
    """Turns the first prefill worker into a decode worker at the third question, and adds a worker at the fifth."""

    def __init__(self) -> None:
        self._asked = 0

    def decide(self, now_ms: float, reports: Sequence[WorkerReport]) -> Sequence[Action]:
        """A fixed plan."""
        self._asked += 1
        first = next((one.worker for one in reports if one.duty is Duty.PREFILL and one.accepting), None)
        if first is None or self._asked not in {3, 5}:
            return ()
        return (Action(Lever.FLIP if self._asked == 3 else Lever.START, first),)


def pools(prefill: int, decode: int, kv_blocks: int = 4000) -> tuple[Pool, ...]:
    """A prefill and a decode pool."""
    instance = Instance(costs=COSTS, kv_blocks=kv_blocks)
    return (
        Pool(name="prefill", duty=Duty.PREFILL, instance=instance, workers=prefill),
        Pool(name="decode", duty=Duty.DECODE, instance=instance, workers=decode),
    )


def colocated(workers: int) -> tuple[Pool, ...]:
    """One pool that does both."""
    return (Pool(name="both", duty=Duty.COLOCATED, instance=Instance(costs=COSTS, kv_blocks=2000), workers=workers),)


SCENARIOS = {
    "one of each": (Scenario(pools=pools(1, 1), slos=SLOS), 4.0),
    "all policies": (
        Scenario(
            pools=pools(4, 4),
            slos=SLOS,
            network=NETWORK,
            prefill=PrefillRules(order=Order.SJF),
            prediction=Prediction(accuracy=0.75),
            deflection=DeflectionSettings(),
            prefix_cache_tokens=200_000,
            seed=3,
        ),
        22.0,
    ),
    "preemptions": (
        Scenario(pools=pools(2, 1, kv_blocks=600), slos=SLOS, decode=DecodeRules(admission=Admission.GREEDY)),
        6.0,
    ),
    "whole prompts and the paper's ratio": (
        Scenario(
            pools=pools(2, 3),
            slos=SLOS,
            network=NETWORK,
            prefill=PrefillRules(order=Order.LJF, batching=Batching.LM_BATCH),
            decode=DecodeRules(admission=Admission.RESERVE_STATIC, bound=Bound.LOWER, max_batch_tokens=20_000),
            dispatching=Dispatching.PAPER_RATIO,
        ),
        9.0,
    ),
    "flips and starts": (
        Scenario(
            pools=pools(3, 2),
            slos=SLOS,
            elasticity=Elasticity(policy=OneFlip(), interval_ms=10_000.0, start_ms=20_000.0),
        ),
        9.0,
    ),
    "colocated": (Scenario(pools=colocated(2), slos=SLOS, colocation=Colocation.PREFILL_FIRST), 5.0),
    "colocated, mixed": (Scenario(pools=colocated(2), slos=SLOS), 5.0),
}


def workload(rate_s: float, requests: int = 1500) -> Workload:
    """Poisson arrivals with two classes and a few shared prefixes."""
    source = Random(rate_s)
    arrivals, now_ms = [], 0.0
    for _ in range(requests):
        now_ms += source.expovariate(rate_s) * 1000
        arrivals.append(now_ms)
    return Workload(
        arrival_ms=arrivals,
        prompt_tokens=[512 + source.randrange(2500) for _ in range(requests)],
        output_tokens=[source.choice((1, 60, source.randrange(1, 500))) for _ in range(requests)],
        slo_class=[source.randrange(2) for _ in range(requests)],
        prefix=[(source.randrange(8),) for _ in range(requests)],
        prefix_block_tokens=512,
        source="test",
    )


if __name__ == "__main__":
    print("core:", cluster.__file__)
    for name, (scenario, rate_s) in SCENARIOS.items():
        outcome = cluster.simulate(scenario, workload(rate_s))
        # repr() of a float gives its last bit
        columns = [repr(getattr(outcome, field.name)) for field in dataclasses.fields(outcome)]
        digest = hashlib.sha256("".join(columns).encode()).hexdigest()
        counts = sum(outcome.preemptions), sum(outcome.deflected), len(outcome.role_changes)
        print(f"{name}: {digest}, {counts[0]} preemptions, {counts[1]} deflected, {counts[2]} role changes")
