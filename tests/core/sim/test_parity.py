"""What DistServe's simulator gave, run beside ours by `bench/core/parity.py`: ours still gives the same.

The figures are those of simdistserve (github.com/LLMServe/DistServe, Apache-2.0) for one prefill and one decode
instance of OPT-13B on A100-80G, 600 requests with ShareGPT's lengths.
"""

from __future__ import annotations

import math

import pytest

from bench.core.parity import CASES, LENGTHS, LIMIT_POINTS, traffic_at, within_context
from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.hf_config import known
from headrace_core.perf.model import Placement
from headrace_core.perf.profiles import measured_kv_tokens, profile_for
from headrace_core.sim.attainment import judge
from headrace_core.sim.baselines import as_distserve_simulates
from headrace_core.sim.cluster import simulate
from headrace_core.sim.scenario import Instance
from headrace_core.sim.traces import read_lengths

COUNT = 600
THEIRS = {
    # requests a second: mean TTFT and TPOT in ms, requests within the SLO of each
    1.0: (90.87326903743356, 31.492106688960963, 583, 600),
    2.0: (102.29604843414803, 54.06069325674936, 551, 600),
    3.0: (103.60962040815498, 116.11372122639267, 550, 204),
}


@pytest.mark.parametrize("rate", THEIRS)
def test_the_same_as_distserve_s_simulator(rate: float) -> None:
    case = CASES[0]
    placement = Placement(shape=known(case.model), accelerator=accelerator("A100-80G"), tensor=case.tensor)
    instance = Instance(costs=profile_for(placement, engine="DistServe").costs, kv_blocks=1)
    most = measured_kv_tokens(case.model, case.tensor, 1)
    assert most is not None
    scenario = as_distserve_simulates(instance, instance, (case.slo,), most_prefill_tokens=most)
    verdicts = judge(scenario, simulate(scenario, traffic_at(within_context(read_lengths(LENGTHS)), COUNT, rate)))
    ttft_ms, tpot_ms, ttft_met, tpot_met = THEIRS[rate]
    assert math.fsum(verdicts.ttft_ms) / COUNT == pytest.approx(ttft_ms, abs=1e-9)
    # Above 50,000 tokens of context residents take turns, in an order that is theirs by accident.
    assert math.fsum(verdicts.tpot_ms) / COUNT == pytest.approx(tpot_ms, abs=1e-9 if rate == 1.0 else 0.05 * tpot_ms)
    for met, theirs in ((verdicts.ttft_met, ttft_met), (verdicts.tpot_met, tpot_met)):
        assert abs(sum(met) - theirs) <= LIMIT_POINTS / 100 * COUNT
