"""A cluster as tests and demo use it: kubectl and helm, objects, and what only some clusters can do."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from e2e.cluster.progress import ClusterError, say

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "build" / "cluster"
CHART = ROOT / "charts" / "headrace"

Object = Mapping[str, Any]


class Ability(Enum):
    """What a test may do to a cluster only where it is ours alone."""

    RESTART_API_SERVER = auto()
    STOP_PROMETHEUS = auto()
    NODE_FAULTS = auto()
    """Lose a node, freeze or kill a pod's processes, delay updates."""


class Cluster:
    """A Kubernetes cluster behind a kubeconfig. Subclasses bring it up and down."""

    abilities: frozenset[Ability] = frozenset()
    scrape_interval_s = 2.0

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        raise ClusterError(f"the cluster {self.name} is not up")

    @property
    def kubectl_path(self) -> Path:
        """Path of kubectl."""
        raise ClusterError(f"the cluster {self.name} is not up")

    @property
    def helm_path(self) -> Path:
        """Path of helm."""
        raise ClusterError(f"the cluster {self.name} is not up")

    @property
    def prometheus_url(self) -> str:
        """Address of Prometheus, as this process and the operator reach it."""
        raise ClusterError(f"the cluster {self.name} is not up")

    @property
    def logs_dir(self) -> Path:
        """Where logs are."""
        return RUNS / self.name / "logs"

    def up(self, *, keep: bool = False) -> None:
        """Brings the cluster up; unless `keep`, it ends with this process at the latest."""
        raise ClusterError(f"cannot bring {self.name} up (keep={keep})")

    def down(self) -> None:
        """Ends the cluster and removes what it left."""
        raise ClusterError(f"cannot end {self.name}")

    def service_url(self, name: str, *, namespace: str) -> str:
        """Address of a Service's first port."""
        raise ClusterError(f"cannot reach the Service {namespace}/{name} of {self.name}")

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Runs kubectl as the administrator and returns what it printed.

        Raises:
            ClusterError: it failed; the message holds what it said.
        """
        done = self.try_kubectl(*arguments, stdin=stdin)
        if check and done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as the administrator; the caller looks at the exit code."""
        return self._run([self.kubectl_path, f"--kubeconfig={self.kubeconfig}", *arguments], stdin)

    def helm(self, *arguments: str) -> str:
        """Runs helm as the administrator and returns what it printed.

        Raises:
            ClusterError: it failed; the message holds what it said.
        """
        done = self._run([self.helm_path, f"--kubeconfig={self.kubeconfig}", *arguments], None)
        if done.returncode != 0:
            raise ClusterError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    @staticmethod
    def _run(command: list[str | Path], stdin: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(part) for part in command], input=stdin, capture_output=True, text=True, check=False)

    def apply(self, manifest: Object, *, namespace: str) -> None:
        """Applies one object on the server's side."""
        self.kubectl("apply", "--server-side", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))

    def delete(self, manifest: Object, *, namespace: str) -> None:
        """Deletes one object and waits until it is gone."""
        self.kubectl("delete", "-n", namespace, "-f", "-", "--ignore-not-found", stdin=json.dumps(manifest))

    def get(self, resource: str, name: str, *, namespace: str) -> dict[str, Any]:
        """Reads one object."""
        found: dict[str, Any] = json.loads(self.kubectl("get", resource, name, "-n", namespace, "-o", "json"))
        return found

    def list(self, resource: str, *, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Lists objects of one kind."""
        chosen = ["-l", selector] if selector else []
        found = json.loads(self.kubectl("get", resource, "-n", namespace, "-o", "json", *chosen))
        items: list[dict[str, Any]] = found["items"]
        return items

    def ensure_namespace(self, name: str) -> None:
        """Makes a namespace if it is not there."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, namespace="default")

    def install_chart(self, namespace: str, **values: str) -> None:
        """Installs or upgrades the chart and waits until the operator is ready."""
        given = {"prometheus.url": self.prometheus_url, **values}
        settings = [part for key, value in given.items() for part in ("--set-string", f"{key}={value}")]
        self.helm(
            *("upgrade", "--install", "headrace", str(CHART), "-n", namespace, "--create-namespace"),
            *("--wait", "--timeout=2m", *settings),
        )


def open_cluster(name: str) -> Cluster:
    """The cluster that the variable CLUSTER asks for: local (default), kind or current. It is not brought up.

    Raises:
        ClusterError: CLUSTER has another value.
    """
    from e2e.cluster import foreign, ours  # noqa: PLC0415 - both need the class above

    kinds: dict[str, type[Cluster]] = {
        "local": ours.LocalCluster,
        "kind": foreign.KindCluster,
        "current": foreign.CurrentCluster,
    }
    wanted = os.environ.get("CLUSTER", "local")
    if wanted not in kinds:
        raise ClusterError(f"CLUSTER={wanted} is unknown: use one of {', '.join(kinds)}")
    return kinds[wanted](name)


def wait_for(what: str, is_so: Any, *, timeout_s: float, every_s: float = 0.1) -> None:
    """Waits until `is_so()` is true.

    Raises:
        ClusterError: it is not after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            say(f"gave up waiting: {what}")
            raise ClusterError(f"after {timeout_s:.0f} s still waiting: {what}")
        time.sleep(every_s)
