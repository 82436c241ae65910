"""The operator ends right after each step of a flip; the next one finds the state and brings it to a right end."""

from __future__ import annotations

import json

import pytest

from e2e.deployed import Flip, Worker, until
from e2e.operator.conftest import Light
from e2e.operator.process import Operator
from headrace_core.api import names

FLIP_TIMEOUT_S = 40.0
STEPS = ["Reserved", "Labelled", "Draining", "Switched", "Relabelled", "RelabelledOutcome"]


def worker(light: Light, name: str) -> Worker:
    return next(found for found in light.deployed.workers() if found.name == name)


def finished(light: Light, name: str) -> Flip:
    def look() -> list[Flip]:
        return [flip for flip in light.deployed.finished_flips() if flip.name == name]

    return until(f"the end of {name}", look, timeout_s=FLIP_TIMEOUT_S, seen=light.in_words)[0]


def closed(light: Light) -> bool:
    return not light.deployed.status().get("activeFlips") and light.is_settled()


def is_draining(light: Light) -> bool:
    return [flip["step"] for flip in light.deployed.status().get("activeFlips", [])] == ["Draining"]


def pools(light: Light) -> dict[str, tuple[int, int]]:
    return {pool["name"]: (pool["desired"], pool["ready"]) for pool in light.deployed.status()["pools"]}


@pytest.mark.parametrize("step", STEPS)
def test_the_next_operator_finishes_the_flip(
    light: Light, operator: Operator, other_operator: Operator, step: str
) -> None:
    light.apply()
    operator.start(crash_after=step)
    light.wait_ready()
    before = worker(light, "light-w0")

    light.deployed.ask_for_flip("f1", "light-w0", "decode")
    operator.wait_crashed()
    other_operator.start()

    assert finished(light, "f1").outcome == "Succeeded"
    until("the journal to be closed", lambda: closed(light), timeout_s=20, seen=light.in_words)
    after = worker(light, "light-w0")
    assert (after.uid, after.role, after.pool, after.epoch) == (before.uid, "decode", "decode", 1)
    assert pools(light) == {"prefill": (1, 1), "decode": (2, 2)}
    assert len(light.pods()) == 3
    assert not [mark for mark in light.pods()["light-w0"]["metadata"]["annotations"] if "flip" in mark]


def test_a_lost_status_is_rebuilt(light: Light, operator: Operator, other_operator: Operator) -> None:
    light.apply()
    light.drain("3")
    operator.start(crash_after="Draining")
    light.wait_ready()
    light.deployed.ask_for_flip("f1", "light-w0", "decode")
    operator.wait_crashed()
    light.cluster.kubectl(
        "replace", "--subresource=status", "-f", "-", "-n", light.namespace,
        stdin=_without_status(light),
    )  # fmt: skip
    other_operator.start()

    assert finished(light, "f1").outcome == "Succeeded"
    until("the journal to be closed", lambda: closed(light), timeout_s=20, seen=light.in_words)
    assert "FlipRebuilt" in other_operator.log.read_text()
    assert pools(light) == {"prefill": (1, 1), "decode": (2, 2)}


def _without_status(light: Light) -> str:
    body = light.body()
    body["status"] = {}
    return json.dumps(body)


def test_a_drain_that_never_ends_is_rolled_back(light: Light, operator: Operator) -> None:
    light.apply(elasticity={"mode": "Off", "flips": {"drainTimeout": "1s"}})
    light.drain("never")
    operator.start()
    light.wait_ready()
    before = worker(light, "light-w0")
    light.deployed.ask_for_flip("f1", "light-w0", "decode")

    assert finished(light, "f1").outcome == "RolledBack"
    until("the journal to be closed", lambda: closed(light), timeout_s=20, seen=light.in_words)
    after = worker(light, "light-w0")
    assert (after.uid, after.role, after.pool, after.epoch) == (before.uid, "prefill", "prefill", 1)
    assert pools(light) == {"prefill": (2, 2), "decode": (1, 1)}


def test_a_worker_deleted_in_a_flip_is_replaced(light: Light, operator: Operator) -> None:
    light.apply()
    light.drain("never")
    operator.start()
    light.wait_ready()
    light.deployed.ask_for_flip("f1", "light-w0", "decode")
    until("the drain", lambda: worker(light, "light-w0").role == names.ROLE_DRAINING, timeout_s=10, seen=light.in_words)
    light.cluster.kubectl("delete", "pod", "light-w0", "-n", light.namespace, "--wait=false")

    assert finished(light, "f1").outcome == "Replaced"
    until("a new worker", lambda: closed(light), timeout_s=30, seen=light.in_words)
    assert pools(light) == {"prefill": (2, 2), "decode": (1, 1)}


def test_two_operators_for_a_moment(light: Light, operator: Operator, other_operator: Operator) -> None:
    """The first is stopped past its Lease in the middle of a flip and then goes on, beside its successor."""
    light.apply(elasticity={"mode": "Off", "flips": {"drainTimeout": "40s"}})
    light.drain("8")
    operator.start()
    light.wait_ready()
    light.deployed.ask_for_flip("f1", "light-w0", "decode")
    until("the drain", lambda: is_draining(light), timeout_s=10, seen=light.in_words, every_s=0.2)
    operator.pause()
    other_operator.start()
    until("the second to lead", other_operator.leads, timeout_s=20, seen=other_operator.log_tail)
    operator.go_on()

    assert operator.wait(20) == 3, operator.log_tail()
    assert finished(light, "f1").outcome == "Succeeded"
    until("the journal to be closed", lambda: closed(light), timeout_s=20, seen=light.in_words)
    assert worker(light, "light-w0").epoch == 1
    assert pools(light) == {"prefill": (1, 1), "decode": (2, 2)}
    assert len(light.pods()) == 3
