"""The whole answer: ranking, ties, the patch, the JSON and its schema."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headrace_core.api.resources import InferenceCluster
from headrace_core.api.spec import Parallelism, Pool, PoolRole, Scaling
from headrace_core.perf.profiles import Kind
from headrace_core.planner import result as results
from headrace_core.planner.answer import Extras, _ties, answer
from headrace_core.planner.deployment import Deployment, Side
from headrace_core.planner.errors import PlanError
from headrace_core.planner.goodput import Interval
from headrace_core.planner.headroom import Surprise
from headrace_core.planner.patch import patch_of
from headrace_core.planner.question import Layout
from headrace_core.planner.result import Plan, PlanResult, from_json, json_schema, to_json
from headrace_core.planner.runner import Here
from headrace_core.planner.search import Found
from headrace_core.planner.space import Nodes
from headrace_core.sim.scenario import Duty
from headrace_core.sim.traffic import draw_traffic
from tests.core.planner.builders import priced, question, shape, space
from tests.core.planner.queue import simulate

DOCUMENT = Path(__file__).parents[3] / "docs" / "plan.md"
pytestmark = pytest.mark.usefixtures("short_runs")


def deployment(layout: Layout, prefill: Side, decode: Side) -> Deployment:
    return Deployment(layout=layout, sides=(prefill, decode), token_budget=2048)


@pytest.fixture
def full(short_runs: None) -> PlanResult:
    """Everything that can be asked for."""
    offer = priced("A100-80G", 2.0)
    one = shape(offer=offer)
    asked = question(rate_per_s=25.0, ttft_ms=250.0)
    there = deployment(Layout.APART, Side(shape=one, workers=1), Side(shape=one, workers=1))
    trace = draw_traffic(asked.traffic, 1500, 25.0, 1)
    extras = Extras(current=there, rates=((Surprise.MEAN, 12.0),), trace=trace, window_s=25.0, curves=True)
    return answer(asked, space(one), Here(asked.traffic, simulate), extras)


def test_the_answer_has_all_parts(full: PlanResult) -> None:
    layouts = [plan.layout for plan in full.plans]
    assert Layout.APART in layouts
    assert Layout.PAIRED in layouts
    assert {Layout.MIXED, Layout.PREFILL_FIRST} & set(layouts)
    best = full.plans[0]
    assert best.holds
    assert best.price_per_hour == pytest.approx(2.0 * best.gpus)
    assert best.spare == pytest.approx(best.goodput_per_s.mean / 25.0 - 1)
    tokens_per_hour = 25.0 * 101 * 3600
    assert best.cost_per_million_tokens == pytest.approx(2.0 * best.gpus / tokens_per_hour * 1e6)
    assert [plan.price_per_hour for plan in full.plans] == sorted(plan.price_per_hour or 0 for plan in full.plans)
    dearer = [plan for plan in full.plans if (plan.price_per_hour or 0) > 1.01 * (best.price_per_hour or 0)]
    assert dearer
    assert not any(plan.tied_with_best for plan in (best, *dearer))
    assert full.subject == min(place for place, layout in enumerate(layouts) if layout in (Layout.APART, Layout.PAIRED))
    assert Surprise.MEAN in {case.surprise for case in full.headroom}
    assert full.current is not None
    assert not full.current.holds, "one prefill worker does 20/s at most"
    assert full.current.attainment is None
    assert full.current_headroom
    assert full.schedule is not None
    assert len(full.schedule.windows) == 3
    assert {one.duty for one in full.alone} == {Duty.PREFILL, Duty.DECODE}
    shares = [point.attainment.mean for point in best.curve]
    assert shares[0] == 1.0
    assert shares[-1] < 0.9
    users = [point.output_tokens_per_user_s or 0.0 for point in best.curve]
    assert users == sorted(users, reverse=True), "more load, slower answers"
    assert full.simulations > 100


def test_json_there_and_back(full: PlanResult) -> None:
    text = to_json(full)
    assert from_json(text) == full
    assert json.loads(text)["schema_version"] == results.SCHEMA_VERSION


def test_json_of_another_version_or_shape_is_refused(full: PlanResult) -> None:
    document = json.loads(to_json(full))
    with pytest.raises(PlanError, match=r"schema_version: 2 cannot be read"):
        from_json(json.dumps(document | {"schema_version": 2}))
    del document["plans"][0]["gpus"]
    with pytest.raises(PlanError, match=r"plans\.0\.gpus"):
        from_json(json.dumps(document))
    with pytest.raises(PlanError, match="the text"):
        from_json("{")


def test_every_field_of_the_json_is_documented() -> None:
    text = DOCUMENT.read_text()
    schema = json_schema()
    names = {name for part in (schema, *schema["$defs"].values()) for name in part.get("properties", {})}
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert names >= {field.name for field in fields(PlanResult)}
    assert is_dataclass(Plan)


def test_equal_plans_are_ties_and_cheaper_ones_are_not() -> None:
    """Two accelerators with different names, of the same speed and price; a third is dearer."""
    offers = [priced("A100-80G", 2.0), priced("A100-40G", 2.0), priced("H200", 9.0)]
    where = space(*(shape(offer=offer) for offer in offers))
    asked = question(rate_per_s=25.0, ttft_ms=250.0, layouts=(Layout.PAIRED,))
    found = answer(asked, where, Here(asked.traffic, simulate), Extras())
    pairs = [plan for plan in found.plans if plan.layout is Layout.PAIRED]
    assert len(pairs) >= 2
    first = found.plans[0]
    assert not first.tied_with_best
    same = [plan for plan in pairs if plan is not first and plan.price_per_hour == first.price_per_hour]
    assert first.layout is not Layout.PAIRED or all(plan.tied_with_best for plan in same)
    assert all(not plan.tied_with_best for plan in found.plans if plan.price_per_hour != first.price_per_hour)


@pytest.mark.parametrize(
    ("rate", "goodputs", "workers", "tied"),
    [
        (25.0, (30.0, 30.5), (3, 3), True),
        (25.0, (30.0, 40.0), (3, 3), False),  # the same cost, and more to spare
        (25.0, (30.0, 30.5), (3, 4), False),  # as good, and dearer
        (None, (30.0, 30.5), (3, 4), True),
        (None, (30.0, 31.5), (3, 3), False),
    ],
)
def test_what_a_tie_is(rate: float | None, goodputs: tuple[float, float], workers: tuple[int, int], tied: bool) -> None:
    asked = question(rate_per_s=rate, gpus=20)
    one = Side(shape=shape(), workers=2)
    first, second = (
        Found(
            deployment=deployment(Layout.APART, one, Side(shape=shape(), workers=count)),
            goodput=Interval(mean=goodput, half_width=0.4, replications=3),
            assessment=None,
        )
        for goodput, count in zip(goodputs, workers, strict=True)
    )
    assert _ties(asked, first, second) is tied


def test_only_what_there_is() -> None:
    one = shape()
    asked = question(rate_per_s=5.0)
    there = deployment(Layout.APART, Side(shape=one, workers=1), Side(shape=one, workers=1))
    found = answer(asked, space(one), Here(asked.traffic, simulate), Extras(current=there, only_current=True))
    assert found.plans == ()
    assert found.current is not None
    assert found.current.holds
    assert found.patch is None
    assert "no plan" in found.patch_note


def test_no_plan_says_what_to_do() -> None:
    asked = question(rate_per_s=500.0, gpus=2)
    found = answer(asked, space(), Here(asked.traffic, simulate), Extras())
    assert found.plans == ()
    assert any("no plan serves the rate: offer more GPUs" in warning for warning in found.warnings)


def cluster(pools: list[dict[str, Any]]) -> InferenceCluster:
    return InferenceCluster.model_validate(
        {
            "apiVersion": "serving.headrace.dev/v1alpha1",
            "kind": "InferenceCluster",
            "metadata": {"name": "chat"},
            "spec": {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "pools": pools},
        }
    )


@pytest.mark.parametrize(("prefill", "decode"), [((1, 1), (1, 1)), ((4, 1), (2, 2))])
@pytest.mark.parametrize("layout", [Layout.APART, Layout.PAIRED])
def test_the_patch_is_a_valid_cluster(layout: Layout, prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    sides = (Side(shape=shape(*prefill), workers=3), Side(shape=shape(*decode), workers=12))
    patch, note = patch_of(deployment(layout, *sides), Nodes(), ())
    assert patch is not None
    pools = cluster(patch["spec"]["pools"]).spec.pools
    assert [(pool.name, pool.role, pool.replicas) for pool in pools] == [
        ("prefill", PoolRole.PREFILL, 3),
        ("decode", PoolRole.DECODE, 12),
    ]
    assert [(pool.parallelism.tensor, pool.parallelism.pipeline) for pool in pools] == [prefill, decode]
    scaling = Scaling.ELASTIC if prefill == decode else Scaling.STATIC
    assert {pool.scaling for pool in pools} == {scaling}
    assert ("no worker flips" in note) is (prefill != decode)
    assert ("pod affinity" in note) is (layout is Layout.PAIRED)


def test_the_patch_keeps_what_a_pool_has() -> None:
    template = {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "A100"}}}
    known = Pool(
        name="fill", role=PoolRole.PREFILL, replicas=2, min_replicas=2, parallelism=Parallelism(), template=template
    )
    sides = (Side(shape=shape(), workers=3), Side(shape=shape(), workers=2))
    patch, _ = patch_of(deployment(Layout.APART, *sides), Nodes(), (known,))
    assert patch is not None
    first, second = patch["spec"]["pools"]
    assert (first["name"], first["template"], first["replicas"], first["minReplicas"]) == ("fill", template, 3, 2)
    assert second["name"] == "decode"
    static, _ = patch_of(
        deployment(Layout.APART, *sides), Nodes(), (known.model_copy(update={"scaling": Scaling.STATIC}),)
    )
    assert static is not None
    assert static["spec"]["pools"][0]["scaling"] == "Static"
    cluster(static["spec"]["pools"])


@pytest.mark.parametrize(
    ("sides", "layout", "nodes", "why"),
    [
        (((8, 2), (1, 1)), Layout.APART, Nodes(per_worker=2), "a worker is one pod on one node of 8"),
        (((1, 1), (16, 2)), Layout.APART, Nodes(gpus=64), "a worker is one pod"),
        (((1, 1), (1, 1)), Layout.MIXED, Nodes(), "colocated workers are no InferenceCluster"),
    ],
)
def test_what_cannot_be_a_cluster_says_why(
    sides: tuple[tuple[int, int], tuple[int, int]], layout: Layout, nodes: Nodes, why: str
) -> None:
    made = deployment(layout, *(Side(shape=shape(*degrees), workers=1) for degrees in sides))
    patch, note = patch_of(made, nodes, ())
    assert patch is None
    assert why in note
    many = deployment(Layout.APART, Side(shape=shape(), workers=1001), Side(shape=shape(), workers=1))
    assert "1001 workers" in patch_of(many, Nodes(), ())[1]


def test_estimates_are_warned_of() -> None:
    one = shape()
    guess = replace(one.profile.provenance, kind=Kind.ESTIMATED)
    guessed = replace(one, profile=replace(one.profile, provenance=guess))
    asked = question(rate_per_s=5.0, layouts=(Layout.APART,))
    found = answer(asked, space(guessed), Here(asked.traffic, simulate), Extras())
    assert any("estimated from datasheets" in warning for warning in found.warnings)
