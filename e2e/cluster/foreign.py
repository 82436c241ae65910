"""Clusters that are not built here: one that kind makes, and the one that kubectl's current context names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from e2e.cluster import build
from e2e.cluster.api import ROOT, RUNS, Cluster, wait_for
from e2e.cluster.progress import ClusterError, run_logged

IMAGES = ("operator", "gateway", "worker")


class CurrentCluster(Cluster):
    """The cluster of the kubeconfig's current context. It is neither made nor ended here.

    `PROMETHEUS_URL` names a Prometheus that this process and the operator can both reach; the images of the chart's
    default values must be where the nodes can pull them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._forwards: dict[tuple[str, str], tuple[subprocess.Popen[bytes], str]] = {}

    @property
    def kubeconfig(self) -> Path:
        """Path of the user's kubeconfig."""
        return Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")

    @property
    def kubectl_path(self) -> Path:
        """Path of kubectl."""
        return _program("kubectl", "install kubectl")

    @property
    def helm_path(self) -> Path:
        """Path of helm, built from source where the PATH has none."""
        found = shutil.which("helm")
        return Path(found) if found else build.tools().helm

    @property
    def prometheus_url(self) -> str:
        """Address of Prometheus, from the environment."""
        url = os.environ.get("PROMETHEUS_URL")
        if not url:
            raise ClusterError("PROMETHEUS_URL is not set: name a Prometheus that scrapes the cluster's pods")
        return url

    def up(self, *, keep: bool = False) -> None:
        """Checks that the cluster answers."""
        del keep  # it is not ours to end
        self.kubectl("get", "--raw=/readyz")

    def down(self) -> None:
        """Removes the chart, and with it every pod of Headrace; the cluster stays."""
        for process, _ in self._forwards.values():
            process.terminate()
        self._forwards.clear()
        self._run([self.helm_path, f"--kubeconfig={self.kubeconfig}", "uninstall", "headrace", "-A"], None)

    def service_url(self, name: str, *, namespace: str) -> str:
        """Address of a Service's first port, through `kubectl port-forward`."""
        process, url = self._forwards.get((namespace, name), (None, ""))
        if process is None or process.poll() is not None:
            port = self.get("service", name, namespace=namespace)["spec"]["ports"][0]["port"]
            local = _free_port()
            command = [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", "port-forward", "-n", namespace]
            process = subprocess.Popen([*map(str, command), f"service/{name}", f"{local}:{port}"])
            url = f"http://127.0.0.1:{local}"
            self._forwards[namespace, name] = process, url
            wait_for(f"the forward to {name}", lambda: _listens(local), timeout_s=20)
        return url


class KindCluster(CurrentCluster):
    """A cluster that kind makes, with the images built from this tree."""

    @property
    def kubeconfig(self) -> Path:
        """Path of the kubeconfig that kind writes."""
        return RUNS / self.name / "kubeconfig"

    def up(self, *, keep: bool = False) -> None:
        """Makes the cluster, builds the images and loads them into its nodes."""
        del keep  # it ends with `down`, or with `kind delete cluster`
        kind = _program("kind", "install kind (https://kind.sigs.k8s.io)")
        docker = _program("docker", "install a container engine")
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        name = f"headrace-{self.name}"
        create = [kind, "create", "cluster", f"--name={name}", f"--kubeconfig={self.kubeconfig}", "--wait=2m"]
        run_logged("making a kind cluster", create, self.logs_dir / "kind.log")
        for image in IMAGES:
            tag = f"headrace/{image}:latest"
            command = [docker, "build", "--target", image, "--tag", tag, ROOT]
            run_logged(f"building {tag}", command, self.logs_dir / f"build-{image}.log")
            command = [kind, "load", "docker-image", tag, f"--name={name}"]
            run_logged(f"loading {tag}", command, self.logs_dir / f"load-{image}.log")

    def down(self) -> None:
        """Deletes the cluster."""
        super().down()
        kind = _program("kind", "install kind")
        run_logged(
            "ending the kind cluster",
            [kind, "delete", "cluster", f"--name=headrace-{self.name}"],
            self.logs_dir / "down.log",
        )


def _program(name: str, remedy: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is not on the PATH: {remedy}")
    return Path(found)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
