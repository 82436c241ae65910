"""Clusters that are not built here: one that kind makes, and the one that kubectl's current context names."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.cluster import build, prometheus
from e2e.cluster.api import BUILD, CHART, OURS, RELEASE, ROOT, Cluster, run, wait_for
from e2e.cluster.processes import die_with_parent, running_process, write_processes
from e2e.cluster.progress import ClusterError, run_logged, say
from headrace_core.api.names import GROUP

IMAGES: Final = ("operator", "gateway", "worker")
DOCKERFILE: Final = ROOT / "e2e" / "cluster" / "images" / "Dockerfile"
GPUS_PER_NODE: Final = 8
ZONES: Final = ("zone-1", "zone-2")
MARK: Final = "headrace-e2e"
"""Namespace that says that tests are at work in this cluster, or were."""
_SELECTOR: Final = ",".join(f"{key}={value}" for key, value in OURS.items())


class CurrentCluster(Cluster):
    """The cluster of the kubeconfig's current context. It is neither made nor ended here.

    What is made in it stands in namespaces with the label `api.OURS`. At the end or, after a run that was killed, at
    the next start they are deleted, and with them the CRDs and the rights that belong to the whole cluster; a cluster
    that has had those before is refused, so that nobody loses any. Two runs at once need two clusters.

    The nodes must be able to pull the chart's images; the variable `HEADRACE_CHART_VALUES` names a file of values with
    other ones. `PROMETHEUS_URL` names a Prometheus that this process and the pods reach; without it one is installed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._forwards: dict[tuple[str, str, int], tuple[subprocess.Popen[bytes], str]] = {}

    @property
    def folder(self) -> Path:
        """Where files about this cluster are."""
        return BUILD / "current" / self.name

    @property
    def kubeconfig(self) -> Path:
        """Path of the user's kubeconfig."""
        return Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")

    @property
    def kubectl_path(self) -> Path:
        """Path of kubectl: the user's, else the one that the Python packages bring."""
        found = shutil.which("kubectl")
        return Path(found) if found else build.beside_python("kubectl")

    @property
    def helm_path(self) -> Path:
        """Path of helm, built from source where the PATH has none."""
        found = shutil.which("helm")
        return Path(found) if found else build.tools().helm

    @property
    def prometheus_url(self) -> str:
        """Address of Prometheus, as this process reaches it."""
        given = os.environ.get("PROMETHEUS_URL")
        return given or self.service_url(prometheus.NAME, namespace=prometheus.NAMESPACE)

    @property
    def operator_prometheus_url(self) -> str:
        """Address of Prometheus, as a pod of the cluster reaches it."""
        inside = f"http://{prometheus.NAME}.{prometheus.NAMESPACE}:{prometheus.PORT}"
        return os.environ.get("PROMETHEUS_URL") or inside

    def up(self, *, keep: bool = False) -> None:
        """Checks that the cluster answers, clears away what an earlier run left, and installs Prometheus."""
        del keep  # a cluster that is not ours does not end
        self.kubectl("get", "--raw=/readyz")
        self._clear()
        if found := [f"the release {one['namespace']}/{RELEASE}" for one in self._releases()] + self._crds():
            raise ClusterError(f"{', '.join(found)} is installed: uninstall it, or use another cluster")
        # Nothing goes into it: while it stands, the CRDs are known to be ours.
        self.ensure_namespace(MARK)
        if not os.environ.get("PROMETHEUS_URL"):
            say("installing Prometheus")
            self.ensure_namespace(prometheus.NAMESPACE)
            self.kubectl("apply", "--server-side", "-f", "-", stdin=prometheus.as_list(prometheus.in_cluster(OURS)))
            wanted = f"deployment/{prometheus.NAME}"
            self.wait(wanted, "condition=Available", namespace=prometheus.NAMESPACE, timeout_s=180)

    def down(self) -> None:
        """Removes what was made: the chart's release, the namespaces and the rights of Prometheus."""
        self._end_forwards()
        self._clear()

    def discard_logs(self) -> None:
        """Removes the files about this cluster."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def service_url(self, name: str, *, namespace: str) -> str:
        """Address of a Service's first port, through `kubectl port-forward`."""
        port = self.get("service", name, namespace=namespace)["spec"]["ports"][0]["port"]
        return self._forward(f"service/{name}", port, namespace)

    def pod_url(self, name: str, port: int, *, namespace: str) -> str:
        """Address of a port of a pod, through `kubectl port-forward`."""
        return self._forward(f"pod/{name}", port, namespace)

    def _forward(self, target: str, port: int, namespace: str) -> str:
        process, url = self._forwards.get((namespace, target, port), (None, ""))
        if process is None or process.poll() is not None:
            local = _free_port()
            command = [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", "port-forward", "-n", namespace]
            process = subprocess.Popen(
                [*map(str, command), target, f"{local}:{port}"],
                stdout=subprocess.DEVNULL,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only calls prctl(2)
            )
            url = f"http://127.0.0.1:{local}"
            wait_for(f"the forward to {target}", lambda: _listens(local), timeout_s=20)
            self._forwards[namespace, target, port] = process, url
        return url

    def _end_forwards(self) -> None:
        for process, _ in self._forwards.values():
            process.terminate()
            process.wait()
        self._forwards.clear()

    def _releases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.helm("list", "-A", "-o", "json", "-f", f"^{RELEASE}$"))
        return found

    def _crds(self) -> list[str]:
        found = self.kubectl("get", "crds", "-o", "name").split()
        return [name for name in found if name.endswith(f".{GROUP}")]

    def _clear(self) -> None:
        found = json.loads(self.kubectl("get", "namespaces", "-l", _SELECTOR, "-o", "json"))
        ours = {item["metadata"]["name"] for item in found["items"]}
        for release in self._releases():
            if release["namespace"] in ours:
                self.helm("uninstall", RELEASE, "-n", release["namespace"], "--wait", "--timeout=2m")
        if ours:
            self.kubectl("delete", "namespaces", "-l", _SELECTOR, "--wait", "--timeout=120s")
            self.kubectl("delete", "clusterroles,clusterrolebindings", "-l", _SELECTOR)
            if crds := self._crds():
                self.kubectl("delete", *crds, "--wait", "--timeout=60s")


class KindCluster(CurrentCluster):
    """A cluster that kind makes, with two nodes that offer GPUs, and the images built from this tree.

    The nodes see the folder `build` at its own path, for models on host paths.
    """

    @property
    def folder(self) -> Path:
        """Where files about this cluster are."""
        return BUILD / "kind" / self.name

    @property
    def kubeconfig(self) -> Path:
        """Path of the kubeconfig that kind writes."""
        return self.folder / "kubeconfig"

    def up(self, *, keep: bool = False) -> None:
        """Makes the cluster, builds the images and loads them into its nodes, and installs Prometheus."""
        kind = _program("kind", "install kind (https://kind.sigs.k8s.io)")
        docker = _program("docker", "install a container engine")
        if run([docker, "info"], None).returncode != 0:
            raise ClusterError("docker does not answer: start its daemon (`docker info` says what is wrong)")
        self._sweep(kind)
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        if not keep:
            write_processes(self.folder / "pid", os.getpid())
        config = self.folder / "kind.yaml"
        config.write_text(yaml.safe_dump(_kind_config()))
        create = [kind, "create", "cluster", f"--name={_kind_name(self.name)}", f"--config={config}", "--wait=3m"]
        run_logged("making a kind cluster", [*create, f"--kubeconfig={self.kubeconfig}"], self.logs_dir / "create.log")
        self._offer_gpus()
        version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
        for image in IMAGES:
            tag = f"headrace/{image}:{version}"
            command = [docker, "build", f"--file={DOCKERFILE}", "--target", image, "--tag", tag, ROOT]
            run_logged(f"building {tag}", command, self.logs_dir / f"build-{image}.log")
            command = [kind, "load", "docker-image", tag, f"--name={_kind_name(self.name)}"]
            run_logged(f"loading {tag} into the nodes", command, self.logs_dir / f"load-{image}.log")
        super().up(keep=keep)

    def down(self) -> None:
        """Deletes the cluster."""
        self._end_forwards()
        self._delete(_program("kind", "install kind"), self.name)

    def _offer_gpus(self) -> None:
        # Kubernetes documentation, "Advertise Extended Resources for a Node": a patch of the status that stays.
        patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(GPUS_PER_NODE)}]
        for node in self.nodes():
            self.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(patch))

    def _sweep(self, kind: Path) -> None:
        """Deletes the cluster of this name, and those of runs that were killed."""
        known = run([kind, "get", "clusters"], None).stdout.split()
        for folder in (BUILD / "kind").glob("*"):
            killed = (folder / "pid").exists() and running_process(folder / "pid") is None
            if _kind_name(folder.name) in known and (killed or folder.name == self.name):
                self._delete(kind, folder.name)

    def _delete(self, kind: Path, name: str) -> None:
        log = BUILD / "kind" / name / "logs" / "delete.log"
        run_logged(f"deleting the kind cluster {name}", [kind, "delete", "cluster", f"--name={_kind_name(name)}"], log)


def _kind_name(name: str) -> str:
    return f"headrace-{name}"


def _kind_config() -> dict[str, Any]:
    shared = [{"hostPath": str(BUILD), "containerPath": str(BUILD)}]
    labels = [{"topology.kubernetes.io/zone": zone} for zone in ZONES]
    return {
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "kind": "Cluster",
        "nodes": [
            {"role": "control-plane"},
            *({"role": "worker", "labels": label, "extraMounts": shared} for label in labels),
        ],
    }


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
