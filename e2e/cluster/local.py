"""Runs a local cluster in the foreground: the control plane, the hostlet's nodes and Prometheus, until SIGTERM.

`python -m e2e.cluster.local --folder DIR` is the parent of all programs of a cluster. They die with it, however it
ends. With `--lifeline` it ends when its standard input does, that is, when the process at the other end is gone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import ssl
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from e2e.cluster import build, components, prometheus
from e2e.cluster.components import Component
from e2e.cluster.hostlet_config import HostletConfig, NodeConfig
from e2e.cluster.pki import LIFETIME, Authority, write_service_account_keys
from e2e.cluster.progress import ClusterError
from e2e.cluster.slots import Slot, claim_slot
from e2e.cluster.supervisor import Supervisor

NODES = {"node-a": "zone-1", "node-b": "zone-2"}
GPUS_PER_NODE = 8
IMAGES = {
    **{f"headrace/{part}": [sys.executable, "-m", f"headrace_{part}"] for part in ("operator", "gateway", "worker")},
    "test/shell": ["/bin/sh"],
}
PROXY_RIGHTS = "headrace-e2e-proxy"


class LocalRun:
    """Brings one cluster up, program by program, in a folder of its own."""

    def __init__(self, folder: Path, tools: build.Tools, slot: Slot, supervisor: Supervisor) -> None:
        self._folder = folder
        self._tools = tools
        self._slot = slot
        self._supervisor = supervisor
        self._url = slot.apiserver_url
        self._pki = Authority(folder / "pki")
        self._etcd_pki = Authority(folder / "pki" / "etcd")

    def up(self) -> None:
        """Starts everything, in order, and writes `ready.json` when it is up."""
        components.issue_all(self._pki, self._etcd_pki, self._slot, list(NODES))
        write_service_account_keys(self._pki.folder / "service-accounts.key", self._pki.folder / "service-accounts.pub")
        for identity in ("admin", "controller-manager", "scheduler", "proxy", *NODES):
            self._pki.kubeconfig(identity, self._url)
        self._start_storage()
        self._kubectl("create", "namespace", prometheus.NAMESPACE)
        self._kubectl("apply", "-f", "-", stdin=prometheus.as_list([*_proxy_rights(), *prometheus.rights({})]))
        self._supervisor.start(*self._controllers(), self._hostlet(), *self._monitoring())
        ready = {
            "kubeconfig": str(self._pki.folder / "admin.kubeconfig"),
            "prometheus_url": self._slot.prometheus_url,
            "helm": str(self._tools.helm),
            "kubectl": str(self._tools.kubectl),
            "nodes": list(NODES),
            "slot": asdict(self._slot),
        }
        unfinished = self._folder / "ready.unfinished"
        unfinished.write_text(json.dumps(ready, indent=2))
        unfinished.rename(self._folder / "ready.json")

    def _start_storage(self) -> None:
        program, slot, pki, etcd_pki = self._tools.controlplane, self._slot, self._pki, self._etcd_pki
        command = components.etcd(program, slot, etcd_pki, self._folder / "etcd")
        health = f"https://{slot.control_plane}:{slot.ports.etcd}/health"
        self._supervisor.start(Component("etcd", command, Probe(health, _context(etcd_pki, "etcd")).is_ok))
        command = components.apiserver(program, slot, pki, etcd_pki)
        self._supervisor.start(Component("kube-apiserver", command, self._probe(f"{self._url}/readyz").is_ok))

    def _controllers(self) -> list[Component]:
        program, slot, pki = self._tools.controlplane, self._slot, self._pki
        # The first thing that users miss before the controllers run: pods want this service account.
        account = self._probe(f"{self._url}/api/v1/namespaces/default/serviceaccounts/default")
        health = self._probe(f"https://{slot.control_plane}:{slot.ports.scheduler}/healthz")
        command = components.controller_manager(program, slot, pki)
        return [
            Component("kube-controller-manager", command, account.is_ok),
            Component("kube-scheduler", components.scheduler(program, slot, pki), health.is_ok),
        ]

    def _hostlet(self) -> Component:
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
        nodes = self._probe(f"{self._url}/api/v1/nodes")

        def are_ready() -> bool:
            found = nodes.get() or {"items": []}
            conditions = [one for node in found["items"] for one in node["status"].get("conditions", [])]
            ready = [one for one in conditions if one["type"] == "Ready" and one["status"] == "True"]
            return len(ready) == len(NODES)

        return Component("hostlet", components.hostlet(path), are_ready)

    def _node(self, index: int, name: str, zone: str) -> NodeConfig:
        # So that all logs are found in one place while the cluster runs, too.
        (self._folder / "logs" / name).symlink_to(self._folder / "hostlet" / name / "logs")
        return NodeConfig(
            name=name,
            address=self._slot.node(index),
            kubeconfig=str(self._pki.folder / f"{name}.kubeconfig"),
            serving_cert=str(self._pki.crt(f"{name}-server")),
            serving_key=str(self._pki.key(f"{name}-server")),
            client_ca=str(self._pki.certificate),
            pod_cidr=self._slot.pods(index),
            kubelet_port=self._slot.ports.kubelet,
            gpus=GPUS_PER_NODE,
            zone=zone,
            accelerator="none",
        )

    def _monitoring(self) -> list[Component]:
        account = (prometheus.NAME, "-n", prometheus.NAMESPACE)
        token_file = self._pki.folder / "prometheus.token"
        token_file.touch(mode=0o600)
        # As long as the certificates: nobody renews it, and a demo may be kept running for days.
        token_file.write_text(self._kubectl("create", "token", *account, f"--duration={LIFETIME.days * 24}h"))
        targets = self._folder / "targets.json"
        command = components.discovery(self._url, self._pki.certificate, token_file, targets)
        config = prometheus.write_config(self._folder / "prometheus.yml", targets)
        program = components.prometheus(prometheus.program(), self._slot, config, self._folder / "prometheus")
        return [
            Component("discovery", command, targets.exists),
            Component("prometheus", program, Probe(f"{self._slot.prometheus_url}/-/ready").is_ok),
        ]

    def _probe(self, url: str) -> Probe:
        return Probe(url, _context(self._pki, "admin"))

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        config = self._pki.folder / "admin.kubeconfig"
        command = [str(self._tools.kubectl), f"--kubeconfig={config}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


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


def _context(pki: Authority, identity: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki.certificate)
    context.load_cert_chain(pki.crt(identity), pki.key(identity))
    return context


class Probe:
    """Asks one URL whether it answers."""

    def __init__(self, url: str, verify: ssl.SSLContext | bool = True) -> None:
        self._url = url
        self._http = httpx.Client(verify=verify, trust_env=False)

    def get(self) -> dict[str, Any] | None:
        """What is found there, as JSON, or None."""
        answer = self._answer()
        found: dict[str, Any] | None = answer.json() if answer else None
        return found

    def is_ok(self) -> bool:
        """Whether it answers with 200."""
        return self._answer() is not None

    def _answer(self) -> httpx.Response | None:
        try:
            answer = self._http.get(self._url)
        except httpx.HTTPError:
            return None
        return answer if answer.status_code == httpx.codes.OK else None


def remove_data(folder: Path) -> None:
    """Removes all files of a cluster that has ended, but its logs (those of a node's pods are in `logs/NODE`).

    The file `pid` goes last: while it is there, nobody else takes the folder.
    """
    for of_pods in folder.glob("hostlet/*/logs"):
        link = folder / "logs" / of_pods.parent.name
        link.unlink(missing_ok=True)
        of_pods.rename(link)
    for found in folder.iterdir():
        if found.name in ("logs", "failed", "pid"):
            continue
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.unlink()
    (folder / "pid").unlink(missing_ok=True)


def _run(folder: Path, lifeline: int | None) -> None:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(folder, logs, lifeline)
    for end in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end, lambda *_: supervisor.stop())
    claim = claim_slot()
    try:
        LocalRun(folder, build.tools(), claim.slot, supervisor).up()
        supervisor.watch()
    finally:
        started = time.monotonic()
        supervisor.end_all()
        print(f"ended in {time.monotonic() - started:.1f} s", flush=True)


def main() -> int:
    """Runs the cluster until SIGTERM or SIGINT; 1 if it could not be brought up."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.local", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the cluster's files go")
    parser.add_argument("--lifeline", action="store_true", help="end when the standard input ends")
    options = parser.parse_args()
    folder = options.folder.resolve()
    try:
        _run(folder, sys.stdin.fileno() if options.lifeline else None)
    except ClusterError as error:
        (folder / "failed").write_text(str(error))
        return 1
    finally:
        remove_data(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
