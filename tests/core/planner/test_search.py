"""Algorithms 1 and 2 against their literal forms, floors, and plans for a number of GPUs."""

from __future__ import annotations

import itertools
import math

import pytest

from headrace_core.perf.hf_config import known
from headrace_core.perf.memory import Engine
from headrace_core.planner.deployment import Deployment, caps_of, scenario_of, total_weight
from headrace_core.planner.errors import PlanError
from headrace_core.planner.goodput import measure
from headrace_core.planner.question import COLOCATED, Layout, Question
from headrace_core.planner.runner import Here
from headrace_core.planner.search import better_first, check_floors, search
from headrace_core.planner.settle import within
from headrace_core.planner.sides import apart_plans, decode_contenders, prefill_contenders
from headrace_core.planner.space import Nodes, Space, space_of
from headrace_core.planner.units import budget_within, colocated_units, paired_units
from headrace_core.policy.admission import Admission
from headrace_core.sim.lengths import Lengths, fixed
from headrace_core.sim.scenario import Duty, Slo
from headrace_core.sim.traffic import Traffic
from tests.core.planner.builders import A100, costs, priced, question, shape, space
from tests.core.planner.queue import simulate

pytestmark = pytest.mark.usefixtures("short_runs")
SHAPES = (
    shape(1, 1),
    shape(2, 1, prefill_base_ms=8.0, prefill_token_ms=0.06, decode_base_ms=7.0),
    shape(4, 1, prefill_base_ms=7.0, prefill_token_ms=0.04, decode_base_ms=5.0),
)


def here(asked: Question) -> Here:
    return Here(asked.traffic, simulate)


def goodputs(asked: Question, where: Space) -> tuple[list[float], list[float]]:
    runner = here(asked)
    prefills = [measure(one.candidate, runner).mean for one in prefill_contenders(asked, where)]
    return prefills, [measure(one.candidate, runner).mean for one in decode_contenders(asked, where)]


@pytest.mark.parametrize("rate", [5.0, 25.0, 90.0])
def test_algorithm_1_picks_what_searching_everything_picks(rate: float) -> None:
    """The paper's loop: the best goodput per GPU of either side, and ceil(rate / goodput) workers."""
    asked, where = question(rate_per_s=rate, ttft_ms=250.0, tpot_ms=12.0), space(*SHAPES)
    plans, alone = apart_plans(asked, where, here(asked))
    best = plans[0]
    prefills, decodes = goodputs(asked, where)
    literal = min(
        sum(
            math.ceil(rate / goodput) * one.gpus
            for goodput, one in ((prefills[first], SHAPES[first]), (decodes[second], SHAPES[second]))
        )
        for first, second in itertools.product(range(3), repeat=2)
    )
    assert best.gpus <= literal * 1.05
    for one in alone:
        known_goodput = (prefills if one.duty is Duty.PREFILL else decodes)[SHAPES.index(one.shape)]
        assert one.goodput.mean == pytest.approx(known_goodput, rel=0.01)


def test_the_counts_of_algorithm_1() -> None:
    asked, where = question(rate_per_s=25.0, ttft_ms=250.0), space(shape())
    plans, alone = apart_plans(asked, where, here(asked))
    assert [side.workers for side in plans[0].sides] == [math.ceil(25.0 / one.goodput.mean) for one in alone]


def test_gpus_are_split_so_that_the_weaker_side_is_strongest() -> None:
    asked, where = question(rate_per_s=None, gpus=12, ttft_ms=250.0), space(SHAPES[0], SHAPES[1])
    plans, _ = apart_plans(asked, where, here(asked))
    prefills, decodes = goodputs(asked, where)
    literal = max(
        min(n * prefills[first], m * decodes[second])
        for first, second in itertools.product(range(2), repeat=2)
        for n in range(1, 12)
        for m in range(1, 12)
        if n * SHAPES[first].gpus + m * SHAPES[second].gpus <= 12
    )
    best = plans[0]
    places = [SHAPES.index(side.shape) for side in best.sides]
    reached = min(best.sides[0].workers * prefills[places[0]], best.sides[1].workers * decodes[places[1]])
    assert best.gpus <= 12
    assert reached == pytest.approx(literal, rel=0.01)


@pytest.mark.parametrize("per_worker", [1, 2, 4])
def test_the_pairs_of_algorithm_2(per_worker: int) -> None:
    """The paper's loops, as D5 corrects them: stages across nodes in common, degrees of their own within a node."""
    model, nodes = known("facebook/opt-66b"), Nodes(per_worker=per_worker)
    where = space_of(model, [A100], nodes, Engine())
    fitting = {(one.tensor, one.pipeline) for one in where.shapes}
    literal = set()
    inner = [(tensor, pipeline) for tensor in range(1, 9) for pipeline in range(1, 9) if tensor * pipeline <= 8]
    for stages in range(1, per_worker + 1):
        for (tensor_p, inner_p), (tensor_d, inner_d) in itertools.product(inner, repeat=2):
            prefill, decode = (tensor_p, stages * inner_p), (tensor_d, stages * inner_d)
            if tensor_p * inner_p + tensor_d * inner_d <= 8 and prefill in fitting and decode in fitting:
                literal.add((prefill, decode))
    units = paired_units(question(), where)
    found = [tuple((side.shape.tensor, side.shape.pipeline) for side in unit.sides) for unit in units]
    assert set(found) == literal
    assert len(found) == len(literal)
    assert ((4, 1), (2, 2)) in literal, "the paper's own answer"


def test_pairs_stand_on_one_kind_of_node() -> None:
    where = space(shape(offer=priced("A100-80G", 1.0)), shape(offer=priced("L40S", 1.0)))
    assert all(unit.sides[0].shape.offer == unit.sides[1].shape.offer for unit in paired_units(question(), where))


def test_the_search_serves_the_rate_with_everything_side_by_side() -> None:
    asked, where = question(rate_per_s=25.0, ttft_ms=250.0), space(*SHAPES)
    announced: list[str] = []
    results = search(asked, where, here(asked), announced.append)
    assert announced == ["Apart", "Paired", "Colocated"]
    layouts = {one.deployment.layout for one in results.found}
    assert {Layout.APART, Layout.PAIRED} <= layouts
    assert layouts & set(COLOCATED), "colocated is always beside"
    order = [better_first(asked, one) for one in results.found]
    assert order == sorted(order)
    for one in results.found:
        assert one.assessment is not None
        assert one.assessment.holds
        assert one.goodput.mean >= 25.0 * 0.97
        cap = min(cap.rate_per_s for cap in caps_of(asked, where, one.deployment))
        assert one.goodput.mean <= cap


def test_two_sides_at_90_percent_are_not_90_percent() -> None:
    """Where each side alone just holds the rate, the whole gets more workers than the two sides ask for."""
    asked = question(rate_per_s=40.0, ttft_ms=120.0, lengths=Lengths([100, 400, 700], [101, 101, 101], "three"))
    where = space(shape())
    found = next(one for one in search(asked, where, here(asked)).found if one.deployment.layout is Layout.APART)
    assert found.assessment is not None
    assert found.assessment.share is not None
    assert found.assessment.share.low >= 0.9


def test_prices_decide_between_accelerators() -> None:
    """A GPU of half the speed at a third of the price serves the rate for less; at equal prices it is the other way."""
    slow = {"prefill_token_ms": 0.2, "decode_base_ms": 20.0}
    for price, wanted in ((1.0, "L40S"), (3.0, "A100-80G")):
        where = space(shape(offer=priced("A100-80G", 3.0)), shape(offer=priced("L40S", price), **slow))
        asked = question(rate_per_s=60.0, tpot_ms=40.0, layouts=(Layout.APART,))
        best = search(asked, where, here(asked)).found[0].deployment
        assert {side.shape.offer.accelerator.name for side in best.sides} == {wanted}
        assert total_weight(asked, best) == best.price_per_hour


def test_gpus_limit_the_search() -> None:
    asked = question(rate_per_s=400.0, gpus=3, ttft_ms=250.0)
    results = search(asked, space(*SHAPES), here(asked))
    assert results.found == ()
    assert set(results.without) == {Layout.APART, Layout.PAIRED}
    alone = question(rate_per_s=None, gpus=3, ttft_ms=250.0)
    found = search(alone, space(*SHAPES), here(alone)).found
    assert found
    assert all(within(alone, one.deployment) for one in found)
    assert [one.goodput.mean for one in found] == sorted((one.goodput.mean for one in found), reverse=True)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "message"),
    [
        (1000.0, 5.0, r"slo: TPOT 5 ms is under the 10.1 ms that one decode step takes on A100-80G tp1 pp1.*raise it"),
        (20.0, 15.0, r"slo: TTFT 20 ms is under the 50 ms in which 90% of the prompts can be computed on .*raise it"),
    ],
)
def test_slos_under_the_floor(ttft_ms: float, tpot_ms: float, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_floors(question(ttft_ms=ttft_ms, tpot_ms=tpot_ms), space())


def test_the_floor_is_that_of_the_fastest_shape_and_the_most_patient_class() -> None:
    check_floors(question(tpot_ms=5.5), space(*SHAPES))
    classes = (Slo(ttft_ms=1.0, tpot_ms=1.0, name="fast"), Slo(ttft_ms=500.0, tpot_ms=15.0, name="slow"))
    traffic = Traffic(lengths=fixed(400, 101), class_shares=(0.05, 0.95))
    check_floors(question(slos=classes, traffic=traffic), space())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_per_s": -1.0}, r"rate: -1.0 requests/s is not a positive number"),
        ({"rate_per_s": math.nan}, r"rate: nan"),
        ({"rate_per_s": None}, r"rate: give a rate to be served, or a number of GPUs"),
        ({"gpus": 0}, r"gpus: 0 leaves nothing"),
        ({"target": 1.0}, r"target: 1 is no share"),
        ({"target": 0.0}, r"target: 0 is no share"),
        ({"slos": ()}, r"slos: give at least one"),
        ({"slos": (Slo(ttft_ms=0, tpot_ms=1),)}, r"slo: ttft and tpot must be above 0"),
        ({"slos": (Slo(ttft_ms=1, tpot_ms=1),) * 2}, r"class_shares: 1 for 2 SLO classes"),
        ({"lengths": fixed(10, 1)}, r"lengths: no answer has a second token"),
        ({"layouts": ()}, r"layouts: name Apart, Paired or both"),
    ],
)
def test_bad_questions_name_field_and_remedy(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        question(**changes)  # type: ignore[arg-type] - wrong on purpose


def test_colocated_workers_mix_with_a_large_and_a_fitting_budget_and_admit_greedily() -> None:
    asked = question(tpot_ms=80.0)  # 10 + 0.1 + 512 * 0.1 = 61 ms, and 1,024 take 112
    units = colocated_units(asked, space(), COLOCATED)
    found = [(unit.layout, unit.token_budget) for unit in units]
    assert found == [(Layout.MIXED, 512), (Layout.MIXED, 2048), (Layout.PREFILL_FIRST, 2048)]
    assert budget_within(costs(), asked.work, 1.0) == 256
    assert {scenario_of(asked, space(), unit).decode.admission for unit in units} == {Admission.GREEDY}


def test_a_pair_is_simulated_alone() -> None:
    unit = paired_units(question(), space())[0].with_workers(7, 7)
    assert isinstance(unit, Deployment)
    assert [pool.workers for pool in scenario_of(question(), space(), unit).pools] == [1, 1]
    assert unit.gpus == 14
