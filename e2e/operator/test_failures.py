"""What fails around the operator: workers, pods, the API server, Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from e2e.cluster.api import Ability
from e2e.deployed import until
from e2e.operator.conftest import Light, operator_for
from e2e.operator.process import Operator
from headrace_core.api import names

AUTO = {"mode": "Auto", "interval": "1s", "flips": {"idleFor": "5s", "cooldown": "0s"}}


def uids(light: Light) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in light.pods().items()}


def test_a_deleted_worker_is_replaced(light: Light, operator: Operator) -> None:
    light.apply()
    operator.start()
    light.wait_ready()
    before = uids(light)
    light.cluster.kubectl("delete", "pod", light.pod(1), "-n", light.namespace)
    until("a new worker", lambda: len(light.pods()) == 3 and light.is_settled(), timeout_s=40, seen=light.in_words)
    after = uids(light)
    assert before[light.pod(1)] not in after.values()
    assert before[light.pod(0)] == after[light.pod(0)]


def test_a_failed_pod_is_replaced(light: Light, operator: Operator) -> None:
    """As the kubelet does it at an eviction: the pod's phase becomes Failed and the object stays."""
    light.apply()
    operator.start()
    light.wait_ready()
    before = uids(light)[light.pod(1)]
    failed = '{"status": {"phase": "Failed", "reason": "Evicted"}}'
    light.cluster.kubectl(
        "patch", "pod", light.pod(1), "-n", light.namespace, "--subresource=status", "--type=merge", "-p", failed
    )

    def replaced() -> bool:
        return before not in uids(light).values() and len(light.pods()) == 3 and light.is_settled()

    until("a new worker after the back-off", replaced, timeout_s=60, seen=light.in_words)


@pytest.mark.needs(Ability.NODE_FAULTS)
def test_a_restarted_worker_gets_its_label_back(light: Light, operator: Operator) -> None:
    """A flipped worker whose container restarts is in its first role again."""
    light.apply()
    operator.start()
    light.wait_ready()
    light.finished(light.ask_for_flip(0, "decode"))
    light.cluster.faults.kill_container(light.namespace, light.pod(0), "worker")  # type: ignore[attr-defined]

    def repaired() -> bool:
        worker = light.worker(0)
        return (worker.role, worker.pool, worker.epoch) == ("prefill", "prefill", 0) and light.is_settled()

    until("the labels to be repaired", repaired, timeout_s=60, seen=light.in_words)
    assert {pool["name"]: pool["desired"] for pool in light.deployed.status()["pools"]} == {
        "prefill": 2,
        "decode": 1,
    }
    assert len(light.pods()) == 3


def test_labels_that_somebody_removes_or_breaks_come_back(light: Light, operator: Operator) -> None:
    """Nothing is deleted for it, and the worker can be flipped as before."""
    light.apply()
    operator.start()
    light.wait_ready()
    before = uids(light)
    pod, where = light.pod(0), ("-n", light.namespace, "--overwrite")
    edits = [
        ("label", f"{names.Label.ROLE}-"),
        ("label", f"{names.Label.ROLE}=both"),
        ("label", f"{names.Label.POOL}-"),
        ("label", f"{names.Label.POOL}=decode"),
        ("label", f"{names.Label.CLUSTER}-"),
        ("annotate", f"{names.Annotation.FLIP_ID}="),
        ("annotate", f"{names.Annotation.EPOCH}-"),
    ]

    def repaired() -> bool:
        found = light.pods().get(pod)
        if found is None or names.Annotation.FLIP_ID in found["metadata"]["annotations"]:
            return False
        labels = found["metadata"]["labels"]
        return (labels.get(names.Label.ROLE), labels.get(names.Label.POOL)) == ("prefill", "prefill")

    for command, edit in edits:
        light.cluster.kubectl(command, "pod", pod, edit, *where)
        until(f"the repair of {edit}", repaired, timeout_s=30, seen=light.in_words, every_s=0.2)
        light.wait_ready()
        assert uids(light) == before, edit
    assert light.finished(light.ask_for_flip(0, "decode")).outcome == "Succeeded"
    assert operator.running()


@pytest.mark.needs(Ability.RESTART_API_SERVER)
def test_the_api_server_is_restarted(light: Light) -> None:
    """The operator outlives it and goes on, with a Lease that outlasts the restart."""
    patient = {
        "LEASE_DURATION_SECONDS": "40",
        "LEASE_RENEW_DEADLINE_SECONDS": "30",
        "LEASE_RETRY_SECONDS": "1",
    }
    with operator_for(light, "op-a", **patient) as operator:
        light.apply()
        operator.start()
        light.wait_ready()
        light.cluster.restart_apiserver()  # type: ignore[attr-defined]
        assert light.finished(light.ask_for_flip(0, "decode"), timeout_s=60).outcome == "Succeeded"
        light.cluster.kubectl("delete", "pod", light.pod(1), "-n", light.namespace, "--wait=false")
        until("a settled cluster", light.is_settled, timeout_s=60, seen=light.in_words)
        assert operator.running()
        assert operator.log.read_text().count("leading as") == 1


class _Broken(BaseHTTPRequestHandler):
    """A Prometheus that answers every query with an error, or with workers that are all unknown."""

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def broken_prometheus() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("where", ["answers with errors", "does not answer", "is not configured"])
def test_without_prometheus_the_policy_holds_and_says_so(light: Light, broken_prometheus: str, where: str) -> None:
    url = {
        "answers with errors": broken_prometheus,
        "does not answer": "http://127.0.0.1:9",
        "is not configured": "",
    }[where]
    with operator_for(light, "op-a", PROMETHEUS_URL=url) as operator:
        operator.start()
        light.apply(elasticity=AUTO)

        def says_so() -> bool:
            said = light.deployed.condition(names.Condition.DEGRADED)
            return said.get("reason") == "MetricsUnknown" and "the policy holds" in said["message"]

        until("the condition", says_so, timeout_s=60, seen=light.in_words)
        until("the workers", light.is_settled, timeout_s=60, seen=light.in_words)
        assert not light.deployed.ledger()
