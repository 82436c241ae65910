"""A real Prometheus that scrapes the pods of InferenceClusters, as a service account that may only read pods.

On the local cluster it is Debian's program, which is built without Kubernetes discovery: `e2e.cluster.discovery` keeps
its file of targets. On other clusters it is a pod with Prometheus's own image and discovery. The labels are the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.cluster.progress import ClusterError
from headrace_core.api.names import Label

SCRAPE_INTERVAL_S: Final = 2
NAMESPACE: Final = "headrace-e2e-monitoring"
NAME: Final = "prometheus"
PORT: Final = 9090
IMAGE: Final = "prom/prometheus:v2.53.4"
TARGET_PORT: Final = "http"
"""Name of the container port that is scraped."""

_INTERVAL: Final = f"{SCRAPE_INTERVAL_S}s"
_RBAC: Final = "rbac.authorization.k8s.io"
_ROLE: Final = "headrace-e2e-prometheus"
_SELECTOR: Final = {"app.kubernetes.io/name": NAME}


def rights(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The service account and what it may do; its namespace is made by the caller."""
    meta = {"name": _ROLE, "labels": dict(labels)}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}
    role = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _ROLE}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME, "namespace": NAMESPACE}},
        {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": role,
            "subjects": [account],
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
    """Writes the configuration of the local program; `targets` is the file that `e2e.cluster.discovery` keeps."""
    path.write_text(_config({"file_sd_configs": [{"files": [str(targets)], "refresh_interval": _INTERVAL}]}))
    return path


def in_cluster(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The objects of a Prometheus that runs as a pod; `labels` mark those that belong to the whole cluster."""
    meta = {"name": NAME, "namespace": NAMESPACE, "labels": _SELECTOR}
    config = _config({"kubernetes_sd_configs": [{"role": "pod"}], "relabel_configs": _relabelling()})
    container = {
        "name": NAME,
        "image": IMAGE,
        "args": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"],
        "ports": [{"name": "web", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": "web"}, "periodSeconds": 2},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/prometheus"}],
    }
    pod = {
        "serviceAccountName": NAME,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": NAME}}],
    }
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": _SELECTOR},
        "template": {"metadata": {"labels": _SELECTOR}, "spec": pod},
    }
    service = {"selector": _SELECTOR, "ports": [{"port": PORT, "targetPort": "web"}]}
    return [
        *rights(labels),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"prometheus.yml": config}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
    ]


def as_list(items: list[dict[str, Any]]) -> str:
    """Objects as one manifest that kubectl reads."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _config(discovery: dict[str, Any]) -> str:
    config = {
        "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL},
        "scrape_configs": [{"job_name": "headrace", **discovery}],
    }
    return yaml.safe_dump(config, sort_keys=False)


def _relabelling() -> list[dict[str, Any]]:
    """Keeps running pods of InferenceClusters, and names them as `discovery.targets` does."""
    label = "__meta_kubernetes_pod_label_" + Label.CLUSTER.translate(str.maketrans("./-", "___"))
    wanted = {
        label: ".+",
        "__meta_kubernetes_pod_phase": "Running",
        "__meta_kubernetes_pod_container_port_name": TARGET_PORT,
    }
    names = {"__meta_kubernetes_namespace": "namespace", "__meta_kubernetes_pod_name": "pod", label: "cluster"}
    return [
        *({"source_labels": [source], "regex": regex, "action": "keep"} for source, regex in wanted.items()),
        *({"source_labels": [source], "target_label": target} for source, target in names.items()),
    ]
