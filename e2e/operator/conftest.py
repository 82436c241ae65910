"""A namespace with an InferenceCluster of light workers, and operators that this process starts and ends."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.api import ROOT, Cluster
from e2e.deployed import Deployed, Flip, Worker, until
from e2e.operator.installed import stood_down
from e2e.operator.process import Operator
from headrace_core.api import names

READY_TIMEOUT_S = 60.0


class Light:
    """An InferenceCluster whose workers speak the role protocol only."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.folder = folder
        self.drain_file = folder / "drain"
        self.deployed = Deployed(cluster, namespace, name, "light")

    def pod(self, slot: int) -> str:
        """Name of the worker in a slot."""
        return names.worker_pod_name(self.name, slot)

    def worker(self, slot: int) -> Worker:
        """The worker in a slot, as it is now."""
        return next(found for found in self.deployed.workers() if found.name == self.pod(slot))

    def ask_for_flip(self, slot: int, target_pool: str) -> str:
        """Ask for a flip of the worker in a slot; the InferenceFlip's name."""
        name = f"{self.name}-{uuid.uuid4().hex[:6]}"
        self.deployed.ask_for_flip(name, self.pod(slot), target_pool)
        return name

    def finished(self, name: str, timeout_s: float = 40) -> Flip:
        """A flip, once it has its outcome."""

        def look() -> list[Flip]:
            return [flip for flip in self.deployed.finished_flips() if flip.name == name]

        return until(f"the end of {name}", look, timeout_s=timeout_s, seen=self.in_words, every_s=0.2)[0]

    def wait_closed(self) -> None:
        """Wait until the journal is empty and the cluster settled."""

        def closed() -> bool:
            return not self.deployed.status().get("activeFlips") and self.is_settled()

        until("the journal to be closed", closed, timeout_s=30, seen=self.in_words, every_s=0.2)

    def desired_and_ready(self) -> dict[str, tuple[int, int]]:
        """Desired and ready workers by pool."""
        return {pool["name"]: (pool["desired"], pool["ready"]) for pool in self.deployed.status()["pools"]}

    @property
    def command(self) -> list[str]:
        """How the light worker is started."""
        return [sys.executable, str(Path(__file__).with_name("light_worker.py"))]

    def manifest(self, **spec: Any) -> dict[str, Any]:
        """Two prefill workers and one decode worker, flips by hand only."""
        container = {
            "name": "worker",
            "command": self.command,
            "env": [{"name": "LIGHT_DRAIN_FILE", "value": str(self.drain_file)}],
            "startupProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1},
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1},
        }
        template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
        whole = {
            "model": {"uri": "file:///nowhere/light"},
            "engine": {"image": "test/shell"},
            "gateway": {"mode": "None"},
            "elasticity": {"mode": "Off", "flips": {"drainTimeout": "10s"}},
            "pools": [
                {"name": "prefill", "role": "Prefill", "replicas": 2, "template": template},
                {"name": "decode", "role": "Decode", "replicas": 1, "template": template},
            ],
        }
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.Kind.CLUSTER.value,
            "metadata": {"name": self.name},
            "spec": whole | spec,
        }

    def apply(self, **spec: Any) -> None:
        """Create or change it."""
        self.cluster.apply(self.manifest(**spec), namespace=self.namespace)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until its Ready condition is True for its present generation."""
        until("the light cluster to be ready", self.is_settled, timeout_s=timeout_s, seen=self.in_words, every_s=0.2)

    def is_settled(self) -> bool:
        """Ready, nothing in progress, status up to date."""
        body = self.body()
        status = body.get("status", {})
        conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
        return (
            status.get("observedGeneration") == body["metadata"]["generation"]
            and conditions.get("Ready") == "True"
            and conditions.get("Progressing") == "False"
            and conditions.get("Accepted") == "True"
        )

    def body(self) -> dict[str, Any]:
        """The object."""
        return self.cluster.get(names.Plural.CLUSTER, self.name, namespace=self.namespace)

    def pods(self) -> dict[str, dict[str, Any]]:
        """The worker pods by name, as they are."""
        selector = f"{names.Label.CLUSTER}={self.name},{names.Label.ROLE}"
        return {
            pod["metadata"]["name"]: pod
            for pod in self.cluster.list("pods", namespace=self.namespace, selector=selector)
        }

    def in_words(self) -> str:
        """Workers and conditions in a line."""
        conditions = self.body().get("status", {}).get("conditions", [])
        said = "; ".join(f"{c['type']}={c['status']} {c['reason']} {c['message']}" for c in conditions)
        return f"{self.deployed.in_words()} | {said}"

    def drain(self, seconds: str) -> None:
        """How long drains take from now on: seconds, or `never`."""
        self.drain_file.write_text(seconds)


@pytest.fixture(scope="session")
def crds(cluster: Cluster) -> Cluster:
    """The cluster with our custom resources."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
    return cluster


@pytest.fixture(scope="package")
def light_namespace(crds: Cluster) -> Iterator[str]:
    """One namespace for all light clusters: it takes seconds to delete one."""
    name = f"light-{uuid.uuid4().hex[:6]}"
    crds.ensure_namespace(name)
    with stood_down(crds):
        yield name
    crds.kubectl("delete", "namespace", name, "--timeout=90s")


@pytest.fixture
def light(crds: Cluster, light_namespace: str, tmp_path: Path) -> Iterator[Light]:
    """A light cluster that is not applied yet; deleted after the test."""
    made = Light(crds, light_namespace, tmp_path, f"l{uuid.uuid4().hex[:6]}")
    yield made
    crds.delete(made.manifest(), namespace=light_namespace)


@pytest.fixture
def operator(light: Light) -> Iterator[Operator]:
    """An operator for the test's namespace, not started; ended after the test."""
    with operator_for(light, "op-a") as process:
        yield process


@pytest.fixture
def other_operator(light: Light) -> Iterator[Operator]:
    """A second operator for the same namespace."""
    with operator_for(light, "op-b") as process:
        yield process


def operator_for(light: Light, name: str, **environment: str) -> Operator:
    """An operator that serves one namespace, with its Lease there."""
    return Operator(
        light.cluster.kubeconfig,
        light.folder,
        name,
        POD_NAMESPACE=light.namespace,
        WATCH_NAMESPACES=light.namespace,
        LEASE_NAME=light.name,
        **environment,
    )
