"""The operator that the chart installed: takes it away for a while, and lends its rights to a process of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.cluster.api import OPERATOR_NAMESPACE, Cluster
from e2e.deployed import until

NAME = "headrace-operator"
LEASE = "headrace-operator"


@contextmanager
def stood_down(cluster: Cluster) -> Iterator[None]:
    """Scales the installed operator to nothing, if there is one, and back at the end."""
    deployment = ("deployment", NAME, "-n", OPERATOR_NAMESPACE)
    if cluster.try_kubectl("get", *deployment).returncode != 0:
        yield
        return
    cluster.kubectl("scale", *deployment, "--replicas=0")
    selector = "app.kubernetes.io/component=operator"

    def pods() -> list[dict[str, Any]]:
        return cluster.list("pods", namespace=OPERATOR_NAMESPACE, selector=selector)

    until("the installed operator to end", lambda: not pods(), timeout_s=60, seen=lambda: f"{len(pods())} pods")
    try:
        yield
    finally:
        cluster.kubectl("scale", *deployment, "--replicas=1")
        cluster.kubectl("rollout", "status", *deployment, "--timeout=60s")


def lent_kubeconfig(cluster: Cluster, folder: Path) -> Path:
    """A kubeconfig with the installed operator's service account, and nothing more."""
    token = cluster.kubectl("create", "token", NAME, "-n", OPERATOR_NAMESPACE, "--duration=1h").strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"] = [{"name": "operator", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "operator"
    path = folder / "operator.kubeconfig"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path
