"""Prints how long requests wait, on average and in ms, for one prefill worker of constant speed: load and count follow.

python -m tests.core.sim.queueing COUNT LOAD [LOAD ...]
"""

from __future__ import annotations

import dataclasses
import math
import sys

from headrace_core.perf.costs import StepCosts
from headrace_core.policy.chunking import Batching
from headrace_core.sim.cluster import simulate
from headrace_core.sim.scenario import Duty, PrefillRules
from tests.core.sim.builders import cluster, pool, traffic

SERVICE_MS = 10.0
COSTS = StepCosts(
    prefill_base_ms=SERVICE_MS,
    prefill_token_ms=0.0,
    prefill_square_ms=0.0,
    decode_base_ms=1.0,
    decode_kv_token_ms=0.0,
    decode_request_ms=0.0,
    large_decode_base_ms=1.0,
    large_decode_kv_token_ms=0.0,
    large_decode_request_ms=0.0,
)
"""Each pass takes 10 ms, whatever is in it."""


def mean_wait_ms(count: int, load: float) -> float:
    """One prompt a pass, Poisson arrivals."""
    drawn = traffic(count, load * 1000.0 / SERVICE_MS, seed=5, prompts=range(1, 2), outputs=range(1, 2))
    pools = (pool(Duty.PREFILL, costs=COSTS, kv_blocks=1 << 40), pool(Duty.DECODE, costs=COSTS))
    rules = PrefillRules(batching=Batching.LM_BATCH, limit_tokens=1)
    scenario = dataclasses.replace(cluster(), pools=pools, prefill=rules, report_interval_ms=math.inf)
    outcome = simulate(scenario, drawn)
    return math.fsum(outcome.prefill_start_ms) / count - math.fsum(outcome.arrival_ms) / count


if __name__ == "__main__":
    for load in sys.argv[2:]:
        print(mean_wait_ms(int(sys.argv[1]), float(load)))
