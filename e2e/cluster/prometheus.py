"""A real Prometheus that scrapes the pods of InferenceClusters, as a service account that may only list pods."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.progress import ClusterError

SCRAPE_INTERVAL_S = 2
NAMESPACE = "monitoring"
SERVICE_ACCOUNT = "prometheus"

RIGHTS: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
    {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SERVICE_ACCOUNT, "namespace": NAMESPACE}},
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "headrace-e2e-prometheus"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "headrace-e2e-prometheus"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "headrace-e2e-prometheus",
        },
        "subjects": [{"kind": "ServiceAccount", "name": SERVICE_ACCOUNT, "namespace": NAMESPACE}],
    },
]


def program() -> str:
    """Path of the program.

    Raises:
        ClusterError: it is not installed.
    """
    found = shutil.which("prometheus")
    if found is None:
        raise ClusterError("prometheus is not on the PATH: run `make setup` (Debian: apt-get install prometheus)")
    return found


def write_config(path: Path, targets: Path) -> Path:
    """Writes the configuration; `targets` is the file that `e2e.cluster.discovery` keeps."""
    interval = f"{SCRAPE_INTERVAL_S}s"
    discovery = {"files": [str(targets)], "refresh_interval": interval}
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [{"job_name": "headrace", "file_sd_configs": [discovery]}],
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
