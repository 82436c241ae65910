"""Workers over a trace: as many as each window takes, and no more."""

from __future__ import annotations

import pytest

from headrace_core.planner.deployment import Deployment, Side
from headrace_core.planner.errors import PlanError
from headrace_core.planner.question import Layout
from headrace_core.planner.runner import Here
from headrace_core.planner.schedule import Schedule, schedule
from headrace_core.sim.lengths import fixed
from headrace_core.sim.workload import Workload
from tests.core.planner.builders import Known, question, shape, space
from tests.core.planner.queue import simulate

LENGTHS = fixed(400, 101)


def trace(*rates_per_s: float, window_s: float = 60.0) -> Workload:
    """Even arrivals, window by window."""
    times: list[float] = []
    for number, rate in enumerate(rates_per_s):
        count = round(rate * window_s)
        times += [(number + place / count) * window_s * 1000.0 for place in range(count)] if count else []
    return Workload(times, [400] * len(times), [101] * len(times), [], [], 0, "steps")


def plan(layout: Layout = Layout.APART, *workers: int) -> Deployment:
    sides = tuple(Side(shape=shape(), workers=count) for count in workers or (3, 2))
    return Deployment(layout=layout, sides=sides, token_budget=2048)


def made(played: Workload, deployment: Deployment | None = None, window_s: float = 60.0) -> Schedule:
    asked = question(rate_per_s=50.0, ttft_ms=80.0, lengths=LENGTHS)
    runner = Here(asked.traffic, simulate)
    return schedule(asked, space(), deployment or plan(), played, runner, window_s=window_s)


def test_each_window_gets_the_least_that_holds() -> None:
    """A prompt takes 50 ms, so that 20/s fill a prefill worker; 33/s are all that a decode worker steps in time."""
    found = made(trace(15, 45, 5, 70))
    assert [window.workers for window in found.windows] == [(1, 1), (3, 2), (1, 1), (4, 3)]
    assert all(window.holds and window.share is not None and window.share >= 0.9 for window in found.windows)
    assert [window.rate_per_s for window in found.windows] == [15, 45, 5, 70]
    assert found.gpu_hours == pytest.approx((2 + 5 + 2 + 7) / 60)
    assert found.gpu_hours_at_peak == pytest.approx(7 * 4 / 60)


def test_a_quiet_window_gets_the_fewest_workers_and_says_that_it_does_not_know() -> None:
    found = made(trace(15, 0.1, 15))
    assert (found.windows[1].workers, found.windows[1].share, found.windows[1].requests) == ((1, 1), None, 6)


def test_pairs_are_counted_in_pairs() -> None:
    found = made(trace(15, 45), plan(Layout.PAIRED, 2, 2))
    assert [window.workers for window in found.windows] == [(1, 1), (3, 3)]


def test_colocated_workers_have_one_count() -> None:
    found = made(trace(15, 45), plan(Layout.MIXED, 2))
    assert all(len(window.workers) == 1 for window in found.windows)
    assert found.windows[0].workers < found.windows[1].workers


def test_a_window_is_led_in_by_its_own_beginning_which_is_not_counted() -> None:
    runner = Known(lambda _: 1e9)
    asked = question(rate_per_s=50.0, lengths=LENGTHS)
    schedule(asked, space(), plan(), trace(20, 40), runner, window_s=60.0)
    for trial, count in zip(runner.seen[:2], (1200, 2400), strict=True):
        assert trial.given is not None
        times = trial.given.arrival_ms
        assert (trial.given_warmup, len(times)) == (count // 4, count + count // 4)
        assert times[: count // 4] == pytest.approx([time - 15_000 for time in times[count // 4 : count // 2]])
        assert times == sorted(times)


def test_gpus_that_do_not_suffice_leave_a_window_that_does_not_hold() -> None:
    asked = question(rate_per_s=50.0, ttft_ms=80.0, lengths=LENGTHS, gpus=3)
    found = schedule(asked, space(), plan(Layout.APART, 1, 2), trace(70), Here(asked.traffic, simulate), window_s=60.0)
    assert not found.windows[0].holds
    assert sum(found.windows[0].workers) <= 3


@pytest.mark.parametrize(
    ("window_s", "message"),
    [(0.0, r"schedule: a window of 0 s has no length"), (0.001, r"schedule: .* are too many; give a longer one")],
)
def test_bad_windows(window_s: float, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(trace(15), window_s=window_s)
