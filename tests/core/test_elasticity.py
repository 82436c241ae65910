"""IdleThreshold: named situations, and what it may never do in any."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.api.names import Role
from headrace_core.policy import elasticity
from headrace_core.policy.elasticity import Decision, ElasticityView, PoolView, Reason, WorkerView

IDLE, BUSY = 0.02, 0.80


def worker(pod: str, busy: float | None = BUSY, **facts: bool) -> WorkerView:
    """A worker."""
    return WorkerView(pod=pod, busy_share=busy, **facts)


def pool(name: str, *workers: WorkerView, role: Role | None = None, **facts: object) -> PoolView:
    """An Elastic pool of one to eight workers, of the role that its name begins with."""
    guessed = Role.PREFILL if name.startswith("p") else Role.DECODE
    made = PoolView(
        name=name,
        role=role or guessed,
        elastic=True,
        shape=(1, 1),
        minimum=1,
        maximum=8,
        desired=len(workers),
        workers=workers,
    )
    return replace(made, **facts)  # type: ignore[arg-type]


def view(*pools: PoolView, **facts: object) -> ElasticityView:
    """A cluster whose flips are allowed, none under way."""
    made = ElasticityView(
        pools=pools,
        flips_allowed=True,
        flips_under_way=0,
        flips_in_hour=0,
        max_concurrent=1,
        max_per_hour=20,
        idle_below=0.10,
        idle_for_s=60.0,
    )
    return replace(made, **facts)  # type: ignore[arg-type]


IDLE_PREFILL = pool("p", worker("w0"), worker("w1", IDLE))
BUSY_DECODE = pool("d", worker("w2"))
FLIP_W1 = Decision(Reason.IDLE_WORKER, "w1", "p", "d")

CASES: dict[str, tuple[ElasticityView, Decision | Reason]] = {
    "an idle prefill worker, decode busy": (view(IDLE_PREFILL, BUSY_DECODE), FLIP_W1),
    "an idle decode worker, prefill busy": (
        view(pool("p", worker("w0")), pool("d", worker("w1"), worker("w2", IDLE))),
        Decision(Reason.IDLE_WORKER, "w2", "d", "p"),
    ),
    "the idlest goes": (
        view(pool("p", worker("w0", 0.05), worker("w1", 0.01), worker("w2", 0.03)), BUSY_DECODE),
        FLIP_W1,
    ),
    "of equally idle ones the first by name": (
        view(pool("p", worker("w3", IDLE), worker("w1", IDLE)), BUSY_DECODE),
        FLIP_W1,
    ),
    "to the busiest pool, whatever a worker that is not ready does": (
        view(
            IDLE_PREFILL,
            pool("d1", worker("w2", 0.7)),
            pool("d2", worker("w3", 0.9), worker("w4", None, ready=False), desired=1),
        ),
        Decision(Reason.IDLE_WORKER, "w1", "p", "d2"),
    ),
    "to the busiest pool": (
        view(IDLE_PREFILL, pool("d", worker("w2", 0.95)), pool("d2", worker("w3", 0.5))),
        FLIP_W1,
    ),
    "exactly at the threshold is busy": (
        view(pool("p", worker("w0"), worker("w1", 0.10)), BUSY_DECODE),
        Reason.NOBODY_IDLE,
    ),
    "all busy": (view(pool("p", worker("w0"), worker("w1")), BUSY_DECODE), Reason.NOBODY_IDLE),
    "all idle": (
        view(pool("p", worker("w0", IDLE), worker("w1", IDLE)), pool("d", worker("w2", IDLE))),
        Reason.TARGET_NOT_BUSY,
    ),
    "one of the other pool is idle": (
        view(IDLE_PREFILL, pool("d", worker("w2"), worker("w3", IDLE))),
        Reason.TARGET_NOT_BUSY,
    ),
    "forbidden": (view(IDLE_PREFILL, BUSY_DECODE, flips_allowed=False), Reason.FLIPS_FORBIDDEN),
    "one under way": (view(IDLE_PREFILL, BUSY_DECODE, flips_under_way=1), Reason.FLIP_UNDER_WAY),
    "two at a time": (view(IDLE_PREFILL, BUSY_DECODE, flips_under_way=1, max_concurrent=2), FLIP_W1),
    "the hour's budget is spent": (view(IDLE_PREFILL, BUSY_DECODE, flips_in_hour=20), Reason.OVER_HOURLY_BUDGET),
    "the last of the budget": (view(IDLE_PREFILL, BUSY_DECODE, flips_in_hour=19), FLIP_W1),
    "the idle worker's load is unknown": (
        view(pool("p", worker("w0"), worker("w1", None)), BUSY_DECODE),
        Reason.METRICS_UNKNOWN,
    ),
    "the busy pool's load is unknown": (view(IDLE_PREFILL, pool("d", worker("w2", None))), Reason.METRICS_UNKNOWN),
    "a third worker's load is unknown": (
        view(pool("p", worker("w0", None), worker("w1", IDLE)), BUSY_DECODE),
        Reason.METRICS_UNKNOWN,
    ),
    "a static pool's load does not matter": (
        view(IDLE_PREFILL, BUSY_DECODE, pool("p2", worker("w9", None), elastic=False)),
        FLIP_W1,
    ),
    "a worker that is still starting has no load": (
        view(pool("p", worker("w0"), worker("w1", IDLE), worker("w3", None, ready=False)), BUSY_DECODE),
        FLIP_W1,
    ),
    "at its minimum": (view(pool("p", worker("w1", IDLE)), BUSY_DECODE), Reason.BELOW_MINIMUM),
    "at a minimum of two": (view(replace(IDLE_PREFILL, minimum=2), BUSY_DECODE), Reason.BELOW_MINIMUM),
    "the other one is not ready": (
        view(pool("p", worker("w0", ready=False), worker("w1", IDLE)), BUSY_DECODE),
        Reason.BELOW_MINIMUM,
    ),
    "the other one is leaving already": (
        view(pool("p", worker("w0", flipping=True), worker("w1", IDLE)), BUSY_DECODE, max_concurrent=2),
        Reason.BELOW_MINIMUM,
    ),
    "more pods than desired": (view(replace(IDLE_PREFILL, desired=1), BUSY_DECODE), Reason.BELOW_MINIMUM),
    "the other pool is full": (view(IDLE_PREFILL, replace(BUSY_DECODE, maximum=1)), Reason.ABOVE_MAXIMUM),
    "the other pool waits for a pod": (view(IDLE_PREFILL, replace(BUSY_DECODE, desired=2)), Reason.TARGET_NOT_READY),
    "the other pool's pod is starting": (
        view(IDLE_PREFILL, pool("d", worker("w2"), worker("w3", None, ready=False))),
        Reason.TARGET_NOT_READY,
    ),
    "the other pool has nobody ready": (
        view(IDLE_PREFILL, pool("d", worker("w2", None, ready=False))),
        Reason.TARGET_NOT_READY,
    ),
    "the other pool gets one already": (
        view(IDLE_PREFILL, replace(BUSY_DECODE, arriving=1), max_concurrent=2),
        Reason.TARGET_NOT_READY,
    ),
    "cooling down": (
        view(pool("p", worker("w0"), worker("w1", IDLE, cooling=True)), BUSY_DECODE),
        Reason.COOLING_DOWN,
    ),
    "the second idlest where the idlest cools down": (
        view(pool("p", worker("w0", 0.01, cooling=True), worker("w1", IDLE)), BUSY_DECODE),
        FLIP_W1,
    ),
    "another shape": (view(IDLE_PREFILL, replace(BUSY_DECODE, shape=(2, 1))), Reason.NO_POOL_OF_SHAPE),
    "another pool of the same role": (view(IDLE_PREFILL, pool("p2", worker("w2"))), Reason.NO_POOL_OF_SHAPE),
    "the other pool is static": (view(IDLE_PREFILL, replace(BUSY_DECODE, elastic=False)), Reason.NO_POOL_OF_SHAPE),
    "its own pool is static": (view(replace(IDLE_PREFILL, elastic=False), BUSY_DECODE), Reason.NOBODY_IDLE),
    "idle while not ready": (
        view(pool("p", worker("w0"), worker("w1", IDLE, ready=False)), BUSY_DECODE),
        Reason.NOBODY_IDLE,
    ),
    "no workers at all": (view(pool("p"), pool("d")), Reason.NOBODY_IDLE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_decision(case: str) -> None:
    seen, expected = CASES[case]
    decision = elasticity.decide(seen)
    assert decision == (Decision(expected) if isinstance(expected, Reason) else expected)


def test_every_reason_has_a_case() -> None:
    shown = {expected if isinstance(expected, Reason) else expected.reason for _, expected in CASES.values()}
    assert shown == set(Reason)


@pytest.mark.parametrize("case", CASES)
def test_the_decision_in_words(case: str) -> None:
    seen, _ = CASES[case]
    decision = elasticity.decide(seen)
    words = elasticity.explain(decision, seen)
    assert words.startswith("hold: ") != decision.flips
    assert "{" not in words


def test_the_words_give_the_figures() -> None:
    seen = view(IDLE_PREFILL, BUSY_DECODE)
    words = elasticity.explain(elasticity.decide(seen), seen)
    assert words == "w1 was busy 2.0%, under 10% of 1m, while all of pool d are busy (w2 80.0%)"
    seen = view(pool("p", worker("w0", None), worker("w1", None)), BUSY_DECODE)
    assert elasticity.explain(elasticity.decide(seen), seen) == "hold: the load of w0, w1 is unknown"


workers = st.builds(
    WorkerView,
    pod=st.sampled_from([f"w{n}" for n in range(99)]),
    busy_share=st.sampled_from([None, 0.0, 0.05, 0.1, 0.5, 1.0, 0.0, 0.6]),
    ready=st.sampled_from([True, True, True, False]),
    flipping=st.sampled_from([False, False, False, True]),
    cooling=st.sampled_from([False, False, True]),
)
pools = st.builds(
    PoolView,
    name=st.sampled_from("abcdefgh"),
    role=st.sampled_from(Role),
    elastic=st.sampled_from([True, True, False]),
    shape=st.sampled_from([(1, 1), (1, 1), (2, 1)]),
    minimum=st.integers(1, 3),
    maximum=st.integers(1, 5),
    desired=st.integers(1, 5),
    workers=st.lists(workers, max_size=4).map(tuple),
    arriving=st.sampled_from([0, 0, 1]),
)


@st.composite
def clusters(draw: st.DrawFn) -> ElasticityView:
    """Any cluster, also ones that no operator would show. Pods have names of their own."""
    found = draw(st.lists(pools, max_size=5, unique_by=lambda one: one.name))
    for index, one in enumerate(found):
        for number, each in enumerate(one.workers):
            each.pod = f"w{index}{number}"
    return view(*found, flips_under_way=draw(st.integers(0, 2)), max_concurrent=2)


@given(clusters())
def test_it_never_breaks_a_bound_and_never_acts_on_the_unknown(seen: ElasticityView) -> None:
    before = copy.deepcopy(seen)
    decision = elasticity.decide(seen)
    assert seen == before, "a policy does not change its view"
    assert elasticity.explain(decision, seen)
    if not decision.flips:
        return
    by_name = {one.name: one for one in seen.pools}
    source, target = by_name[decision.source], by_name[decision.target]
    chosen = next(one for one in source.workers if one.pod == decision.pod)
    assert (source.elastic, target.elastic) == (True, True)
    assert source.role is not target.role
    assert source.shape == target.shape
    staying = [one for one in source.workers if one.ready and not one.flipping and one is not chosen]
    assert len(staying) >= source.minimum
    assert source.desired - 1 >= source.minimum
    assert target.desired + target.arriving + 1 <= target.maximum
    assert len(target.workers) + target.arriving + 1 <= target.maximum
    assert chosen.busy_share is not None
    assert chosen.busy_share < seen.idle_below
    assert (chosen.ready, chosen.flipping, chosen.cooling) == (True, False, False)
    assert [one.busy_share for one in target.workers if one.ready and one.busy_share is None] == []
    assert all((one.busy_share or 0) >= seen.idle_below for one in target.workers if one.ready)


@given(clusters(), st.data())
def test_no_decision_gets_bolder_when_a_metric_is_lost(seen: ElasticityView, data: st.DataObject) -> None:
    known = [one for each in seen.pools if each.elastic for one in each.workers if one.ready]
    if not known:
        return
    data.draw(st.sampled_from(known)).busy_share = None
    assert not elasticity.decide(seen).flips
