"""The hostlet does what the Kubernetes documentation says of a node: all cases run at once, in both sandboxes."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping

import pytest

from e2e.cluster.api import Ability, Cluster
from e2e.cluster.hostlet.kube import Kube
from e2e.cluster.ours import LocalCluster
from e2e.local.hostlet_cases import harness

for part in ("lifecycle", "probes", "environment", "volumes", "termination", "network"):
    importlib.import_module(f"e2e.local.hostlet_cases.{part}")

SANDBOXES = ["namespaces", "paths"]
AT_ONCE = 12

pytestmark = [pytest.mark.needs(Ability.NODE_FAULTS), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def results(cluster: Cluster) -> Mapping[str, BaseException | None]:
    """What became of each case."""
    assert isinstance(cluster, LocalCluster)
    namespace = "hostlet-conformance"
    cluster.ensure_namespace(namespace)

    async def run() -> Mapping[str, BaseException | None]:
        kube = Kube.from_kubeconfig(cluster.kubeconfig)
        try:
            await kube.call("GET", f"/api/v1/namespaces/{namespace}")
            return await harness.run_all(kube, namespace, SANDBOXES, AT_ONCE)
        finally:
            await kube.close()

    found = asyncio.run(run())
    cluster.kubectl("delete", "namespace", namespace, "--wait", "--timeout=60s")
    return found


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("case", harness.CASES, ids=lambda case: f"{case.name}:{case.page}")
def test_holds(results: Mapping[str, BaseException | None], case: harness.Case, sandbox: str) -> None:
    error = results[f"{case.name}[{sandbox}]"]
    if error is not None:
        raise AssertionError(f"{harness.DOCS}{case.page}: {error}") from error
