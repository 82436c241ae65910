"""A cluster as tests and demo use it: kubectl and helm, objects, and what only some clusters can do."""

from __future__ import annotations

import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from e2e.cluster.progress import ClusterError, say

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build"
RUNS: Final = BUILD / "cluster"
CHART: Final = ROOT / "charts" / "headrace"
RELEASE: Final = "headrace"
OPERATOR_NAMESPACE: Final = "headrace-system"
"""Where the chart is installed."""

OURS: Final = {"app.kubernetes.io/managed-by": "headrace-e2e"}
"""Label of the namespaces that are made here: what bears it may be deleted, and nothing else."""

Object = Mapping[str, Any]


class Ability(Enum):
    """What a test may do to a cluster only where it is ours alone."""

    RESTART_API_SERVER = auto()
    STOP_PROMETHEUS = auto()
    NODE_FAULTS = auto()
    """Lose a node, freeze or kill a pod's processes, delay updates."""


class Cluster(ABC):
    """A Kubernetes cluster behind a kubeconfig. Subclasses bring it up and down."""

    abilities: frozenset[Ability] = frozenset()
    scrape_interval_s = 2.0

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""

    @property
    @abstractmethod
    def kubectl_path(self) -> Path:
        """Path of kubectl."""

    @property
    @abstractmethod
    def helm_path(self) -> Path:
        """Path of helm."""

    @property
    @abstractmethod
    def prometheus_url(self) -> str:
        """Address of Prometheus, as this process reaches it."""

    @property
    def operator_prometheus_url(self) -> str:
        """Address of Prometheus, as a pod of the cluster reaches it."""
        return self.prometheus_url

    @property
    def folder(self) -> Path:
        """Where the cluster's files are."""
        return RUNS / self.name

    @property
    def logs_dir(self) -> Path:
        """Where logs are."""
        return self.folder / "logs"

    @abstractmethod
    def up(self, *, keep: bool = False) -> None:
        """Brings the cluster up; unless `keep`, it is cleared away when this process has ended without `down`."""

    @abstractmethod
    def down(self) -> None:
        """Ends the cluster and removes what was made, but for the logs."""

    @abstractmethod
    def discard_logs(self) -> None:
        """Removes the logs of a cluster that is down."""

    @abstractmethod
    def service_url(self, name: str, *, namespace: str) -> str:
        """Address of a Service's first port, as this process reaches it."""

    @abstractmethod
    def pod_url(self, name: str, port: int, *, namespace: str) -> str:
        """Address of a port of a pod, as this process reaches it."""

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Runs kubectl as the administrator and returns what it printed.

        Raises:
            ClusterError: it failed; the message holds what it said.
        """
        done = self.try_kubectl(*arguments, stdin=stdin)
        if check and done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(
        self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl, as the administrator or by another kubeconfig; the caller looks at the exit code."""
        return run([self.kubectl_path, f"--kubeconfig={kubeconfig or self.kubeconfig}", *arguments], stdin)

    def helm(self, *arguments: str) -> str:
        """Runs helm as the administrator and returns what it printed.

        Raises:
            ClusterError: it failed; the message holds what it said.
        """
        done = run([self.helm_path, f"--kubeconfig={self.kubeconfig}", *arguments], None)
        if done.returncode != 0:
            raise ClusterError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def nodes(self) -> list[str]:
        """Names of the nodes that take pods."""
        found = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return [
            node["metadata"]["name"]
            for node in found
            if not any(taint["effect"] == "NoSchedule" for taint in node["spec"].get("taints", []))
        ]

    def apply(self, manifest: Object | Path, *, namespace: str) -> None:
        """Applies one object, or the objects of a file, on the server's side."""
        command = ("apply", "--server-side", "-n", namespace, "-f")
        if isinstance(manifest, Path):
            self.kubectl(*command, str(manifest))
        else:
            self.kubectl(*command, "-", stdin=json.dumps(manifest))

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

    def wait(self, resource: str, until: str, *, namespace: str, timeout_s: float = 60.0) -> None:
        """Waits for what `kubectl wait --for` understands, such as `condition=Ready`.

        Raises:
            ClusterError: it is not so after `timeout_s` seconds.
        """
        self.kubectl("wait", resource, f"--for={until}", "-n", namespace, f"--timeout={timeout_s:.0f}s")

    def kubeconfig_for(self, service_account: str, *, namespace: str, valid_s: int = 3600) -> Path:
        """Writes a kubeconfig with a token of a service account and returns its path."""
        token = self.kubectl("create", "token", service_account, "-n", namespace, f"--duration={valid_s}s").strip()
        config = json.loads(self.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        config["users"][0]["user"] = {"token": token}
        path = self.folder / "accounts" / f"{namespace}-{service_account}.kubeconfig"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))
        return path

    def ensure_namespace(self, name: str) -> None:
        """Makes a namespace if it is not there. One that is there stays as it is: it may be somebody else's."""
        metadata = {"name": name, "labels": OURS}
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        done = self.try_kubectl("create", "-f", "-", stdin=json.dumps(manifest))
        if done.returncode != 0 and "AlreadyExists" not in done.stderr:
            raise ClusterError(f"the namespace {name} cannot be made: {done.stderr.strip()}")

    def install_chart(self, namespace: str, *flags: str, **values: str) -> None:
        """Installs or upgrades the chart and waits until the operator is ready; `flags` go to helm."""
        self.ensure_namespace(namespace)
        given = {"prometheus.url": self.operator_prometheus_url, **values}
        settings = [part for key, value in given.items() for part in ("--set-string", f"{key}={value}")]
        if own := os.environ.get("HEADRACE_CHART_VALUES"):
            settings += ["-f", own]
        self.helm(
            "upgrade", "--install", RELEASE, str(CHART), "-n", namespace, "--wait", "--timeout=2m", *flags, *settings
        )


def run(command: list[str | Path], stdin: str | None) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, with its outputs as text."""
    return subprocess.run([str(part) for part in command], input=stdin, capture_output=True, text=True, check=False)


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


def wait_for(what: str, is_so: Callable[[], object], *, timeout_s: float, every_s: float = 0.1) -> None:
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
