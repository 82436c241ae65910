"""What the door counts, and how long the worker was busy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_core.api.names import Role
from headrace_core.api.wire import Handoff, Phase
from headrace_worker.door import BusyClock, Door
from headrace_worker.role import Standing
from tests.worker.fakes import IDLE


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(clock: Clock) -> Door:
    return Door(Standing(Role.PREFILL), clock)


LEFT_OVER = {
    "nothing": ({}, True),
    "queued": ({"queued_requests": 1}, False),
    "running": ({"running_requests": 1}, False),
    "being received": ({"receiving_requests": 1}, False),
    "held for others": ({"held_requests": 1}, False),
}


@pytest.mark.parametrize(("changes", "drained"), LEFT_OVER.values(), ids=LEFT_OVER.keys())
def test_drained_means_that_nothing_is_left(door: Door, changes: dict[str, Any], drained: bool) -> None:
    assert door.is_drained(replace(IDLE, **changes)) is drained


def test_a_request_that_the_engine_has_not_seen_yet_is_counted(door: Door) -> None:
    assert door.enter(None) is None
    assert not door.is_drained(IDLE)
    door.leave()
    assert door.is_drained(IDLE)


def test_who_is_turned_away_is_not_counted(door: Door) -> None:
    wrong = Handoff(request_id="r", expected_role=Role.DECODE, expected_epoch=0)
    assert door.enter(wrong) == "another_role"
    assert door.in_flight == 0


def test_a_change_is_told_once(door: Door) -> None:
    told: list[Phase] = []
    door.on_change(lambda: told.append(door.standing.phase))
    door.standing = door.standing
    door.standing = replace(door.standing, phase=Phase.DRAINING)
    assert told == [Phase.DRAINING]


def test_busy_seconds_are_those_with_work_at_the_door_or_in_the_engine(door: Door, clock: Clock) -> None:
    clock.now_s = 110.0
    assert door.busy_s == 0.0
    door.enter(None)
    clock.now_s = 112.0
    door.enter(None)
    clock.now_s = 113.0
    door.leave()
    assert door.busy_s == 3.0
    door.leave()
    clock.now_s = 120.0
    assert door.busy_s == 3.0
    door.look(replace(IDLE, running_requests=1))
    clock.now_s = 121.0
    door.look(replace(IDLE, held_requests=3))
    clock.now_s = 130.0
    assert door.busy_s == 4.0


@pytest.mark.parametrize("field", ["queued_requests", "running_requests", "receiving_requests"])
def test_what_counts_as_work_in_the_engine(door: Door, clock: Clock, field: str) -> None:
    door.look(replace(IDLE, **{field: 1}))
    clock.now_s += 2.0
    assert door.busy_s == 2.0


def test_a_request_that_has_left_is_no_work_until_the_next_look(door: Door, clock: Clock) -> None:
    door.enter(None)
    clock.now_s += 0.05
    door.look(replace(IDLE, running_requests=1))
    clock.now_s += 0.01
    door.leave()
    clock.now_s += 0.09
    door.look(IDLE)
    assert door.busy_s == pytest.approx(0.06)


def test_busy_seconds_never_fall() -> None:
    busy = BusyClock(10.0)
    busy.set(busy=True, now_s=10.0)
    busy.set(busy=True, now_s=9.0)
    assert busy.total_s(9.0) == 0.0
    assert busy.total_s(11.0) >= 1.0
