"""Runs a local cluster in the foreground: the control plane, the hostlet's nodes and Prometheus, until SIGTERM.

`python -m e2e.cluster.local --folder DIR` is the parent of all programs of a cluster. They die with it, however it
ends; `--with-parent` makes it die with its own parent too.
"""

from __future__ import annotations

import argparse
import json
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx

from e2e.cluster import build, components, prometheus
from e2e.cluster.components import Component
from e2e.cluster.hostlet_config import HostletConfig, NodeConfig
from e2e.cluster.pki import Authority, write_service_account_keys
from e2e.cluster.progress import ClusterError
from e2e.cluster.slots import Claim, Slot
from e2e.cluster.supervisor import Supervisor, die_with_parent

NODES = {"node-a": "zone-1", "node-b": "zone-2"}
GPUS_PER_NODE = 8
IMAGES = {
    **{f"headrace/{part}": [sys.executable, "-m", f"headrace_{part}"] for part in ("operator", "gateway", "worker")},
    "test/shell": ["/bin/sh"],
}
PROXY_RIGHTS = "headrace-e2e-proxy"


class LocalRun:
    """Brings one cluster up, program by program, in a folder of its own."""

    def __init__(self, folder: Path, tools: build.Tools, claim: Claim) -> None:
        self._folder = folder
        self._tools = tools
        self._claim = claim
        self._slot: Slot = claim.slot
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.supervisor = Supervisor(folder, self._logs)

    def up(self) -> None:
        """Starts everything, in order, and writes `ready.json` when it is up."""
        self._pki = Authority(self._folder / "pki")
        components.issue_all(self._pki, self._slot, list(NODES))
        write_service_account_keys(self._pki.folder / "service-accounts.key", self._pki.folder / "service-accounts.pub")
        self._url = f"https://{self._slot.control_plane}:{components.APISERVER_PORT}"
        for identity in ("admin", "controller-manager", "scheduler", "proxy", *NODES):
            self._pki.kubeconfig(identity, self._url)
        self._start_control_plane()
        self._kubectl("apply", "-f", "-", stdin=_list_of([*_proxy_rights(), *prometheus.RIGHTS]))
        self._start_hostlet()
        self._start_prometheus()
        ready = {
            "kubeconfig": str(self._pki.folder / "admin.kubeconfig"),
            "prometheus_url": f"http://{self._slot.prometheus}:{components.PROMETHEUS_PORT}",
            "helm": str(self._tools.helm),
            "kubectl": str(self._tools.kubectl),
            "nodes": list(NODES),
            "slot": self._slot.number,
        }
        unfinished = self._folder / "ready.unfinished"
        unfinished.write_text(json.dumps(ready, indent=2))
        unfinished.rename(self._folder / "ready.json")

    def _start_control_plane(self) -> None:
        program, slot, pki = self._tools.controlplane, self._slot, self._pki
        verified = ssl.create_default_context(cafile=pki.certificate)
        verified.load_cert_chain(pki.crt("admin"), pki.key("admin"))

        def answers(url: str) -> bool:
            try:
                return httpx.get(url, verify=verified, trust_env=False).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

        etcd_health = f"http://{slot.control_plane}:{components.ETCD_PORT}/health"
        data = self._folder / "etcd"
        start = self.supervisor.start
        start(Component("etcd", components.etcd(program, slot, data), lambda: answers(etcd_health)))
        command = components.apiserver(program, slot, pki)
        start(Component("kube-apiserver", command, lambda: answers(f"{self._url}/readyz")))
        command = components.controller_manager(program, slot, pki)
        start(Component("kube-controller-manager", command, self._controllers_work))
        command = components.scheduler(program, slot, pki)
        start(Component("kube-scheduler", command, lambda: True))

    def _controllers_work(self) -> bool:
        # The first thing that users miss before the controllers run: pods want this service account.
        return self._try_kubectl("get", "serviceaccount", "default", "-n", "default")

    def _start_hostlet(self) -> None:
        config = HostletConfig(
            apiserver=self._url,
            ca=str(self._pki.certificate),
            nodes=[self._node(index, name, zone) for index, (name, zone) in enumerate(NODES.items())],
            service_cidr=self._slot.services,
            proxy_kubeconfig=str(self._pki.folder / "proxy.kubeconfig"),
            images=IMAGES,
            run_dir=str(self._folder / "hostlet"),
            # Two pods stand for two nodes: UCX must not find the shared memory between them.
            env={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
            backoff_base_s=1.0,
        )
        path = self._folder / "hostlet.json"
        config.save(path)
        self.supervisor.start(Component("hostlet", components.hostlet(path), self._nodes_ready))

    def _node(self, index: int, name: str, zone: str) -> NodeConfig:
        return NodeConfig(
            name=name,
            address=self._slot.node(index),
            kubeconfig=str(self._pki.folder / f"{name}.kubeconfig"),
            serving_cert=str(self._pki.crt(f"{name}-server")),
            serving_key=str(self._pki.key(f"{name}-server")),
            client_ca=str(self._pki.certificate),
            pod_cidr=self._slot.pods(index),
            gpus=GPUS_PER_NODE,
            zone=zone,
            accelerator="none",
        )

    def _nodes_ready(self) -> bool:
        return self._try_kubectl("wait", "--for=condition=Ready", "--timeout=1s", *(f"node/{name}" for name in NODES))

    def _start_prometheus(self) -> None:
        account = (prometheus.SERVICE_ACCOUNT, "-n", prometheus.NAMESPACE)
        token_file = self._pki.folder / "prometheus.token"
        token_file.touch(mode=0o600)
        token_file.write_text(self._kubectl("create", "token", *account, "--duration=48h"))
        targets = self._folder / "targets.json"
        command = components.discovery(self._url, self._pki.certificate, token_file, targets)
        self.supervisor.start(Component("discovery", command, targets.exists))
        config = prometheus.write_config(self._folder / "prometheus.yml", targets)
        data = self._folder / "prometheus"
        url = f"http://{self._slot.prometheus}:{components.PROMETHEUS_PORT}/-/ready"

        def ready() -> bool:
            try:
                return httpx.get(url, trust_env=False).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

        command = components.prometheus(prometheus.program(), self._slot, config, data)
        self.supervisor.start(Component("prometheus", command, ready))

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        done = self._run_kubectl(*arguments, stdin=stdin)
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _try_kubectl(self, *arguments: str) -> bool:
        return self._run_kubectl(*arguments).returncode == 0

    def _run_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        config = self._pki.folder / "admin.kubeconfig"
        command = [str(self._tools.kubectl), f"--kubeconfig={config}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def _proxy_rights() -> list[dict[str, object]]:
    """What the hostlet's service proxy may read: the services, and the pods behind them."""
    rule = {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["get", "list", "watch"]}
    group = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": PROXY_RIGHTS},
            "rules": [rule],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": PROXY_RIGHTS},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": PROXY_RIGHTS},
            "subjects": [{"kind": "User", "apiGroup": group, "name": "system:kube-proxy"}],
        },
    ]


def _list_of(items: list[dict[str, object]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def main() -> int:
    """Runs the cluster until SIGTERM or SIGINT; 1 if it could not be brought up."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.local", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the cluster's files go")
    parser.add_argument("--with-parent", action="store_true", help="end when the parent process ends")
    options = parser.parse_args()
    if options.with_parent:
        die_with_parent()
    run = LocalRun(options.folder.resolve(), build.tools(), Claim())
    for end in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end, lambda *_: run.supervisor.stop())
    try:
        run.up()
        run.supervisor.watch()
    except ClusterError as error:
        (options.folder / "failed").write_text(str(error))
        return 1
    finally:
        started = time.monotonic()
        run.supervisor.end_all()
        print(f"ended in {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
