"""Faults that the hostlet makes on request or suffers itself: what the API server is told, and what is left running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.api import Ability, Cluster, wait_for
from e2e.cluster.hostlet.control import ControlError, HostletControl
from e2e.cluster.hostlet.services import SANDBOX_ANNOTATION
from e2e.cluster.ours import LocalCluster
from e2e.local.hostlet_cases.harness import condition, shell, state_of, status_of

pytestmark = pytest.mark.needs(*Ability)

NAMESPACE = "default"
TICKS = "i=0; while :; do i=$((i+1)); echo $i > /state/n; sleep 0.2; done"


@pytest.fixture(scope="module")
def own() -> Iterator[LocalCluster]:
    """A cluster of these tests alone: they end nodes and programs."""
    cluster = LocalCluster(f"faults-{os.getpid()}")
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture
def control(cluster: Cluster, own: LocalCluster) -> HostletControl:
    assert isinstance(cluster, LocalCluster)  # elsewhere these tests are skipped
    return HostletControl(own.folder / "hostlet")


class Started:
    """One pod on a node that is named."""

    def __init__(self, cluster: LocalCluster, name: str, script: str, sandbox: str = "namespaces", **spec: Any) -> None:
        self.cluster, self.name = cluster, name
        container = shell(script, volumeMounts=[{"name": "e", "mountPath": "/state"}])
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": {SANDBOX_ANNOTATION: sandbox}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "nodeName": "node-a",
                "containers": [container],
                "volumes": [{"name": "e", "emptyDir": {}}],
                **spec,
            },
        }
        cluster.apply(manifest, namespace=NAMESPACE)
        cluster.wait(f"pod/{name}", "condition=Ready", namespace=NAMESPACE)

    def now(self) -> dict[str, Any]:
        return self.cluster.get("pod", self.name, namespace=NAMESPACE)

    def until(self, what: str, is_so: Callable[[dict[str, Any]], object], timeout_s: float = 60) -> dict[str, Any]:
        wait_for(f"{self.name} {what}", lambda: is_so(self.now()), timeout_s=timeout_s)
        return self.now()

    def pids(self, control: HostletControl) -> list[int]:
        nodes = control.state()["nodes"]
        container = nodes["node-a"]["pods"][f"{NAMESPACE}/{self.name}"]["containers"]["c"]
        return list(container["pids"])

    def ticks(self, control: HostletControl) -> int:
        pod = control.state()["nodes"]["node-a"]["pods"][f"{NAMESPACE}/{self.name}"]
        path = self.cluster.folder / "hostlet" / "node-a" / "pods" / pod["uid"] / "volumes" / "e" / "n"
        return int(path.read_text() or 0)

    def delete(self) -> None:
        self.cluster.kubectl("delete", "pod", self.name, "-n", NAMESPACE, "--wait", "--timeout=30s")


def lives(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("sandbox", ["namespaces", "paths"])
def test_a_killed_container_is_reported_and_starts_again(
    own: LocalCluster, control: HostletControl, sandbox: str
) -> None:
    pod = Started(own, f"killed-{sandbox}", TICKS, sandbox)
    control.kill_container(NAMESPACE, pod.name)
    again = pod.until("runs again", lambda each: status_of(each)["restartCount"] == 1 and status_of(each)["ready"])
    assert status_of(again)["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    assert status_of(again)["lastState"]["terminated"]["reason"] == "Error"
    pod.delete()


@pytest.mark.parametrize("sandbox", ["namespaces", "paths"])
def test_a_frozen_pod_does_nothing_until_it_is_thawed(own: LocalCluster, control: HostletControl, sandbox: str) -> None:
    pod = Started(own, f"frozen-{sandbox}", TICKS, sandbox)
    control.freeze_pod(NAMESPACE, pod.name)
    time.sleep(0.3)
    before = pod.ticks(control)
    time.sleep(1)
    assert pod.ticks(control) == before
    assert status_of(pod.now())["ready"], "nothing but a probe can see that a pod is frozen"
    control.thaw_pod(NAMESPACE, pod.name)
    wait_for("the pod to go on", lambda: pod.ticks(control) > before, timeout_s=5)
    pod.delete()


def test_a_lost_node_tells_nobody_and_comes_back_as_after_a_reboot(own: LocalCluster, control: HostletControl) -> None:
    pod = Started(own, "on-lost-node", TICKS)
    never = Started(own, "never-restarts", TICKS, restartPolicy="Never")
    pids = [*pod.pids(control), *never.pids(control)]
    control.lose_node("node-a")
    wait_for("the node's processes to end", lambda: not lives(pids), timeout_s=5)
    assert state_of(pod.now())[0] == "running", "a lost node has told of its end"
    wait_for("the node to be unknown", lambda: _ready(own) == "Unknown", timeout_s=60)
    pod.until("is not ready", lambda each: condition(each, "Ready")["status"] == "False")
    control.restore_node("node-a")
    wait_for("the node to be ready", lambda: _ready(own) == "True", timeout_s=30)
    again = pod.until("runs again", lambda each: status_of(each)["restartCount"] == 1 and status_of(each)["ready"])
    assert condition(again, "Ready")["status"] == "True"
    assert status_of(again)["lastState"]["terminated"]["reason"] == "ContainerStatusUnknown"
    assert never.until("has failed", lambda each: each["status"]["phase"] == "Failed")
    pod.delete()
    never.delete()


def _ready(cluster: LocalCluster) -> str:
    node = cluster.get("node", "node-a", namespace=NAMESPACE)
    return str(condition(node, "Ready")["status"])


@pytest.mark.parametrize("sandbox", ["namespaces", "paths"])
def test_pods_die_with_a_killed_hostlet_and_the_next_one_says_so(
    own: LocalCluster, control: HostletControl, sandbox: str
) -> None:
    pod = Started(own, f"orphan-{sandbox}", f"(setsid sh -c 'while :; do sleep 1; done' &); {TICKS}", sandbox)
    pids = pod.pids(control)
    assert len(pids) >= 3
    before = own.pid_of("hostlet")
    with own.held("hostlet"):
        wait_for("the pod's processes to end", lambda: not lives(pids), timeout_s=5)
        assert state_of(pod.now())[0] == "running"
    assert own.pid_of("hostlet") != before
    again = pod.until("runs again", lambda each: status_of(each)["restartCount"] == 1 and status_of(each)["ready"])
    assert status_of(again)["lastState"]["terminated"]["exitCode"] == 137
    assert pod.ticks(control) > 0
    pod.delete()


def test_an_api_server_that_restarts_is_no_harm(own: LocalCluster, control: HostletControl) -> None:
    pod = Started(own, "through-restart", TICKS)
    with own.held("kube-apiserver"):
        control.kill_container(NAMESPACE, pod.name)
        wait_for("the container to run again", lambda: pod.pids(control), timeout_s=10)
    own.wait_for_apiserver()
    again = pod.until("is reported", lambda each: status_of(each)["restartCount"] == 1 and status_of(each)["ready"])
    assert again["status"]["phase"] == "Running"
    pod.delete()
    new = Started(own, "after-restart", TICKS)
    new.delete()


def test_a_slow_node_is_late_with_status_volumes_and_ends(own: LocalCluster, control: HostletControl) -> None:
    own.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "slow"}, "data": {"k": "1"}},
        namespace=NAMESPACE,
    )
    mounts = [{"name": "m", "mountPath": "/m"}]
    pod = Started(
        own,
        "slow",
        TICKS,
        volumes=[{"name": "m", "configMap": {"name": "slow"}}, {"name": "e", "emptyDir": {}}],
        containers=[shell("trap 'exit 0' TERM; sleep 600 & wait", volumeMounts=mounts)],
    )
    state = control.state()["nodes"]["node-a"]["pods"][f"{NAMESPACE}/slow"]
    mounted = own.folder / "hostlet" / "node-a" / "pods" / state["uid"] / "volumes" / "m" / "k"
    control.delay("node-a", status_s=3, termination_s=3, volumes_s=3)
    own.kubectl("patch", "configmap", "slow", "-n", NAMESPACE, "-p", '{"data":{"k":"2"}}')
    begun = time.monotonic()
    wait_for("the file to change", lambda: mounted.read_text() == "2", timeout_s=20)
    assert time.monotonic() - begun > 3
    begun = time.monotonic()
    control.kill_container(NAMESPACE, "slow")
    pod.until("is reported", lambda each: status_of(each)["restartCount"] == 1)
    assert time.monotonic() - begun > 2.5
    begun = time.monotonic()
    pod.delete()
    assert time.monotonic() - begun > 3
    control.delay("node-a", status_s=0, termination_s=0, volumes_s=0)
    quick = Started(own, "quick", TICKS)
    begun = time.monotonic()
    quick.delete()
    assert time.monotonic() - begun < 8


def test_orders_that_name_nothing_are_refused(control: HostletControl) -> None:
    with pytest.raises(ControlError, match="'node-z' is none of node-a, node-b"):
        control.lose_node("node-z")
    with pytest.raises(ControlError, match="default/nothing does not run here"):
        control.freeze_pod("default", "nothing")
