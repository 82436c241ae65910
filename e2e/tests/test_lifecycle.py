"""Create, change and delete an InferenceCluster under the chart's operator, with the rights that the chart gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster.api import Cluster
from e2e.deployed import until
from e2e.operator.conftest import Light
from headrace_core.api import names

KINDS = (
    "pods,deployments,services,podtemplates,serviceaccounts,secrets,roles,rolebindings,poddisruptionbudgets,"
    f"{names.Plural.FLIP}"
)
GONE_TIMEOUT_S = 90.0
"""The garbage collector learns of new kinds, such as ours, every half minute."""


@pytest.fixture
def light(headrace: Cluster, namespace: str, tmp_path: Path) -> Light:
    """A cluster of light workers, for the chart's operator."""
    return Light(headrace, namespace, tmp_path, "light")


def left(light: Light) -> str:
    """What is in the namespace beside what Kubernetes puts there itself."""
    found = light.cluster.kubectl("get", KINDS, "-n", light.namespace, "-o", "name").split()
    return " ".join(name for name in found if name != "serviceaccount/default")


def test_create_change_delete(light: Light) -> None:
    gateway = {"name": "gateway", "command": light.command, "env": [{"name": "HEADRACE_PORT", "value": "8080"}]}
    light.apply(gateway={"mode": "Managed", "template": {"spec": {"containers": [gateway]}}})
    light.wait_ready()
    light.deployed.ask_for_flip("by-hand", light.pod(0), "decode")
    assert light.finished("by-hand").outcome == "Succeeded"

    bigger = light.manifest()["spec"]["pools"]
    bigger[1]["replicas"] = 2
    light.apply(pools=bigger, engine={"image": "test/shell", "env": [{"name": "ROUND", "value": "2"}]})
    light.wait_ready(timeout_s=120)
    assert len(light.pods()) == 4
    assert all({"name": "ROUND", "value": "2"} in pod["spec"]["containers"][0]["env"] for pod in light.pods().values())

    light.cluster.kubectl("delete", names.Plural.CLUSTER, light.name, "-n", light.namespace, "--timeout=30s")
    until("nothing to be left", lambda: not left(light), timeout_s=GONE_TIMEOUT_S, seen=lambda: left(light))
