"""Scenarios and workloads for the simulator's tests: one line says what differs from the plain case."""

from __future__ import annotations

import random
from typing import Any

from headrace_core.perf.costs import StepCosts
from headrace_core.policy.chunking import Batching
from headrace_core.sim.scenario import DecodeRules, Duty, Instance, Network, Pool, PrefillRules, Scenario, Slo
from headrace_core.sim.workload import Workload

COSTS = StepCosts(
    prefill_base_ms=18.1,
    prefill_token_ms=0.102,
    prefill_square_ms=7.1e-6,
    decode_base_ms=19.9,
    decode_kv_token_ms=0.00063,
    decode_request_ms=0.0385,
    large_decode_base_ms=7.2,
    large_decode_kv_token_ms=0.00058,
    large_decode_request_ms=0.158,
    large_decode_from=95,
    hop_ms=1.0,
    scheduler_ms=2.0,
    scheduler_token_ms=1e-4,
)
SLO = Slo(ttft_ms=250.0, tpot_ms=100.0)
NETWORK = Network(kv_bytes_per_token=819_200.0, bytes_per_ms=25e6, latency_ms=0.05)
WHOLE = PrefillRules(batching=Batching.WHOLE_QUEUE, limit_tokens=4096)


def pool(duty: Duty, workers: int = 1, *, costs: StepCosts = COSTS, kv_blocks: int = 4000, **instance: Any) -> Pool:
    return Pool(
        name=duty.lower(),
        duty=duty,
        instance=Instance(costs=costs, kv_blocks=kv_blocks, **instance),
        workers=workers,
    )


def cluster(
    prefill_workers: int = 1,
    decode_workers: int = 1,
    *,
    kv_blocks: int = 4000,
    rules: DecodeRules | None = None,
    **changes: Any,
) -> Scenario:
    """So many workers of each duty; `rules` are those of the decode workers."""
    pools = (
        pool(Duty.PREFILL, prefill_workers, kv_blocks=1 << 40),
        pool(Duty.DECODE, decode_workers, kv_blocks=kv_blocks),
    )
    fields: dict[str, Any] = {"pools": pools, "slos": (SLO,), "network": NETWORK, "prefill": WHOLE}
    return Scenario(**fields | {"decode": rules or DecodeRules()} | changes)


def traffic(
    count: int, rate_per_s: float, *, seed: int = 1, prompts: range = range(1, 800), outputs: range = range(1, 500)
) -> Workload:
    rng = random.Random(seed)
    arrivals, now_ms = [], 0.0
    for _ in range(count):
        arrivals.append(now_ms)
        now_ms += rng.expovariate(rate_per_s) * 1000.0
    return Workload(
        arrival_ms=arrivals,
        prompt_tokens=[rng.choice(prompts) for _ in range(count)],
        output_tokens=[rng.choice(outputs) for _ in range(count)],
        slo_class=[],
        prefix=[],
        prefix_block_tokens=0,
        source="test",
    )
