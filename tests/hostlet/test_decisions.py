"""Back-off, thresholds, quantities, phases and backends: the hostlet's decisions, without a cluster."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from e2e.cluster.hostlet.backoff import Backoff, restarts
from e2e.cluster.hostlet.probes import Threshold
from e2e.cluster.hostlet.proxy import frontends
from e2e.cluster.hostlet.quantity import format_divided, parse_quantity
from e2e.cluster.hostlet.services import Addresses
from e2e.cluster.hostlet.status import (
    ContainerRecord,
    PodRecord,
    Started,
    State,
    Terminated,
    Waiting,
    pod_phase,
    pod_status,
    recorded,
    seconds,
    timestamp,
)


def test_back_off_doubles_to_its_maximum_and_forgets() -> None:
    backoff = Backoff(10, 300)
    assert [backoff.next_delay_s(float(at)) for at in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert backoff.next_delay_s(7 + 599) == 300
    assert backoff.next_delay_s(7 + 599 + 601) == 0


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [("Always", 0, True), ("Always", 1, True), ("OnFailure", 0, False), ("OnFailure", 1, True), ("Never", 1, False)],
)
def test_restart_policies(policy: str, code: int, again: bool) -> None:
    assert restarts(policy, code) is again


def test_thresholds_count_in_a_row() -> None:
    threshold = Threshold(2, 3)
    assert [threshold.feed(ok) for ok in (True, False, True, True, False, False, True, False, False, False)] == [
        *(None, None, None, True, None, None, None, None, None, False)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("500m", Fraction(1, 2)),
        ("1Gi", 2**30),
        ("2k", 2000),
        ("1e3", 1000),
        ("1E", 10**18),
        ("0.5", Fraction(1, 2)),
    ],
)
def test_quantities(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "1X", "Gi", "1 Gi"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


def test_divided_quantities_round_up() -> None:
    assert format_divided(parse_quantity("250m"), Fraction(1)) == "1"
    assert format_divided(parse_quantity("65Mi"), parse_quantity("1Mi")) == "65"


def container(state: State, last: Terminated | None = None, **fields: Any) -> ContainerRecord:
    return ContainerRecord("c", "image", state, last, **fields)


def ended(code: int) -> Terminated:
    return Terminated(code, "Completed" if code == 0 else "Error", 1.0, 2.0, "id")


RUNS, WAITS = Started(1.0), Waiting("ContainerCreating")


@pytest.mark.parametrize(
    ("name", "policy", "init", "main", "phase"),
    [
        ("not started", "Always", [], [container(WAITS)], "Pending"),
        ("one not started", "Always", [], [container(RUNS), container(WAITS)], "Pending"),
        ("all run", "Always", [], [container(RUNS)], "Running"),
        ("one ended, one runs", "Never", [], [container(ended(1)), container(RUNS)], "Running"),
        ("crash loop", "Always", [], [container(Waiting("CrashLoopBackOff"), ended(1))], "Running"),
        ("all ended, restarts", "Always", [], [container(ended(0))], "Running"),
        ("all ended well", "Never", [], [container(ended(0)), container(ended(0))], "Succeeded"),
        ("one failed", "Never", [], [container(ended(0)), container(ended(1))], "Failed"),
        ("one failed, retried", "OnFailure", [], [container(ended(0)), container(ended(1))], "Running"),
        ("init runs", "Always", [container(RUNS)], [container(WAITS)], "Pending"),
        ("init failed", "Never", [container(ended(2))], [container(WAITS)], "Failed"),
        ("init failed, retried", "Always", [container(ended(2))], [container(WAITS)], "Pending"),
        ("side runs on", "Never", [container(RUNS, sidecar=True, started=True)], [container(ended(0))], "Running"),
        ("side has ended", "Never", [container(ended(143), sidecar=True)], [container(ended(0))], "Succeeded"),
    ],
)
def test_phases(name: str, policy: str, init: list[ContainerRecord], main: list[ContainerRecord], phase: str) -> None:
    assert pod_phase(PodRecord(init, main), policy) == phase


def test_a_condition_keeps_its_time_while_it_stays_the_same() -> None:
    pod: dict[str, Any] = {"metadata": {"generation": 2}, "spec": {"restartPolicy": "Always"}, "status": {}}
    record = PodRecord([], [container(RUNS)])
    first = {each["type"]: each for each in pod_status(pod, record, 100.0)["conditions"]}
    record.main[0].ready = True
    later = {each["type"]: each for each in pod_status(pod, record, 200.0)["conditions"]}
    assert later["Initialized"]["lastTransitionTime"] == first["Initialized"]["lastTransitionTime"] == timestamp(100)
    assert later["Ready"]["lastTransitionTime"] == timestamp(200)
    assert {each["observedGeneration"] for each in later.values()} == {2}


def test_times_survive_the_api() -> None:
    assert seconds(timestamp(1_800_000_000.7)) == 1_800_000_000


def test_a_container_that_ran_before_the_node_restarted_is_reported_as_lost() -> None:
    old = {"name": "c", "restartCount": 2, "containerID": "x", "state": {"running": {"startedAt": timestamp(5)}}}
    record = recorded({"name": "c", "image": "i"}, old, init=False, reason="ContainerCreating")
    assert isinstance(record.state, Terminated)
    assert (record.state.exit_code, record.state.reason) == (137, "ContainerStatusUnknown")
    assert record.restart_count == 2


def pod(name: str, ready: str = "True", namespace: str = "n", **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "web"}, **meta},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"podIP": f"127.1.0.{len(name)}", "conditions": [{"type": "Ready", "status": ready}]},
    }


def service(**spec: Any) -> dict[str, Any]:
    ports = [{"port": 80, "targetPort": "http", "protocol": "TCP"}]
    base = {"clusterIP": "127.9.0.1", "selector": {"app": "web"}, "ports": ports}
    return {"metadata": {"name": "s", "namespace": "n"}, "spec": {**base, **spec}}


@pytest.mark.parametrize(
    ("name", "of", "pods", "found"),
    [
        ("by port name", service(), [pod("a")], [("127.1.0.1", 8080)]),
        ("by number", service(ports=[{"port": 80, "targetPort": 9}]), [pod("a")], [("127.1.0.1", 9)]),
        ("same port", service(ports=[{"port": 80}]), [pod("a")], [("127.1.0.1", 80)]),
        ("in order of names", service(), [pod("bb"), pod("a")], [("127.1.0.1", 8080), ("127.1.0.2", 8080)]),
        ("not ready", service(), [pod("a", "False")], None),
        ("not ready, published", service(publishNotReadyAddresses=True), [pod("a", "False")], [("127.1.0.1", 8080)]),
        ("being deleted", service(), [pod("a", deletionTimestamp="now")], None),
        ("other namespace", service(), [pod("a", namespace="m")], None),
        ("other labels", service(selector={"app": "db"}), [pod("a")], None),
        ("no selector", service(selector=None), [pod("a")], None),
        ("headless", service(clusterIP="None"), [pod("a")], None),
        ("address not ours", service(clusterIP="10.0.0.1"), [pod("a")], None),
        ("no port of that name", service(ports=[{"port": 80, "targetPort": "grpc"}]), [pod("a")], None),
        ("not TCP", service(ports=[{"port": 80, "protocol": "UDP"}]), [pod("a")], None),
    ],
)
def test_backends(
    name: str, of: dict[str, Any], pods: list[dict[str, Any]], found: list[tuple[str, int]] | None
) -> None:
    assert list(frontends([of], pods, "127.9.0.0/16").values()) == ([found] if found else [])


def test_addresses_are_unique_and_used_again_late() -> None:
    addresses = Addresses("127.5.0.0/29")
    taken = [addresses.take() for _ in range(3)]
    addresses.give_back(taken[0])
    assert addresses.take() not in taken
    more = [addresses.take() for _ in range(3)]
    assert taken[0] in more
    with pytest.raises(RuntimeError, match="pod_cidr"):
        addresses.take()
