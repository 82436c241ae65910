"""The InferenceCluster of real workers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e import quickstart
from e2e.cluster.api import OPERATOR_NAMESPACE, Cluster
from e2e.deployed import Deployed, until

NAMESPACE = "shared"
READY_TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def headrace(cluster: Cluster) -> Cluster:
    """The cluster with the chart installed."""
    # The operator's tests may have brought the CRDs already, which helm must then take over.
    cluster.install_chart(OPERATOR_NAMESPACE, "--take-ownership")
    return cluster


@pytest.fixture(scope="session")
def chat(headrace: Cluster) -> Iterator[Deployed]:
    """The quickstart with flips by hand only: 2 prefill workers and 1 decode worker, ready."""
    manifest = quickstart.manifest()
    manifest["spec"]["elasticity"]["mode"] = "Off"
    headrace.ensure_namespace(NAMESPACE)
    headrace.apply(manifest, namespace=NAMESPACE)
    deployed = Deployed(headrace, NAMESPACE, manifest["metadata"]["name"], quickstart.SERVED_NAME)
    until("the workers to be ready", deployed.is_ready, timeout_s=READY_TIMEOUT_S, seen=deployed.in_words)
    yield deployed
    headrace.delete(manifest, namespace=NAMESPACE)
