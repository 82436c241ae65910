"""What a report says of hand-made outcomes and of real runs, and how it travels as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.fit import Correction
from headrace_core.perf.hf_config import known
from headrace_core.perf.model import Placement
from headrace_core.perf.profiles import profile_for
from headrace_core.sim import reporting
from headrace_core.sim.attainment import Stage, blame, judge, stood_still
from headrace_core.sim.baselines import vllm_like
from headrace_core.sim.cluster import simulate
from headrace_core.sim.outcome import Outcome, Status, WorkerTotals
from headrace_core.sim.report import SCHEMA_VERSION, Caution, ProfileKind, ProfileUse, Report
from headrace_core.sim.report_json import ReportError, from_json, json_schema, to_json
from headrace_core.sim.reporting import make_report, profile_use, scenario_digest
from headrace_core.sim.scenario import Duty, PrefillRules, Scenario, Slo
from headrace_core.sim.workload import Workload, WorkloadError
from tests.core.sim.builders import cluster, pool, traffic

SLO = Slo(ttft_ms=100, tpot_ms=10)
NEVER = math.nan
CHUNKS = PrefillRules(limit_tokens=512)


def request(**changes: Any) -> dict[str, Any]:
    """A request of 11 tokens that meets SLO: TTFT 50 ms, TPOT 5 ms."""
    plain = {
        "arrival": 0.0,
        "start": 20.0,
        "first": 50.0,
        "admitted": 51.0,
        "transferred": 53.0,
        "second": 58.0,
        "last": 100.0,
        "gap": 8.0,
        "output": 11,
        "preemptions": 0,
        "status": Status.FINISHED,
        "slo_class": 0,
    }
    assert set(changes) <= set(plain)
    return plain | changes


def outcome(requests: list[dict[str, Any]], **changes: Any) -> Outcome:
    def column(name: str) -> list[Any]:
        return [one[name] for one in requests]

    count = len(requests)
    ends = [one["last"] for one in requests if not math.isnan(one["last"])]
    made = Outcome(
        arrival_ms=column("arrival"),
        prefill_start_ms=column("start"),
        first_token_ms=column("first"),
        admitted_ms=column("admitted"),
        transferred_ms=column("transferred"),
        second_token_ms=column("second"),
        last_token_ms=column("last"),
        largest_gap_ms=column("gap"),
        prompt_tokens=[100] * count,
        output_tokens=column("output"),
        cached_tokens=[0] * count,
        slo_class=column("slo_class"),
        prefill_worker=[0] * count,
        decode_worker=[1] * count,
        preemptions=column("preemptions"),
        deflected=[False] * count,
        status=[int(status) for status in column("status")],
        end_ms=max(ends, default=0.0),
    )
    return replace(made, **changes)


def scenario(**changes: Any) -> Scenario:
    return cluster(**{"slos": (SLO,)} | changes)


def workload_of(made: Outcome) -> Workload:
    return Workload(made.arrival_ms, made.prompt_tokens, made.output_tokens, made.slo_class, [], 0, "hand")


def report(requests: list[dict[str, Any]], warmup_share: float = 0.0, **changes: Any) -> Report:
    made = outcome(requests)
    return make_report(scenario(**changes), workload_of(made), made, warmup_share=warmup_share)


UNSERVED = {"start": NEVER, "first": NEVER, "admitted": NEVER, "transferred": NEVER, "second": NEVER, "last": NEVER}


@pytest.mark.parametrize(
    ("changes", "ttft_met", "tpot_met"),
    [
        ({}, True, True),
        ({"first": 100.0, "last": 200.0}, True, True),
        ({"first": 100.001, "last": 200.0}, False, True),
        ({"last": 150.0}, True, True),
        ({"last": 150.001}, True, False),
        ({"output": 1, "second": NEVER, "last": 50.0}, True, True),
        ({"output": 1, "first": 101.0, "second": NEVER, "last": 101.0}, False, True),
        ({"status": Status.UNFINISHED, "last": NEVER}, True, False),
        ({"status": Status.REJECTED, "last": NEVER}, True, False),
        (UNSERVED | {"status": Status.REJECTED}, False, False),
        (UNSERVED | {"status": Status.UNFINISHED, "output": 1}, False, False),
    ],
)
def test_a_request_meets_its_slo(changes: dict[str, Any], ttft_met: bool, tpot_met: bool) -> None:
    verdicts = judge(scenario(), outcome([request(**changes)]))
    assert (verdicts.ttft_met, verdicts.tpot_met, verdicts.met) == ([ttft_met], [tpot_met], [ttft_met and tpot_met])


def test_tpot_is_over_all_tokens_but_the_first_or_as_distserve_counts() -> None:
    one = outcome([request()])
    assert judge(scenario(), one).tpot_ms == [5.0]
    assert judge(scenario(prefill_gives_first_token=False), one).tpot_ms == [50 / 11]


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (Stage.PREFILL, {"start": 1.0, "first": 180.0}),
        # Both SLOs missed: the earlier one decides.
        (Stage.PREFILL, {"start": 1.0, "first": 180.0, "last": 999.0}),
        (Stage.DECODE, {"last": 200.0}),
        (Stage.ADMISSION, {"admitted": 130.0, "transferred": 132.0, "second": 137.0, "last": 182.0}),
        (Stage.TRANSFER, {"admitted": 51.0, "transferred": 132.0, "second": 137.0, "last": 182.0}),
        # The wait alone breaks the SLO, but so would the steps.
        (Stage.DECODE, {"admitted": 130.0, "transferred": 132.0, "second": 137.0, "last": 260.0}),
        (Stage.PREEMPTION, {"preemptions": 1, "gap": 80.0, "last": 180.0}),
        # The longest gap was the wait for the second token, so preemption is not to blame.
        (Stage.ADMISSION, {"preemptions": 1, "admitted": 130.0, "transferred": 132.0, "second": 137.0, "gap": 87.0}),
        (Stage.ADMISSION, UNSERVED | {"status": Status.REJECTED}),
        (Stage.QUEUE, UNSERVED | {"status": Status.UNFINISHED}),
        (Stage.PREFILL, UNSERVED | {"status": Status.UNFINISHED, "start": 20.0}),
        (Stage.ADMISSION, UNSERVED | {"status": Status.UNFINISHED, "start": 20.0, "first": 50.0}),
        (Stage.TRANSFER, UNSERVED | {"status": Status.UNFINISHED, "start": 20.0, "first": 50.0, "admitted": 60.0}),
        (Stage.DECODE, {"status": Status.UNFINISHED, "last": NEVER}),
        (Stage.PREEMPTION, {"status": Status.UNFINISHED, "last": NEVER, "preemptions": 2}),
    ],
)
def test_a_miss_has_one_stage(stage: Stage, changes: dict[str, Any]) -> None:
    changes = changes | ({"last": 182.0} if "gap" in changes and changes.get("admitted") else {})
    made = outcome([request(**changes)])
    verdicts = judge(scenario(), made)
    assert verdicts.met == [False]
    assert blame(scenario(), made, verdicts, 0) is stage
    found = report([request(**changes)])
    assert [(miss.stage, miss.requests, miss.share) for miss in found.misses] == [(stage, 1, 1.0)]


def test_waiting_for_a_worker_that_is_full_counts_against_decode() -> None:
    """The worker computes until 50 ms, stands still until 150 ms, and computes the second prompt until 180 ms."""
    blocked = request(start=150.0, first=180.0, last=230.0, admitted=181.0, transferred=182.0, second=188.0)
    assert stood_still(outcome([request(), blocked])) == [20.0, 120.0]
    assert report([request(), blocked]).misses[0].stage is Stage.ADMISSION
    working = request(start=50.0, first=140.0, admitted=141.0, transferred=142.0, second=147.0, last=200.0)
    found = report([request(), working, blocked | {"start": 140.0}])
    assert {miss.stage for miss in found.misses} == {Stage.QUEUE}


def test_standing_still_is_what_the_slow_count_says() -> None:
    """Ticks of 1 ms: a request waits, and none on its worker is between its start and its first token."""
    made = simulate(cluster(2, 1, kv_blocks=120, prefill=CHUNKS), traffic(80, 40.0, prompts=range(1, 300)))
    for index, still_ms in enumerate(stood_still(made)):
        if made.status[index] != Status.FINISHED:
            continue
        same = [row for row in range(80) if made.prefill_worker[row] == made.prefill_worker[index]]
        ticks = range(round(made.arrival_ms[index]), round(made.prefill_start_ms[index]))
        idle = sum(
            not any(made.prefill_start_ms[row] <= tick + 0.5 <= made.first_token_ms[row] for row in same)
            for tick in ticks
        )
        assert still_ms == pytest.approx(idle, abs=25)


def test_a_prefill_pool_full_of_waiting_kv_shows_admission() -> None:
    small = pool(Duty.PREFILL, kv_blocks=60)
    plan = replace(cluster(1, 1, kv_blocks=120), pools=(small, pool(Duty.DECODE, kv_blocks=120)))
    load = traffic(300, 20.0, prompts=range(100, 300), outputs=range(100, 200))
    found = make_report(plan, load, simulate(plan, load))
    assert found.misses[0].stage is Stage.ADMISSION
    prefill = found.pools[0]
    assert prefill.utilisation is not None
    assert prefill.utilisation < 0.5


def spaced(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Requests one second apart, all of the plain kind."""
    shifted = ("arrival", "start", "first", "admitted", "transferred", "second", "last")
    plain = request(**changes)
    return [plain | {name: plain[name] + 1000.0 * number for name in shifted} for number in range(count)]


def test_the_warm_up_is_cut_and_the_tail_is_not() -> None:
    slow = {"first": 150.0, "last": 200.0}
    head = spaced(100, **slow)[:10] + spaced(100)[10:]
    tail = spaced(100)[:90] + spaced(100, **slow)[90:]
    assert report(head, 0.1).attainment.value == 1.0
    assert report(head, 0.05).attainment.value == pytest.approx(90 / 95)
    assert report(tail, 0.1).attainment.value == pytest.approx(80 / 90)
    sample = report(head, 0.1).sample
    assert (sample.requests, sample.warmup_requests, sample.measured_requests) == (100, 10, 90)
    assert sample.arrival_rate_per_s == pytest.approx(1.0)
    assert report(head, 0.1).goodput_per_s == pytest.approx(1.0)
    assert report(tail, 0.1).goodput_per_s == pytest.approx(80 / 90)


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_warm_up_must_leave_something(share: float) -> None:
    with pytest.raises(WorkloadError, match=r"warmup share: .* leaves no request"):
        report(spaced(10), share)


def test_percentiles_with_few_samples_beyond_them_are_marked() -> None:
    marks = {one.percent: one.enough for one in report(spaced(1000)).ttft.percentiles}
    assert marks == {50: True, 90: True, 95: False, 99: False}
    assert report(spaced(999)).ttft.percentiles[1].enough is False


def test_times_are_measured_where_they_happened() -> None:
    found = report(
        [
            *spaced(1),
            request(output=1, second=NEVER, last=50.0, admitted=NEVER, transferred=NEVER, gap=0.0),
            request(**UNSERVED, status=Status.REJECTED, gap=0.0),
        ]
    )
    assert (found.ttft.samples, found.ttft.missing, found.ttft.mean_ms) == (2, 1, 50)
    assert (found.tpot.samples, found.tpot.missing, found.tpot.mean_ms) == (1, 2, 5)
    assert (found.second_token_wait.samples, found.second_token_wait.mean_ms) == (1, 8)
    assert (found.largest_gap.samples, found.largest_gap.mean_ms) == (1, 8)
    assert (found.jct.samples, found.jct.mean_ms) == (2, 75)
    assert (found.ends.finished, found.ends.rejected, found.ends.unfinished) == (2, 1, 0)


def test_a_time_that_never_happened_is_unknown_and_not_zero() -> None:
    found = report([request(**UNSERVED, status=Status.REJECTED)] * 3)
    assert (found.ttft.mean_ms, found.ttft.percentiles, found.ttft.missing) == (None, (), 3)
    assert found.sample.arrival_rate_per_s is None
    assert found.goodput_per_s is None
    assert found.totals.cost is None
    assert found.attainment.value == 0


def test_classes_are_held_against_their_own_slo() -> None:
    slos = (SLO, replace(SLO, ttft_ms=40, name="fast"), replace(SLO, name="nobody"))
    found = report([*spaced(30), *spaced(10, slo_class=1)], slos=slos)
    plain, fast, nobody = found.classes
    assert (plain.name, plain.requests, plain.both and plain.both.value) == ("default", 30, 1.0)
    assert (fast.requests, fast.both and fast.both.value, fast.ttft_share, fast.tpot_share) == (10, 0.0, 0.0, 1.0)
    assert (nobody.requests, nobody.both, nobody.ttft_share) == (0, None, None)
    assert found.attainment.value == 0.75


def test_resources_and_cost() -> None:
    hour_ms = 3_600_000.0
    made = outcome(
        [request(output=1001, last=hour_ms)] * 2,
        workers=[
            WorkerTotals(
                "prefill", 2, 6.0, 100, busy_ms=hour_ms / 4, block_ms=50 * hour_ms, peak_blocks=80, to_ms=hour_ms
            ),
            WorkerTotals(
                "decode", 1, 3.0, 200, busy_ms=hour_ms / 2, peak_blocks=200, from_ms=hour_ms / 2, to_ms=hour_ms
            ),
        ],
        transfer_bytes=7.0,
    )
    found = make_report(scenario(), workload_of(made), made, warmup_share=0.0)
    prefill, decode = found.pools
    assert (prefill.utilisation, prefill.kv_mean_share, prefill.kv_peak_share) == (0.25, 0.5, 0.8)
    assert (prefill.gpu_hours, prefill.cost) == (2.0, 6.0)
    assert (decode.utilisation, decode.gpu_hours, decode.cost, decode.kv_peak_share) == (1.0, 0.5, 1.5, 1.0)
    totals = found.totals
    assert (totals.duration_s, totals.resource_s, totals.gpu_hours, totals.cost) == (3600, 2700, 2.5, 7.5)
    assert (totals.output_tokens, totals.cost_per_million_output_tokens) == (2002, 7.5 / 2002 * 1e6)
    assert totals.output_tokens_per_gpu_s == pytest.approx(2002 / 9000)
    made.workers[1].price_per_hour = 0.0
    unpriced = make_report(scenario(), workload_of(made), made, warmup_share=0.0)
    assert (unpriced.pools[1].cost, unpriced.totals.cost, unpriced.totals.cost_per_million_output_tokens) == (
        None,
        None,
        None,
    )


def test_the_requests_in_the_system_are_those_of_the_slow_count() -> None:
    made = simulate(cluster(), traffic(900, 4.0))
    start_ms, end_ms = made.arrival_ms[100], made.arrival_ms[-1]
    width_ms = (end_ms - start_ms) / 24
    slow = []
    for slot in range(24):
        low, high = start_ms + slot * width_ms, start_ms + (slot + 1) * width_ms
        ends = zip(made.arrival_ms, made.last_token_ms, strict=True)
        slow.append(sum(max(0.0, min(high, last) - max(low, arrival)) for arrival, last in ends) / width_ms)
    assert reporting._in_system(made, start_ms) == pytest.approx(slow)


def cautions(found: Report) -> set[Caution]:
    return {warned.caution for warned in found.warnings}


def test_a_run_below_capacity_is_stable_and_one_above_is_not() -> None:
    plan = cluster(2, 2)
    for rate, stable in ((3.0, True), (60.0, False)):
        load = traffic(3000, rate)
        found = make_report(plan, load, simulate(plan, load))
        assert found.stability.stable is stable, rate
        assert (Caution.UNSTABLE in cautions(found)) is not stable


def test_a_run_at_no_attainment_at_all_is_told_unstable_by_its_queue() -> None:
    plan, load = cluster(slos=(Slo(ttft_ms=0.001, tpot_ms=0.001),)), traffic(2000, 60.0)
    found = make_report(plan, load, simulate(plan, load))
    assert found.attainment.value == 0
    assert found.stability.stable is False


def test_few_requests_do_not_tell_stability() -> None:
    found = report(spaced(200))
    assert found.stability.stable is None
    assert Caution.TOO_FEW_REQUESTS in cautions(found)


def use(pool_name: str, **changes: Any) -> ProfileUse:
    plain = ProfileUse(
        pool=pool_name,
        model="m",
        accelerator="H200",
        tensor=1,
        pipeline=1,
        kind=ProfileKind.MEASURED,
        source="bench",
        assumed="",
        prefill_error=0.01,
        decode_error=0.02,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "caution"),
    [
        ({}, None),
        ({"decode_error": 0.2}, Caution.PROFILE_ERROR),
        ({"prefill_error": None, "decode_error": None}, None),
        ({"kind": ProfileKind.ESTIMATED}, Caution.ESTIMATED_PROFILE),
        ({"kind": ProfileKind.ESTIMATED, "decode_factor": 1.2}, None),
        ({"pool": "another"}, Caution.UNKNOWN_PROFILE),
    ],
)
def test_a_profile_that_cannot_be_trusted_is_said_to_be(changes: dict[str, Any], caution: Caution | None) -> None:
    made = outcome(spaced(300))
    uses = (use("prefill", **changes), use("decode"))
    found = make_report(scenario(), workload_of(made), made, uses)
    assert cautions(found) == ({caution} if caution else set())
    assert found.profiles == uses


@pytest.mark.parametrize(
    ("requests", "changes", "caution"),
    [
        ([*spaced(300), request(**UNSERVED, arrival=300_000.0, status=Status.REJECTED)], {}, Caution.REJECTED),
        ([*spaced(300), request(**UNSERVED, arrival=300_000.0, status=Status.UNFINISHED)], {}, Caution.UNFINISHED),
        (spaced(300), {"stopped_early": True}, Caution.STOPPED_EARLY),
        (spaced(300), {"workers": [WorkerTotals("decode", 1, 0.0, 9, peak_blocks=9, to_ms=1.0)]}, Caution.KV_FULL),
    ],
)
def test_what_happened_is_warned_of(requests: list[dict[str, Any]], changes: dict[str, Any], caution: Caution) -> None:
    made = outcome(requests, **changes)
    found = make_report(scenario(), workload_of(made), made, (use("prefill"), use("decode")))
    assert cautions(found) == {caution}
    assert all(warned.text for warned in found.warnings)


def test_the_profile_of_a_pool_keeps_where_it_comes_from() -> None:
    placement = Placement(shape=known("OPT-13B"), accelerator=accelerator("A100-80G"))
    measured = profile_use("prefill", profile_for(placement))
    assert (measured.kind, measured.accelerator, measured.prefill_factor) == (ProfileKind.MEASURED, "A100-80G", 1.0)
    assert "DistServe" in measured.source
    guessed = profile_use(
        "decode", profile_for(replace(placement, accelerator=accelerator("L4"))), Correction(2.0, 3.0)
    )
    assert (guessed.kind, guessed.prefill_factor, guessed.decode_factor) == (ProfileKind.ESTIMATED, 2.0, 3.0)


REAL = (cluster(2, 2, seed=5), traffic(1500, 6.0))


@pytest.fixture(scope="module")
def real() -> Report:
    plan, load = REAL
    return make_report(plan, load, simulate(plan, load), (use("prefill"), use("decode")))


def test_a_report_survives_json(real: Report) -> None:
    assert from_json(to_json(real)) == real
    bare = report([request(**UNSERVED, status=Status.REJECTED)])
    assert from_json(to_json(bare)) == bare


def test_the_report_names_its_inputs(real: Report) -> None:
    plan, load = REAL
    assert (real.schema_version, real.seed) == (SCHEMA_VERSION, 5)
    assert real.workload_sha256 == load.digest()
    assert real.scenario_sha256 == scenario_digest(plan)
    assert to_json(make_report(plan, load, simulate(plan, load), (use("prefill"), use("decode")))) == to_json(real)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-5], "the text: Invalid JSON"),
        (lambda text: "{}", "schema_version: Field required"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema_version: 99 cannot be read"),
        (
            lambda text: text.replace('"measured_requests": ', '"measured_requests": "many", "x": '),
            "sample.measured_req",
        ),
        (lambda text: text.replace('"seed": 5,', ""), "seed: Field required"),
    ],
)
def test_what_is_no_report_is_refused(real: Report, change: Any, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        from_json(change(to_json(real)))


def test_the_schema_names_every_field(real: Report) -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(json.loads(to_json(real)))
    assert set(schema["required"]) == set(schema["properties"])


def test_each_field_of_a_scenario_counts_in_its_digest() -> None:
    base = cluster()
    assert scenario_digest(base) == scenario_digest(cluster())
    others = [
        cluster(seed=1),
        cluster(1, 2),
        cluster(kv_blocks=3999),
        cluster(slos=(SLO,)),
        cluster(network=None),
        cluster(report_interval_ms=50.0),
        replace(base, pools=(pool(Duty.PREFILL, kv_blocks=1 << 40, gpus=2), base.pools[1])),
    ]
    assert len({scenario_digest(one) for one in [base, *others]}) == len(others) + 1


def test_littles_law_and_shares_hold_on_a_real_run(real: Report) -> None:
    plan, load = REAL
    made = simulate(plan, load)
    found = make_report(plan, load, made, warmup_share=0.0)
    assert found.jct.mean_ms is not None
    span_ms = made.end_ms - made.arrival_ms[0]
    present = sum(last - arrival for arrival, last in zip(made.arrival_ms, made.last_token_ms, strict=True)) / span_ms
    assert present == pytest.approx(len(load) / span_ms * found.jct.mean_ms)
    for one in found.pools:
        assert one.utilisation is not None
        assert one.kv_mean_share is not None
        assert 0 < one.utilisation <= 1
        assert 0 < one.kv_mean_share <= one.kv_peak_share <= 1
    misses = sum(miss.share for miss in found.misses)
    assert found.attainment.value + misses == pytest.approx(1)
    assert found.totals.output_tokens == sum(load.output_tokens)


def test_a_colocated_run_has_a_report_too() -> None:
    instance = pool(Duty.COLOCATED).instance
    plan, load = vllm_like(instance, 2, (Slo(ttft_ms=400, tpot_ms=100),)), traffic(800, 3.0)
    found = make_report(plan, load, simulate(plan, load))
    assert [one.name for one in found.pools] == ["colocated"]
    assert 0 < found.attainment.value <= 1
