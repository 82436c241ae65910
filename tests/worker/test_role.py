"""Every transition of a worker's role, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_core.api.names import Role
from headrace_core.api.wire import ErrorCode, Handoff, Phase, RoleRequest
from headrace_worker import role
from headrace_worker.role import Change, Identity, Standing, Step

ME = Identity(boot_id="boot-1", pod_uid="uid-1")
READY = Standing(Role.PREFILL, epoch=4, fence=7)
CHANGE = Change(Role.DECODE, began_s=10.0, deadline_s=15.0)
DRAINING = replace(READY, phase=Phase.DRAINING, change=CHANGE)
SWITCHING = replace(READY, phase=Phase.SWITCHING, change=replace(CHANGE, drained_s=12.0))
ROLLING_BACK = replace(READY, phase=Phase.ROLLING_BACK, change=replace(CHANGE, drained_s=15.0))
FAILED = replace(SWITCHING, phase=Phase.FAILED)
STOPPING = replace(READY, stopping=True)


def request(**changes: Any) -> RoleRequest:
    values: dict[str, Any] = {
        "role": Role.DECODE,
        "expected_epoch": 4,
        "drain_timeout": 5.0,
        "pod_uid": "uid-1",
        "boot_id": "boot-1",
        "fence": 7,
    }
    return RoleRequest(**values | changes)


BEGINS = {
    "all named": request(),
    "a higher fence": request(fence=8),
    "no pod named": request(pod_uid=None),
    "no process named": request(boot_id=None),
}


@pytest.mark.parametrize("asked", BEGINS.values(), ids=BEGINS.keys())
def test_a_change_begins(asked: RoleRequest) -> None:
    after, refusal = role.ask(READY, asked, ME, now_s=10.0)
    assert refusal is None
    assert after == replace(DRAINING, fence=asked.fence)
    assert not after.accepts


REFUSALS = {
    "another pod": (READY, request(pod_uid="uid-2"), ErrorCode.WRONG_POD),
    "another process": (READY, request(boot_id="boot-0"), ErrorCode.STALE_BOOT_ID),
    "a lower fence": (READY, request(fence=6), ErrorCode.STALE_FENCE),
    "no fence where one was seen": (READY, request(fence=0), ErrorCode.STALE_FENCE),
    "an older epoch": (READY, request(expected_epoch=3), ErrorCode.STALE_EPOCH),
    "a newer epoch": (READY, request(expected_epoch=5), ErrorCode.STALE_EPOCH),
    "the role it has": (READY, request(role=Role.PREFILL), ErrorCode.ALREADY_IN_ROLE),
    "another role while draining": (DRAINING, request(role=Role.PREFILL), ErrorCode.ROLE_CHANGE_UNDER_WAY),
    "another epoch while draining": (DRAINING, request(expected_epoch=5), ErrorCode.ROLE_CHANGE_UNDER_WAY),
    "another role while switching": (SWITCHING, request(role=Role.PREFILL), ErrorCode.ROLE_CHANGE_UNDER_WAY),
    "the same while rolling back": (ROLLING_BACK, request(), ErrorCode.ROLE_CHANGE_UNDER_WAY),
    "failed": (FAILED, request(), ErrorCode.WORKER_FAILED),
    "shutting down": (STOPPING, request(), ErrorCode.SHUTTING_DOWN),
    "lower fence while draining": (DRAINING, request(fence=6), ErrorCode.STALE_FENCE),
    "another process while draining": (DRAINING, request(boot_id="boot-0"), ErrorCode.STALE_BOOT_ID),
}


@pytest.mark.parametrize(("before", "asked", "code"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_change_is_refused_and_nothing_changes(before: Standing, asked: RoleRequest, code: ErrorCode) -> None:
    after, refusal = role.ask(before, asked, ME, now_s=11.0)
    assert refusal is not None
    assert refusal.code is code
    assert refusal.message
    assert after == before


@pytest.mark.parametrize("before", [DRAINING, SWITCHING], ids=["draining", "switching"])
def test_a_repeat_of_the_change_under_way_is_no_refusal(before: Standing) -> None:
    assert role.ask(before, request(drain_timeout=99.0), ME, now_s=11.0) == (before, None)


def test_a_change_that_is_done_is_not_done_again() -> None:
    done = role.switched(SWITCHING, 5, now_s=12.5)
    _, refusal = role.ask(done, request(), ME, now_s=20.0)
    assert refusal is not None
    assert refusal.code is ErrorCode.STALE_EPOCH


def test_a_refused_request_raises_the_fence_if_it_was_meant_for_this_process() -> None:
    after, refusal = role.ask(READY, request(fence=9, expected_epoch=1), ME, now_s=0.0)
    assert refusal is not None
    assert after.fence == 9
    for other in (request(fence=9, boot_id="boot-0"), request(fence=9, pod_uid="uid-2")):
        assert role.ask(READY, other, ME, now_s=0.0)[0].fence == 7


def test_without_a_uid_of_its_own_a_worker_checks_none() -> None:
    _, refusal = role.ask(READY, request(pod_uid="uid-2"), Identity("boot-1", ""), now_s=0.0)
    assert refusal is None


DRAINS = {
    "still at work": (DRAINING, False, 14.9, Phase.DRAINING),
    "drained": (DRAINING, True, 12.0, Phase.SWITCHING),
    "deadline": (DRAINING, False, 15.0, Phase.ROLLING_BACK),
    "drained at the deadline": (DRAINING, True, 15.0, Phase.SWITCHING),
    "no change": (READY, True, 99.0, Phase.READY),
    "switching already": (SWITCHING, True, 99.0, Phase.SWITCHING),
    "failed": (FAILED, True, 99.0, Phase.FAILED),
}


@pytest.mark.parametrize(("before", "is_drained", "now_s", "phase"), DRAINS.values(), ids=DRAINS.keys())
def test_how_a_drain_goes_on(before: Standing, is_drained: bool, now_s: float, phase: Phase) -> None:
    after = role.drain(before, is_drained=is_drained, now_s=now_s)
    assert after.phase is phase
    assert (after.role, after.epoch) == (before.role, before.epoch)
    if phase is before.phase:
        assert after == before
    else:
        assert after.change is not None
        assert after.change.drained_s == now_s


STEPS = {
    "ready": (READY, None),
    "draining": (DRAINING, None),
    "switching": (SWITCHING, Step(Role.DECODE, 5)),
    "rolling back takes a new epoch too": (ROLLING_BACK, Step(Role.PREFILL, 5)),
    "failed": (FAILED, None),
}


@pytest.mark.parametrize(("standing", "step"), STEPS.values(), ids=STEPS.keys())
def test_what_the_engine_is_told(standing: Standing, step: Step | None) -> None:
    assert role.next_step(standing) == step


def test_a_switch_ends_in_the_new_role_with_its_times() -> None:
    after = role.switched(SWITCHING, 5, now_s=12.5)
    assert (after.role, after.epoch, after.phase, after.change) == (Role.DECODE, 5, Phase.READY, None)
    assert after.accepts
    last = after.last_switch
    assert last is not None
    assert (last.outcome, last.from_role, last.to_role, last.epoch) == ("Succeeded", Role.PREFILL, Role.DECODE, 5)
    assert (last.drain_seconds, last.switch_seconds) == (2.0, 0.5)


def test_a_roll_back_keeps_the_role_and_takes_an_epoch() -> None:
    after = role.switched(ROLLING_BACK, 5, now_s=15.25)
    assert (after.role, after.epoch, after.phase) == (Role.PREFILL, 5, Phase.READY)
    last = after.last_switch
    assert last is not None
    assert (last.outcome, last.from_role, last.to_role) == ("RolledBack", Role.PREFILL, Role.DECODE)
    assert (last.drain_seconds, last.switch_seconds) == (5.0, 0.25)


FAILURES = {
    "an older epoch": (SWITCHING, 4),
    "a newer epoch": (SWITCHING, 6),
    "another epoch in a roll-back": (ROLLING_BACK, 4),
    "nothing was to be switched": (READY, 5),
}


@pytest.mark.parametrize(("standing", "epoch"), FAILURES.values(), ids=FAILURES.keys())
def test_an_engine_that_read_another_epoch_has_failed(standing: Standing, epoch: int) -> None:
    after = role.switched(standing, epoch, now_s=13.0)
    assert after.phase is Phase.FAILED
    assert not after.accepts


def handoff(expected: Role = Role.PREFILL, epoch: int = 4) -> Handoff:
    return Handoff(request_id="r", expected_role=expected, expected_epoch=epoch)


WORK = {
    "as expected": (READY, handoff(), None),
    "without a hand-off": (READY, None, None),
    "another role": (READY, handoff(Role.DECODE), "another_role"),
    "another epoch": (READY, handoff(epoch=3), "another_epoch"),
    "draining": (DRAINING, handoff(), "draining"),
    "draining, without a hand-off": (DRAINING, None, "draining"),
    "switching": (SWITCHING, handoff(), "switching"),
    "rolling back": (ROLLING_BACK, handoff(), "rolling_back"),
    "failed": (FAILED, handoff(), "failed"),
    "shutting down": (STOPPING, handoff(), "shutting_down"),
    "shutting down, without a hand-off": (STOPPING, None, "shutting_down"),
}


@pytest.mark.parametrize(("standing", "given", "reason"), WORK.values(), ids=WORK.keys())
def test_which_work_is_taken(standing: Standing, given: Handoff | None, reason: str | None) -> None:
    assert role.refuse_work(standing, given) == reason


PHASES = {
    "ready": (READY, Phase.READY, None),
    "draining": (DRAINING, Phase.DRAINING, Role.DECODE),
    "rolling back": (ROLLING_BACK, Phase.ROLLING_BACK, Role.DECODE),
    "shutting down": (STOPPING, Phase.DRAINING, None),
    "switching while shutting down": (replace(SWITCHING, stopping=True), Phase.SWITCHING, Role.DECODE),
}


@pytest.mark.parametrize(("standing", "phase", "target"), PHASES.values(), ids=PHASES.keys())
def test_what_others_are_told(standing: Standing, phase: Phase, target: Role | None) -> None:
    told = role.describe(standing, ME, requests=3, held_kv_blocks=8)
    assert (told.phase, told.target_role, told.boot_id) == (phase, target, "boot-1")
    assert (told.role, told.epoch, told.draining_requests, told.held_kv_blocks) == (Role.PREFILL, 4, 3, 8)
