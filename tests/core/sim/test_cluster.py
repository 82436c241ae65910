"""Single mechanisms of the simulator, on cases small enough to reckon by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest

from headrace_core.perf.costs import NEVER_LARGE, StepCosts
from headrace_core.policy.admission import Admission, Bound
from headrace_core.policy.chunking import Batching
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.policy.dispatch import Dispatching
from headrace_core.policy.prefill_order import Order
from headrace_core.sim.baselines import sarathi_like, vllm_like
from headrace_core.sim.cluster import simulate
from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.prediction import Predictor
from headrace_core.sim.request import SimRequest
from headrace_core.sim.scenario import (
    Action,
    DecodeRules,
    Duty,
    Elasticity,
    Lever,
    Network,
    Prediction,
    PrefillRules,
    Scenario,
    ScenarioError,
    Slo,
    WorkerReport,
)
from headrace_core.sim.workload import Workload
from tests.core.sim.builders import NETWORK, cluster, pool, traffic

PLAIN = StepCosts(
    prefill_base_ms=10.0,
    prefill_token_ms=0.1,
    prefill_square_ms=0.0,
    decode_base_ms=5.0,
    decode_kv_token_ms=0.0,
    decode_request_ms=1.0,
    large_decode_base_ms=0.0,
    large_decode_kv_token_ms=0.0,
    large_decode_request_ms=0.0,
    large_decode_from=NEVER_LARGE,
)
"""A prompt of 100 tokens takes 20 ms, a step of n requests 5 + n ms."""


def plain(
    prefill_workers: int = 1, decode_workers: int = 1, *, costs: StepCosts = PLAIN, **changes: object
) -> Scenario:
    pools = (
        pool(Duty.PREFILL, prefill_workers, costs=costs, kv_blocks=1 << 30),
        pool(Duty.DECODE, decode_workers, costs=PLAIN),
    )
    return cluster(**{"pools": pools, "network": None} | changes)  # type: ignore[arg-type]


def requests(*rows: tuple[float, int, int], prefix: Sequence[tuple[int, ...]] = (), block: int = 0) -> Workload:
    """Rows of arrival in ms, prompt and output tokens."""
    arrivals, prompts, outputs = (list(column) for column in zip(*rows, strict=True))
    return Workload(arrivals, prompts, outputs, [], list(prefix), block, "by hand")  # type: ignore[arg-type]


def test_one_request() -> None:
    outcome = simulate(plain(), requests((0.0, 100, 3)))
    assert outcome.first_token_ms == [20.0]
    assert outcome.second_token_ms == [26.0]
    assert outcome.last_token_ms == [32.0]
    assert outcome.largest_gap_ms == [6.0]


def test_a_request_joins_at_the_next_boundary() -> None:
    """The second one's prompt is done at 43, in the middle of a step that began at 38 and ends at 44."""
    outcome = simulate(plain(), requests((0.0, 100, 30), (23.0, 100, 2)))
    assert outcome.first_token_ms[1] == 43.0
    assert outcome.second_token_ms[1] == 44.0 + 7.0
    assert outcome.largest_gap_ms == [7.0, 8.0]


# --- prefill ----------------------------------------------------------------------------------------------------------


def prefill_ends(rules: PrefillRules, *prompts: int, costs: StepCosts = PLAIN) -> list[float]:
    """First tokens of requests that all come at the start."""
    workload = requests(*((0.0, prompt, 1) for prompt in prompts))
    return simulate(plain(costs=costs, prefill=rules), workload).first_token_ms


PREFILL_CASES = {
    # a pass of 150 tokens takes 25 ms: the first prompt and half of the second, then the rest
    "chunks": (PrefillRules(limit_tokens=150), [25.0, 40.0]),
    "whole queue": (PrefillRules(batching=Batching.WHOLE_QUEUE, limit_tokens=1000), [30.0, 30.0]),
    "one at a time": (PrefillRules(batching=Batching.LM_BATCH, limit_tokens=100), [20.0, 40.0]),
}


@pytest.mark.parametrize("case", PREFILL_CASES)
def test_batching(case: str) -> None:
    rules, expected = PREFILL_CASES[case]
    assert prefill_ends(rules, 100, 100) == pytest.approx(expected)


def test_shortest_first_inside_a_batch() -> None:
    rules = PrefillRules(order=Order.SJF, batching=Batching.LM_BATCH, limit_tokens=1, sched_batch=2)
    assert prefill_ends(rules, 300, 100, 50) == pytest.approx([60.0, 20.0, 75.0])


def test_passes_overlap_in_a_pipeline() -> None:
    """Two stages of 10 ms each: a pass enters every 10 ms and takes 20."""
    costs = dataclasses.replace(PLAIN, stages=2)
    rules = PrefillRules(batching=Batching.LM_BATCH, limit_tokens=1)
    assert prefill_ends(rules, 100, 100, 100, costs=costs) == pytest.approx([20.0, 30.0, 40.0])


def test_a_slow_pass_holds_up_the_one_behind_it() -> None:
    """Stages of 20 ms, then 5: the second waits for each stage that the first is in."""
    costs = dataclasses.replace(PLAIN, stages=2)
    rules = PrefillRules(batching=Batching.LM_BATCH, limit_tokens=1)
    assert prefill_ends(rules, 300, 0 + 1, costs=costs) == pytest.approx([40.0, 40.0 + 5.05])


def test_a_prompt_waits_for_the_kv_memory_of_those_before_it() -> None:
    """Memory for one prompt: the second pass waits until the first one's KV was fetched, 100 ms later."""
    pools = (pool(Duty.PREFILL, costs=PLAIN, kv_blocks=7), pool(Duty.DECODE, costs=PLAIN))
    network = Network(kv_bytes_per_token=1.0, bytes_per_ms=1.0)
    rules = PrefillRules(batching=Batching.LM_BATCH, limit_tokens=1)
    outcome = simulate(plain(pools=pools, network=network, prefill=rules), requests((0.0, 100, 2), (0.0, 100, 2)))
    assert outcome.transferred_ms[0] == 120.0
    assert outcome.prefill_start_ms == [0.0, 120.0]
    assert outcome.workers[0].peak_blocks == 7


def test_a_prompt_that_no_memory_holds_is_rejected() -> None:
    pools = (pool(Duty.PREFILL, costs=PLAIN, kv_blocks=6), pool(Duty.DECODE, costs=PLAIN))
    outcome = simulate(plain(pools=pools), requests((0.0, 100, 2), (0.0, 96, 2)))
    assert outcome.status == [Status.REJECTED, Status.FINISHED]


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_known_prefix_is_not_computed_again() -> None:
    workload = requests((0.0, 100, 1), (1000.0, 100, 1), prefix=[(1, 2, 3), (1, 2, 4)], block=30)
    outcome = simulate(plain(prefix_cache_tokens=300), workload)
    assert outcome.cached_tokens == [0, 60]
    assert outcome.first_token_ms[1] - 1000.0 == pytest.approx(10.0 + 4.0)


def test_the_cache_forgets_the_least_recently_used() -> None:
    prefix = [(1,), (2,), (1,), (3,), (2,), (1,)]
    workload = requests(*((1000.0 * n, 100, 1) for n in range(6)), prefix=prefix, block=30)
    outcome = simulate(plain(prefix_cache_tokens=60), workload)
    assert outcome.cached_tokens == [0, 0, 30, 0, 0, 0]


def test_a_prompt_that_is_all_known_still_computes_a_token() -> None:
    workload = requests((0.0, 60, 1), (1000.0, 60, 1), prefix=[(1, 2), (1, 2)], block=30)
    assert simulate(plain(prefix_cache_tokens=300), workload).cached_tokens == [0, 59]


# --- links ------------------------------------------------------------------------------------------------------------


def test_transfers_share_the_link_of_the_sender() -> None:
    """Two decode workers, one prefill worker: 100 bytes at 10 a ms each, one after the other."""
    network = Network(kv_bytes_per_token=1.0, bytes_per_ms=10.0, latency_ms=1.0)
    scenario = plain(1, 2, network=network, dispatching=Dispatching.LEAST_LOADED)
    outcome = simulate(scenario, requests((0.0, 100, 2), (0.0, 100, 2)))
    assert len(set(outcome.decode_worker)) == 2
    first = outcome.first_token_ms[0]
    assert sorted(outcome.transferred_ms) == pytest.approx([first + 11.0, first + 21.0])
    assert outcome.transfer_bytes == 200.0


def test_transfers_share_the_link_of_the_receiver() -> None:
    network = Network(kv_bytes_per_token=1.0, bytes_per_ms=10.0)
    outcome = simulate(plain(2, 1, network=network), requests((0.0, 100, 2), (0.0, 100, 2)))
    assert sorted(outcome.prefill_worker) == [0, 1]
    assert sorted(outcome.transferred_ms) == pytest.approx([30.0, 40.0])


# --- what deciders see ------------------------------------------------------------------------------------------------


def test_the_gateway_counts_what_it_sent_since_the_last_report() -> None:
    outcome = simulate(plain(2, 1), requests(*((float(n), 100, 1) for n in range(4))))
    assert outcome.prefill_worker == [0, 1, 0, 1]


def test_the_gateway_does_not_see_what_ended_since_the_last_report() -> None:
    """Worker 0 is idle again at 11 ms, but the report that says so comes at 100 ms."""
    early = simulate(plain(2, 1), requests((0.0, 10, 1), (50.0, 5, 1), (60.0, 1, 1)))
    assert early.prefill_worker == [0, 1, 1]
    late = simulate(plain(2, 1), requests((0.0, 10, 1), (50.0, 5, 1), (110.0, 1, 1)))
    assert late.prefill_worker == [0, 1, 0]


# --- deflection -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_deflected_when_the_prefill_worker_is_busy() -> None:
    slow_link = Network(kv_bytes_per_token=1.0, bytes_per_ms=1.0)
    scenario = plain(network=slow_link, deflection=DeflectionSettings(), slos=(Slo(ttft_ms=1e4, tpot_ms=500.0),))
    outcome = simulate(scenario, requests((0.0, 4000, 1), (1.0, 100, 3)))
    assert sorted(outcome.deflected) == [False, True]
    deflected = outcome.deflected.index(True)
    assert math.isnan(outcome.transferred_ms[deflected])
    assert outcome.prefill_worker[deflected] == 1


def test_deflected_chunks_slow_the_residents_no_further_than_their_slo() -> None:
    slo = Slo(ttft_ms=1e5, tpot_ms=60.0)
    workload = requests((0.0, 10, 400), *((500.0 + n, 3000, 2) for n in range(6)))
    scenario = plain(deflection=DeflectionSettings(), slos=(slo,), network=NETWORK)
    outcome = simulate(scenario, workload)
    assert any(outcome.deflected[1:])
    assert outcome.largest_gap_ms[0] <= 60.0
    assert outcome.largest_gap_ms[0] > 20.0


# --- colocated baselines ----------------------------------------------------------------------------------------------


def colocated(kind: str, workload: Workload) -> Outcome:
    instance = pool(Duty.COLOCATED, costs=PLAIN).instance
    slos = (Slo(ttft_ms=1000.0, tpot_ms=100.0),)
    scenario = vllm_like(instance, 1, slos) if kind == "vllm" else sarathi_like(instance, 1, slos, token_budget=101)
    return simulate(scenario, workload)


def test_prompts_first_stall_the_batch() -> None:
    """The second prompt, of 400 tokens, takes 50 ms, and begins at the boundary at 104."""
    outcome = colocated("vllm", requests((0.0, 100, 30), (100.0, 400, 2)))
    assert outcome.first_token_ms == pytest.approx([20.0, 104.0 + 50.0])
    assert outcome.largest_gap_ms[0] == pytest.approx(50.0 + 7.0)
    assert outcome.second_token_ms[1] == pytest.approx(161.0)


def test_a_long_prompt_that_goes_first_goes_whole() -> None:
    """Neither token budget cuts it: 10 + 300 ms in one pass."""
    assert colocated("vllm", requests((0.0, 3000, 1))).first_token_ms == pytest.approx([310.0])


def test_mixed_steps_carry_chunks_of_the_prompt() -> None:
    """Four chunks of 100 tokens beside one resident: 10 (the larger base) + 10 + 1 ms a step."""
    outcome = colocated("sarathi", requests((0.0, 100, 30), (100.0, 400, 2)))
    assert outcome.first_token_ms[1] == pytest.approx(104.0 + 4 * 21.0)
    assert outcome.largest_gap_ms[0] == pytest.approx(21.0)


# --- elasticity -------------------------------------------------------------------------------------------------------


class Script:
    """Does one thing, the first time that it is asked."""

    def __init__(self, *actions: Action) -> None:
        self._actions = list(actions)
        self.seen: list[list[WorkerReport]] = []

    def decide(self, now_ms: float, reports: Sequence[WorkerReport]) -> Sequence[Action]:
        self.seen.append(list(reports))
        due, self._actions = self._actions, []
        return due


def elastic(script: Script, prefill: int = 2, decode: int = 1) -> Scenario:
    return plain(
        prefill, decode, elasticity=Elasticity(policy=script, interval_ms=100.0, switch_ms=7.0, start_ms=500.0)
    )


def test_a_flip_drains_switches_and_serves_its_new_duty() -> None:
    script = Script(Action(Lever.FLIP, 1))
    workload = requests((0.0, 10, 2), (1.0, 2000, 2), *((400.0 + n, 10, 200) for n in range(20)))
    outcome = simulate(elastic(script), workload)
    assert outcome.prefill_worker[1] == 1
    drained_ms = outcome.transferred_ms[1]
    changes = [(change.at_ms, change.duty) for change in outcome.role_changes if change.worker == 1]
    assert changes == [
        (0.0, Duty.PREFILL),
        (100.0, None),
        (pytest.approx(drained_ms + 7.0), Duty.DECODE),
    ]
    assert 1 in outcome.decode_worker
    assert set(outcome.prefill_worker[2:]) == {0}
    assert set(outcome.status) == {Status.FINISHED}


def test_a_started_worker_serves_once_its_model_is_loaded() -> None:
    outcome = simulate(elastic(Script(Action(Lever.START, 2))), traffic(400, 100.0, outputs=range(50, 100)))
    started = outcome.workers[3]
    assert (started.from_ms, started.pool) == (100.0, "decode")
    mine = [n for n, worker in enumerate(outcome.decode_worker) if worker == 3]
    assert min(outcome.first_token_ms[n] for n in mine) >= 600.0
    assert len(mine) > 50


def test_a_stopped_worker_is_paid_for_until_it_is_drained() -> None:
    outcome = simulate(elastic(Script(Action(Lever.STOP, 1))), traffic(100, 50.0))
    assert 100.0 <= outcome.workers[1].to_ms < 1000.0
    assert outcome.workers[0].to_ms == outcome.end_ms


@pytest.mark.parametrize("lever", [Lever.FLIP, Lever.STOP])
def test_the_last_worker_of_a_duty_stays(lever: Lever) -> None:
    outcome = simulate(elastic(Script(Action(lever, 2))), traffic(50, 10.0))
    assert [change.worker for change in outcome.role_changes] == [0, 1, 2]


def test_the_policy_sees_how_busy_each_worker_was() -> None:
    script = Script()
    simulate(elastic(script, prefill=1), requests((0.0, 300, 2), (1000.0, 1, 1)))
    shares = {report.duty: report.busy_share for report in script.seen[0]}
    assert shares[Duty.PREFILL] == pytest.approx(0.4)
    assert shares[Duty.DECODE] == pytest.approx(0.06)


# --- predicted lengths -----------------------------------------------------------------------------------------------


def predicted(accuracy: float, output: int, bound: Bound) -> tuple[int, bool]:
    """Bound, and whether it is taken for heavy, of a request of so many output tokens."""
    request = SimRequest(0, 0.0, 1, output, 0)
    Predictor(Prediction(accuracy=accuracy, granularity=200), bound, random.Random(1)).predict(request)
    return request.bound_tokens, request.heavy


PREDICTIONS = {
    "right, light": (1.0, 100, Bound.UPPER, (200, False)),
    "right, heavy in the first bucket": (1.0, 200, Bound.UPPER, (200, True)),
    "right, the next bucket": (1.0, 201, Bound.UPPER, (400, True)),
    "right, lower bound": (1.0, 201, Bound.LOWER, (200, True)),
    "right, lower bound of the first": (1.0, 100, Bound.LOWER, (1, False)),
    "right, quantile": (1.0, 201, Bound.QUANTILE, (380, True)),
    "wrong, from the first bucket up": (0.0, 100, Bound.UPPER, (400, True)),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_a_prediction(case: str) -> None:
    accuracy, output, bound, expected = PREDICTIONS[case]
    assert predicted(accuracy, output, bound) == expected


def test_as_many_predictions_are_right_as_the_scenario_says() -> None:
    predictor = Predictor(Prediction(accuracy=0.75, granularity=200), Bound.UPPER, random.Random(3))
    right = 0
    for number in range(4000):
        request = SimRequest(number, 0.0, 1, 500, 0)
        predictor.predict(request)
        right += request.bound_tokens == 600
        assert request.bound_tokens in (400, 600, 800)
    assert right / 4000 == pytest.approx(0.75, abs=0.03)


# --- turns, early stop, bad input -------------------------------------------------------------------------------------


def test_residents_beyond_the_limit_of_a_step_take_turns() -> None:
    """Two contexts of 100 and a limit of 150: one a step, in turn."""
    rules = DecodeRules(admission=Admission.GREEDY, max_batch_tokens=150)
    workload = requests((0.0, 100, 4), (0.0, 100, 4))
    outcome = simulate(plain(rules=rules), workload)
    assert sorted(outcome.last_token_ms) == pytest.approx([30.0 + 5 * 6.0, 30.0 + 6 * 6.0])


def test_a_certain_verdict_ends_the_run() -> None:
    strict = (Slo(ttft_ms=1.0, tpot_ms=1.0),)
    outcome = simulate(plain(slos=strict, stop_after_misses=10), traffic(500, 10.0))
    assert outcome.stopped_early
    assert sum(status == Status.FINISHED for status in outcome.status) < 30


BAD = {
    "no decode worker": ({"pools": (pool(Duty.PREFILL),)}, "pools"),
    "no worker at all": ({"pools": (pool(Duty.COLOCATED, 0),)}, "pools"),
    "no KV": ({"pools": (pool(Duty.PREFILL), pool(Duty.DECODE, kv_blocks=0))}, "kv_blocks"),
    "no SLO": ({"slos": ()}, "slos"),
    "an SLO of nothing": ({"slos": (Slo(ttft_ms=0.0, tpot_ms=1.0),)}, "slos"),
    "no chunk": ({"prefill": PrefillRules(limit_tokens=0)}, "prefill.limit_tokens"),
    "a batch of none": ({"rules": DecodeRules(max_running=0)}, "decode.max_running"),
    "a link without speed": ({"network": Network(kv_bytes_per_token=1.0, bytes_per_ms=0.0)}, "network"),
    "no reports": ({"report_interval_ms": 0.0}, "report_interval_ms"),
    "deflection beside colocated": (
        {"pools": (pool(Duty.COLOCATED),), "deflection": DeflectionSettings()},
        "deflection",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_scenario_is_refused_with_its_field(case: str) -> None:
    changes, field = BAD[case]
    with pytest.raises(ScenarioError, match=field):
        cluster(**changes)  # type: ignore[arg-type]
