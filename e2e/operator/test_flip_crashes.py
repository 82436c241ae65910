"""The operator ends right after each step of a flip; the next one finds the state and brings it to a right end."""

from __future__ import annotations

import json

import pytest

from e2e.deployed import until
from e2e.operator.conftest import Light
from e2e.operator.process import CRASH_POINTS, EXIT_LEASE_LOST, Operator
from headrace_core.api import names


def is_draining(light: Light) -> bool:
    return [flip["step"] for flip in light.deployed.status().get("activeFlips", [])] == ["Draining"]


@pytest.mark.parametrize("step", CRASH_POINTS)
def test_the_next_operator_finishes_the_flip(
    light: Light, operator: Operator, other_operator: Operator, step: str
) -> None:
    # The next operator waits for the Lease to expire and starts first: on a busy machine longer than a drain may take.
    light.apply(elasticity={"mode": "Off", "flips": {"drainTimeout": "60s"}})
    operator.start(crash_after=step)
    light.wait_ready()
    before = light.worker(0)

    flip = light.ask_for_flip(0, "decode")
    operator.wait_crashed()
    other_operator.start()

    assert light.finished(flip).outcome == "Succeeded"
    light.wait_closed()
    after = light.worker(0)
    assert (after.uid, after.role, after.pool, after.epoch) == (before.uid, "decode", "decode", 1)
    assert light.desired_and_ready() == {"prefill": (1, 1), "decode": (2, 2)}
    assert len(light.pods()) == 3
    assert not [mark for mark in light.pods()[after.name]["metadata"]["annotations"] if "flip" in mark]


def test_a_lost_status_is_rebuilt(light: Light, operator: Operator, other_operator: Operator) -> None:
    light.apply()
    light.drain("3")
    operator.start(crash_after="Draining")
    light.wait_ready()
    flip = light.ask_for_flip(0, "decode")
    operator.wait_crashed()
    without = json.dumps(light.body() | {"status": {}})
    light.cluster.kubectl("replace", "--subresource=status", "-n", light.namespace, "-f", "-", stdin=without)
    other_operator.start()

    assert light.finished(flip).outcome == "Succeeded"
    light.wait_closed()
    assert "FlipRebuilt" in other_operator.log.read_text()
    assert light.desired_and_ready() == {"prefill": (1, 1), "decode": (2, 2)}


def test_a_drain_that_never_ends_is_rolled_back(light: Light, operator: Operator) -> None:
    light.apply(elasticity={"mode": "Off", "flips": {"drainTimeout": "1s"}})
    light.drain("never")
    operator.start()
    light.wait_ready()
    before = light.worker(0)

    assert light.finished(light.ask_for_flip(0, "decode")).outcome == "RolledBack"
    light.wait_closed()
    after = light.worker(0)
    assert (after.uid, after.role, after.pool, after.epoch) == (before.uid, "prefill", "prefill", 1)
    assert light.desired_and_ready() == {"prefill": (2, 2), "decode": (1, 1)}


def test_a_worker_deleted_in_a_flip_is_replaced(light: Light, operator: Operator) -> None:
    light.apply()
    light.drain("never")
    operator.start()
    light.wait_ready()
    flip = light.ask_for_flip(0, "decode")

    def draining() -> bool:
        return light.worker(0).role == names.ROLE_DRAINING

    until("the drain", draining, timeout_s=10, seen=light.in_words)
    light.cluster.kubectl("delete", "pod", light.pod(0), "-n", light.namespace, "--wait=false")

    assert light.finished(flip).outcome == "Replaced"
    light.wait_closed()
    assert light.desired_and_ready() == {"prefill": (2, 2), "decode": (1, 1)}


def test_two_operators_for_a_moment(light: Light, operator: Operator, other_operator: Operator) -> None:
    """The first is stopped past its Lease in the middle of a flip and then goes on, beside its successor."""
    light.apply(elasticity={"mode": "Off", "flips": {"drainTimeout": "40s"}})
    light.drain("8")
    operator.start()
    light.wait_ready()
    flip = light.ask_for_flip(0, "decode")
    until("the drain", lambda: is_draining(light), timeout_s=10, seen=light.in_words, every_s=0.2)
    operator.pause()
    other_operator.start()
    until("the second to lead", other_operator.leads, timeout_s=20, seen=other_operator.log_tail)
    operator.go_on()

    assert operator.wait(20) == EXIT_LEASE_LOST, operator.log_tail()
    assert light.finished(flip).outcome == "Succeeded"
    light.wait_closed()
    assert light.worker(0).epoch == 1
    assert light.desired_and_ready() == {"prefill": (1, 1), "decode": (2, 2)}
    assert len(light.pods()) == 3
