"""What holds for every run: each request ends once, no time runs backwards, no worker holds more KV than it has."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_core.policy.admission import Admission, Bound
from headrace_core.policy.chunking import Batching
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.policy.dispatch import Dispatching
from headrace_core.policy.prefill_order import Order
from headrace_core.sim.cluster import simulate
from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.scenario import (
    Colocation,
    DecodeRules,
    Duty,
    Network,
    Prediction,
    PrefillRules,
    Scenario,
)
from headrace_core.sim.workload import Workload
from tests.core.sim.builders import COSTS, SLO, cluster, pool, traffic

THOROUGH = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any rules, any sizes, memory from scarce to plenty."""
    costs = dataclasses.replace(COSTS, stages=draw(st.sampled_from([1, 1, 2, 3])))
    blocks = draw(st.sampled_from([40, 90, 200, 4000]))
    if draw(st.booleans()):
        pools = (
            pool(Duty.PREFILL, draw(st.integers(1, 3)), costs=costs, kv_blocks=blocks * 2),
            pool(Duty.DECODE, draw(st.integers(1, 3)), costs=costs, kv_blocks=blocks),
        )
        deflection = draw(st.sampled_from([None, DeflectionSettings(), DeflectionSettings(alpha=3.0)]))
    else:
        pools = (pool(Duty.COLOCATED, draw(st.integers(1, 3)), costs=costs, kv_blocks=blocks),)
        deflection = None
    slow = Network(kv_bytes_per_token=819_200.0, bytes_per_ms=draw(st.sampled_from([2e5, 25e6])), latency_ms=0.1)
    return Scenario(
        pools=pools,
        slos=(SLO,),
        network=draw(st.sampled_from([None, slow])),
        prefill=PrefillRules(
            order=draw(st.sampled_from(list(Order))),
            sched_batch=draw(st.sampled_from([1, 4, 16])),
            batching=draw(st.sampled_from(list(Batching))),
            limit_tokens=draw(st.sampled_from([64, 512, 4096])),
        ),
        decode=DecodeRules(
            admission=draw(st.sampled_from(list(Admission))),
            bound=draw(st.sampled_from(list(Bound))),
            max_running=draw(st.sampled_from([1, 8, 256])),
            token_budget=draw(st.sampled_from([300, 2048])),
        ),
        colocation=draw(st.sampled_from(list(Colocation))),
        dispatching=draw(st.sampled_from(list(Dispatching))),
        prediction=Prediction(accuracy=draw(st.sampled_from([0.0, 0.7, 1.0])), granularity=100),
        deflection=deflection,
        report_interval_ms=draw(st.sampled_from([100.0, 1000.0])),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return traffic(
        draw(st.integers(1, 80)),
        draw(st.sampled_from([0.5, 5.0, 50.0])),
        seed=draw(st.integers(0, 99)),
        prompts=range(1, draw(st.sampled_from([10, 700]))),
        outputs=range(1, draw(st.sampled_from([3, 300]))),
    )


@THOROUGH
@given(scenarios(), workloads())
def test_every_run(scenario: Scenario, workload: Workload) -> None:
    outcome = simulate(scenario, workload)
    assert_times_run_forwards(scenario, outcome)
    assert_memory_holds(outcome)
    assert_littles_law(outcome)


def assert_times_run_forwards(scenario: Scenario, outcome: Outcome) -> None:
    for number, status in enumerate(outcome.status):
        assert status in (Status.FINISHED, Status.REJECTED)
        times = [
            outcome.arrival_ms[number],
            outcome.prefill_start_ms[number],
            outcome.first_token_ms[number],
            outcome.second_token_ms[number],
            outcome.last_token_ms[number],
        ]
        happened = [time for time in times if not math.isnan(time)]
        assert happened == sorted(happened)
        if status == Status.FINISHED:
            assert not math.isnan(outcome.first_token_ms[number])
            assert outcome.last_token_ms[number] <= outcome.end_ms
            span_ms = outcome.last_token_ms[number] - outcome.first_token_ms[number]
            assert outcome.largest_gap_ms[number] <= span_ms + 1e-6
            tokens = outcome.output_tokens[number]
            assert outcome.largest_gap_ms[number] * (tokens - 1) >= span_ms - 1e-6
            moved = not math.isnan(outcome.transferred_ms[number])
            if moved:
                assert outcome.admitted_ms[number] <= outcome.transferred_ms[number] <= outcome.second_token_ms[number]
            assert moved == (
                scenario.pools[0].duty is not Duty.COLOCATED and tokens > 1 and not outcome.deflected[number]
            )
        else:
            assert math.isnan(outcome.last_token_ms[number])


def assert_memory_holds(outcome: Outcome) -> None:
    for worker in outcome.workers:
        assert 0 <= worker.peak_blocks <= worker.kv_blocks
        assert -1e-6 <= worker.block_ms <= worker.kv_blocks * outcome.end_ms + 1e-6
        assert -1e-6 <= worker.busy_ms <= outcome.end_ms + 1e-6


def assert_littles_law(outcome: Outcome) -> None:
    """Requests in the system, integrated over time, are their times in the system, summed up."""
    done = [n for n, status in enumerate(outcome.status) if status == Status.FINISHED]
    events = sorted(
        [(outcome.arrival_ms[n], 1) for n in done] + [(outcome.last_token_ms[n], -1) for n in done],
    )
    integral, present, before = 0.0, 0, 0.0
    for at, change in events:
        integral += present * (at - before)
        present, before = present + change, at
    assert present == 0
    sojourns = sum(outcome.last_token_ms[n] - outcome.arrival_ms[n] for n in done)
    assert integral == pytest.approx(sojourns, rel=1e-9, abs=1e-6)


@THOROUGH
@given(scenarios(), workloads())
def test_the_same_again(scenario: Scenario, workload: Workload) -> None:
    assert repr(simulate(scenario, workload)) == repr(simulate(scenario, workload))


# --- what must not change -------------------------------------------------------------------------------------------


def columns(outcome: Outcome) -> str:
    return repr([outcome.first_token_ms, outcome.second_token_ms, outcome.last_token_ms, outcome.status])


def test_the_seed_changes_nothing_where_nothing_is_drawn() -> None:
    """One decode worker leaves no choice, and right predictions draw nothing."""
    workload = traffic(200, 5.0)
    assert columns(simulate(cluster(seed=1), workload)) == columns(simulate(cluster(seed=2), workload))


def test_the_seed_changes_who_is_drawn() -> None:
    workload = traffic(200, 20.0)
    one, other = (simulate(cluster(1, 4, seed=seed), workload) for seed in (1, 2))
    assert one.decode_worker != other.decode_worker


def test_requests_that_arrive_at_once_in_another_order_end_at_the_same_times() -> None:
    """FCFS, and equal lengths: who is first does not change when one is served."""
    count = 40
    times = [1000.0 * (number // 8) for number in range(count)]
    workload = Workload(times, [200] * count, [60] * count, [], [], 0, "groups of eight")
    mixed = [number // 8 * 8 + 7 - number % 8 for number in range(count)]
    other = dataclasses.replace(workload, arrival_ms=[times[n] for n in mixed])
    ends, mixed_ends = (sorted(simulate(cluster(), one).last_token_ms) for one in (workload, other))
    assert ends == mixed_ends


# --- more of something is not worse ---------------------------------------------------------------------------------


def met(outcome: Outcome, ttft_ms: float, tpot_ms: float) -> int:
    """Requests within the SLO."""
    return sum(
        status == Status.FINISHED
        and first - arrival <= ttft_ms
        and (tokens == 1 or (last - first) / (tokens - 1) <= tpot_ms)
        for status, arrival, first, last, tokens in zip(
            outcome.status,
            outcome.arrival_ms,
            outcome.first_token_ms,
            outcome.last_token_ms,
            outcome.output_tokens,
            strict=True,
        )
    )


@pytest.mark.parametrize("rate", [3.0, 8.0, 16.0])
def test_goodput_does_not_fall_with_more_workers(rate: float) -> None:
    workload = traffic(1500, rate)
    counts = [
        met(simulate(cluster(n, n, dispatching=Dispatching.LEAST_LOADED), workload), 250.0, 40.0) for n in (1, 2, 4)
    ]
    for fewer, more in itertools.pairwise(counts):
        assert more >= fewer - 0.02 * len(workload)
    assert counts[-1] > counts[0] or counts[0] > 0.98 * len(workload)


def test_with_fcfs_a_faster_link_makes_no_transfer_later() -> None:
    """One link, in order: exact, request by request. What decode makes of an earlier start is another matter."""
    workload = traffic(600, 6.0, outputs=range(2, 4))
    runs = []
    for speed in (4e5, 8e5, 25e6):
        network = Network(kv_bytes_per_token=819_200.0, bytes_per_ms=speed)
        runs.append(simulate(cluster(network=network, rules=DecodeRules(admission=Admission.GREEDY)), workload))
    for slower, faster in itertools.pairwise(runs):
        assert all(b <= a + 1e-6 for a, b in zip(slower.transferred_ms, faster.transferred_ms, strict=True))
    assert runs[0].transferred_ms != runs[1].transferred_ms


def test_with_fcfs_a_second_prefill_worker_makes_no_first_token_later() -> None:
    """One prompt a pass, and equal prompts: the pool is a queue with two servers instead of one."""
    count = 500
    base = traffic(count, 12.0)
    workload = dataclasses.replace(base, prompt_tokens=[300] * count, output_tokens=[1] * count)
    rules = PrefillRules(batching=Batching.LM_BATCH, limit_tokens=1)
    one, two = (simulate(with_prefill(workers, rules), workload) for workers in (1, 2))
    assert all(b <= a + 1e-6 for a, b in zip(one.first_token_ms, two.first_token_ms, strict=True))


def with_prefill(workers: int, rules: PrefillRules) -> Scenario:
    plain = cluster()
    pools = (pool(Duty.PREFILL, workers, kv_blocks=1 << 40), plain.pools[1])
    return dataclasses.replace(plain, pools=pools, prefill=rules, report_interval_ms=0.5)
