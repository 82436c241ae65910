"""What a deployment stands, over a trace, and what it becomes as a patch."""

from __future__ import annotations

import math

import pytest

from headrace_core.planner.binding import binding_of, loads_at
from headrace_core.planner.caps import Resource
from headrace_core.planner.deployment import Deployment, Side, caps_of
from headrace_core.planner.headroom import Surprise, headroom, scaled
from headrace_core.planner.question import Layout
from headrace_core.planner.runner import Here
from headrace_core.sim.attainment import Stage
from headrace_core.sim.lengths import Lengths
from tests.core.planner.builders import Known, question, shape, space
from tests.core.planner.queue import simulate

pytestmark = pytest.mark.usefixtures("short_runs")


def plan(layout: Layout, *workers: int) -> Deployment:
    sides = tuple(Side(shape=shape(), workers=count) for count in workers)
    return Deployment(layout=layout, sides=sides, token_budget=2048)


def test_every_surprise_is_looked_at() -> None:
    """2 workers of either role: a prefill worker does 20/s, 17/s of long prompts; a decode worker does 33/s."""
    asked = question(rate_per_s=30.0, ttft_ms=500.0)
    cases = headroom(asked, space(), plan(Layout.APART, 2, 2), Here(asked.traffic, simulate), ((Surprise.PEAK, 36.0),))
    found = {case.surprise: case for case in cases}
    assert list(found)[:2] == [Surprise.NONE, Surprise.PEAK]
    assert set(found) == set(Surprise) - {Surprise.MEAN, Surprise.WORKER_LOST, Surprise.PAIR_LOST}
    assert {one for one in found if not found[one].holds} == {Surprise.PREFILL_LOST, Surprise.ALL_UP}
    lost = found[Surprise.PREFILL_LOST]
    assert (lost.share, lost.holds) == (None, False)
    assert lost.cap_per_s == pytest.approx(1000 / (40 + 10 * 400 / 2048))
    assert found[Surprise.RATE_UP].rate_per_s == pytest.approx(36.0)


@pytest.mark.parametrize(
    ("layout", "workers", "lost"),
    [
        (Layout.APART, (1, 1), {Surprise.PREFILL_LOST, Surprise.DECODE_LOST}),
        (Layout.PAIRED, (1, 1), {Surprise.PAIR_LOST}),
        (Layout.MIXED, (1,), {Surprise.WORKER_LOST}),
    ],
)
def test_a_last_worker_that_is_lost_leaves_nothing(
    layout: Layout, workers: tuple[int, ...], lost: set[Surprise]
) -> None:
    asked = question(rate_per_s=1.0)
    cases = headroom(asked, space(), plan(layout, *workers), Known(lambda _: 50.0))
    gone = {case.surprise for case in cases if case.cap_per_s == 0}
    assert gone == lost
    assert all(case.share is None and not case.holds for case in cases if case.surprise in lost)


def test_longer_requests_are_drawn_longer_and_lower_the_cap() -> None:
    asked, runner = question(rate_per_s=5.0), Known(lambda _: 50.0)
    cases = {case.surprise: case for case in headroom(asked, space(), plan(Layout.APART, 1, 1), runner)}
    factors = {(trial.prompt_factor, trial.output_factor) for trial in runner.seen}
    assert factors == {(1.0, 1.0), (1.2, 1.0), (1.0, 1.2), (0.8, 0.8), (1.2, 1.2)}
    usual = cases[Surprise.NONE].cap_per_s
    assert cases[Surprise.PROMPTS_UP].cap_per_s == pytest.approx(usual / 1.2)
    assert cases[Surprise.RATE_UP].cap_per_s == usual
    longer = scaled(Lengths([1, 100], [1, 7], "x"), 1.2, 0.5)
    assert (longer.prompt_tokens, longer.output_tokens) == ([1, 120], [1, 4])


def test_without_a_rate_there_is_no_headroom() -> None:
    asked = question(rate_per_s=None, gpus=2)
    assert headroom(asked, space(), plan(Layout.APART, 1, 1), Known(lambda _: 50.0)) == ()


@pytest.mark.parametrize(
    ("workers", "rate", "ttft_ms", "resource", "stage"),
    [
        ((1, 4), 18.0, 150.0, Resource.PREFILL_COMPUTE, Stage.QUEUE),
        ((8, 1), 32.0, 150.0, Resource.DECODE_STEP, Stage.DECODE),
        # decode is the more loaded side, but a TTFT near the floor leaves prefill no queue
        ((2, 1), 28.0, 55.0, Resource.PREFILL_COMPUTE, Stage.QUEUE),
    ],
)
def test_what_binds_is_the_side_that_is_short(
    workers: tuple[int, int], rate: float, ttft_ms: float, resource: Resource, stage: Stage
) -> None:
    asked = question(rate_per_s=rate, ttft_ms=ttft_ms)
    deployment = plan(Layout.APART, *workers)
    found = binding_of(asked, space(), deployment, rate, Here(asked.traffic, simulate))
    assert found.resource is resource
    assert found.misses[0][0] is stage
    assert found.loads == loads_at(asked, space(), deployment, rate)
    assert [load.share for load in found.loads] == sorted((load.share for load in found.loads), reverse=True)


def test_loads_are_shares_of_the_caps() -> None:
    asked = question()
    deployment = plan(Layout.APART, 2, 3)
    caps = {cap.resource: cap.rate_per_s for cap in caps_of(asked, space(), deployment)}
    found = loads_at(asked, space(), deployment, 7.0)
    assert {load.resource: load.share for load in found} == {
        resource: pytest.approx(7.0 / cap) for resource, cap in caps.items()
    }
    assert caps[Resource.TRANSFER] < math.inf


def test_caps_count_the_workers_of_each_side() -> None:
    asked = question()
    one = {cap.resource: cap.rate_per_s for cap in caps_of(asked, space(), plan(Layout.APART, 1, 1))}
    many = {cap.resource: cap.rate_per_s for cap in caps_of(asked, space(), plan(Layout.APART, 2, 3))}
    factors = {resource: many[resource] / cap for resource, cap in one.items()}
    assert factors[Resource.PREFILL_COMPUTE] == pytest.approx(2)
    assert factors[Resource.TRANSFER] == pytest.approx(2), "the side with fewer links"
    assert factors[Resource.DECODE_STEP] == pytest.approx(3)
