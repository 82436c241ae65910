"""The analytic caps: by hand, and never passed by the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.planner.caps import (
    Resource,
    alone_ttft_ms,
    colocated_caps,
    decode_caps,
    floor_ttft_ms,
    lowest,
    prefill_cap,
    transfer_cap,
    work_of,
)
from headrace_core.policy.chunking import Batching
from headrace_core.sim.cluster import simulate
from headrace_core.sim.lengths import Lengths, fixed
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
from headrace_core.sim.traffic import Traffic, draw_traffic
from tests.core.planner.builders import costs, instance

FREE = Instance(costs=replace(costs(), prefill_base_ms=0.0, prefill_token_ms=0.0), kv_blocks=1 << 40, gpus=0)


def test_the_work_of_a_request_by_hand() -> None:
    """Answers of 3: two decode steps, which read 10 + 2 and 10 + 3 tokens."""
    work = work_of(Lengths([10, 10], [3, 1], "two"), PrefillRules(limit_tokens=100))
    assert (work.prompt_tokens, work.decode_tokens, work.context_tokens) == (10.0, 1.0, 12.5)
    assert (work.decoding_share, work.prompt_squares, work.passes) == (0.5, 100.0, 0.1)


@pytest.mark.parametrize(
    ("rules", "changes", "request_ms"),
    [
        # a chunk of 1,000 carries 2.5 prompts of 400, and its 10 ms are shared among them
        (PrefillRules(limit_tokens=1000), {}, 40 + 10 * 0.4),
        # a prompt over L_m runs alone
        (PrefillRules(batching=Batching.LM_BATCH, limit_tokens=300), {}, 40 + 10),
        (PrefillRules(batching=Batching.LM_BATCH, limit_tokens=800), {}, 40 + 10 * 0.5),
        (PrefillRules(limit_tokens=400), {"prefill_square_ms": 1e-4}, 40 + 16 + 10),
        # four stages let a pass in every quarter of its time, but the scheduler is paid whole
        (PrefillRules(limit_tokens=400), {"stages": 4, "scheduler_ms": 2.0}, 50 / 4 + 2),
    ],
    ids=["chunked", "alone", "pair", "square", "stages"],
)
def test_the_prefill_cap_by_hand(rules: PrefillRules, changes: dict[str, float], request_ms: float) -> None:
    cap = prefill_cap(instance(**changes), work_of(fixed(400, 101), rules))
    assert cap.rate_per_s == pytest.approx(1000 / request_ms)


def test_the_decode_caps_by_hand() -> None:
    """Steps of 10 + 0.1 n ms, 100 steps a request, a mean context of 451.5."""
    work = work_of(fixed(400, 101), PrefillRules())
    one = instance(kv_blocks=1000)
    found = {cap.resource: cap.rate_per_s for cap in decode_caps(one, DecodeRules(max_running=60), work, 15.0, 0.9)}
    assert work.context_tokens == 451.5
    batch = 16_000 / 451.5
    assert found[Resource.DECODE_KV] == pytest.approx(batch / (10 + 0.1 * batch) / 100 * 1000)
    assert found[Resource.DECODE_SLOTS] == pytest.approx(60 / 16 / 100 * 1000)
    assert found[Resource.DECODE_STEP] == pytest.approx(50 / 15 / 100 * 1000)  # 10 + 0.1 * 50 = 15 ms


@pytest.mark.parametrize(
    ("tpot_ms", "target", "lengths", "binds"),
    [
        (15.0, 0.9, fixed(400, 101), True),
        (15.0, 0.4, fixed(400, 101), False),  # fewer than half have to be in time
        (15.0, 0.9, Lengths([400] * 20, [1] * 19 + [101], "x"), False),  # those without a TPOT suffice
        (10.05, 0.9, fixed(400, 101), True),
    ],
    ids=["binds", "low target", "no TPOT", "under one step"],
)
def test_when_the_tpot_binds(tpot_ms: float, target: float, lengths: Lengths, binds: bool) -> None:
    caps = decode_caps(instance(), DecodeRules(), work_of(lengths, PrefillRules()), tpot_ms, target)
    step = next(cap for cap in caps if cap.resource is Resource.DECODE_STEP)
    slots = next(cap for cap in caps if cap.resource is Resource.DECODE_SLOTS)
    assert (step.rate_per_s < slots.rate_per_s) is binds
    assert (step.rate_per_s == 0) is (tpot_ms < 10.1)


def test_lanes_of_a_pipeline_run_side_by_side() -> None:
    work = work_of(fixed(400, 101), PrefillRules())
    single = lowest(decode_caps(instance(), DecodeRules(max_running=50), work, math.inf, 0.9))
    piped = lowest(decode_caps(instance(stages=2), DecodeRules(max_running=100), work, math.inf, 0.9))
    assert piped.rate_per_s == pytest.approx(2 * single.rate_per_s)


def test_the_transfer_cap_by_hand() -> None:
    work = work_of(Lengths([100, 100], [1, 9], "half of them move"), PrefillRules())
    network = Network(kv_bytes_per_token=1e6, bytes_per_ms=1e7, latency_ms=2.0)
    assert transfer_cap(network, work).rate_per_s == pytest.approx(1000 / (0.5 * 12))
    assert transfer_cap(None, work).rate_per_s == math.inf


def test_a_prompt_alone_by_hand() -> None:
    """Chunks follow one another by a stage, the last goes through all."""
    piped = costs(stages=2)
    assert alone_ttft_ms(piped, PrefillRules(limit_tokens=100), 250) == pytest.approx(2 * 20 / 2 + 15)
    assert alone_ttft_ms(piped, PrefillRules(batching=Batching.LM_BATCH, limit_tokens=100), 250) == 35.0
    lengths = Lengths([100] * 9 + [1000], [2] * 10, "one long")
    assert floor_ttft_ms(costs(), PrefillRules(limit_tokens=4096), lengths, 0.9) == 20.0
    assert floor_ttft_ms(costs(), PrefillRules(limit_tokens=4096), lengths, 0.95) == 110.0


@settings(max_examples=25, deadline=None)
@given(
    kv_blocks=st.integers(120, 2000),
    max_running=st.integers(1, 64),
    kv_token_ms=st.floats(0, 2e-3),
    request_ms=st.floats(0, 0.5),
    output=st.integers(2, 120),
)
def test_a_decode_worker_never_beats_its_cap(
    kv_blocks: int, max_running: int, kv_token_ms: float, request_ms: float, output: int
) -> None:
    """Flooded with requests it finishes no more than the cap says, whatever limits it."""
    lengths = Lengths([200, 400, 900], [output, 1 + output // 2, 2 * output], "three")
    one = instance(kv_blocks=kv_blocks, decode_kv_token_ms=kv_token_ms, decode_request_ms=request_ms)
    rules = DecodeRules(max_running=max_running)
    cap = lowest(decode_caps(one, rules, work_of(lengths, PrefillRules()), math.inf, 0.9))
    scenario = Scenario(
        pools=(pool(Duty.PREFILL, FREE), pool(Duty.DECODE, one)), slos=(SLO,), decode=rules, report_interval_ms=math.inf
    )
    assert throughput_per_s(scenario, lengths) <= cap.rate_per_s * 1.001


@settings(max_examples=15, deadline=None)
@given(limit=st.integers(50, 3000), stages=st.sampled_from([1, 2, 4]), square=st.floats(0, 1e-4))
@pytest.mark.parametrize("batching", list(Batching))
def test_a_prefill_worker_never_beats_its_cap(batching: Batching, limit: int, stages: int, square: float) -> None:
    lengths = Lengths([30, 400, 900], [1, 1, 1], "three")
    rules = PrefillRules(batching=batching, limit_tokens=limit)
    one = instance(stages=stages, prefill_square_ms=square, kv_blocks=1 << 30)
    cap = prefill_cap(one, work_of(lengths, rules))
    scenario = Scenario(
        pools=(pool(Duty.PREFILL, one), pool(Duty.DECODE, FREE)),
        slos=(SLO,),
        prefill=rules,
        report_interval_ms=math.inf,
    )
    # The last pass has to go through all stages, with nothing behind it.
    assert throughput_per_s(scenario, lengths) <= cap.rate_per_s * 1.001


@settings(max_examples=15, deadline=None)
@given(max_running=st.integers(1, 64), budget=st.integers(128, 2048))
@pytest.mark.parametrize("colocation", list(Colocation))
def test_a_colocated_worker_never_beats_its_cap(colocation: Colocation, max_running: int, budget: int) -> None:
    lengths = Lengths([200, 400, 900], [40, 20, 80], "three")
    rules = DecodeRules(max_running=max_running, token_budget=budget)
    prefill = PrefillRules()
    caps = colocated_caps(
        instance(),
        rules,
        work_of(lengths, prefill),
        tpot_ms=math.inf,
        target=0.9,
        mixed=colocation is Colocation.MIXED,
    )
    scenario = Scenario(
        pools=(pool(Duty.COLOCATED, instance()),),
        slos=(SLO,),
        prefill=prefill,
        decode=rules,
        colocation=colocation,
        report_interval_ms=math.inf,
    )
    assert throughput_per_s(scenario, lengths) <= lowest(caps).rate_per_s * 1.001


SLO = Slo(ttft_ms=math.inf, tpot_ms=math.inf)


def pool(duty: Duty, one: Instance) -> Pool:
    return Pool(name=duty.value, duty=duty, instance=one, workers=1)


def throughput_per_s(scenario: Scenario, lengths: Lengths) -> float:
    workload = draw_traffic(Traffic(lengths=lengths), 150, 1e5, 1)
    outcome = simulate(scenario, workload)
    assert set(outcome.status) == {1}
    return len(workload) * 1000.0 / outcome.end_ms
