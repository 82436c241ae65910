"""The command lines of a local control plane: etcd, API server, controllers, scheduler, hostlet and Prometheus."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.pki import Authority
from e2e.cluster.slots import Slot

# How long a node may be silent before its pods count as not ready: the default of 50 s makes tests wait.
NODE_GRACE = "16s"

ANONYMOUS_FILE = "anonymous.yaml"
ANONYMOUS = """\
apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous:
  enabled: true
  conditions: [{path: /livez}, {path: /readyz}, {path: /healthz}]
"""
"""Who shows no credentials may ask for the API server's health, and nothing else."""


@dataclass(frozen=True, slots=True)
class Component:
    """One program of the cluster: what to run, and how to see that it is up."""

    name: str
    command: list[str]
    is_up: Callable[[], bool]
    env: dict[str, str] = field(default_factory=dict)


def etcd(program: Path, slot: Slot, pki: Authority, data: Path) -> list[str]:
    """Command line of etcd. It does not wait for the disk: what a test writes need not outlive the machine.

    `pki` is an authority of etcd's own: whoever gets in here passes by RBAC, so no other identity may.
    """
    client = f"https://{slot.control_plane}:{slot.ports.etcd}"
    peer = f"https://{slot.control_plane}:{slot.ports.etcd_peer}"
    cert, key = pki.crt("etcd"), pki.key("etcd")
    return [
        *(str(program), "etcd", f"--data-dir={data}", "--unsafe-no-fsync", "--log-level=warn"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
        *(f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={pki.certificate}", "--client-cert-auth"),
        *(f"--peer-cert-file={cert}", f"--peer-key-file={key}", f"--peer-trusted-ca-file={pki.certificate}"),
        "--peer-client-cert-auth",
    ]


def apiserver(program: Path, slot: Slot, pki: Authority, etcd_pki: Authority) -> list[str]:
    """Command line of the API server, with RBAC, the node authorizer and NodeRestriction on."""
    return [
        *(str(program), "kube-apiserver", f"--etcd-servers=https://{slot.control_plane}:{slot.ports.etcd}"),
        *(f"--etcd-cafile={etcd_pki.certificate}", f"--etcd-certfile={etcd_pki.crt('etcd')}"),
        f"--etcd-keyfile={etcd_pki.key('etcd')}",
        *(f"--bind-address={slot.control_plane}", f"--advertise-address={slot.control_plane}"),
        *(f"--secure-port={slot.ports.apiserver}", f"--service-cluster-ip-range={slot.services}"),
        *(f"--tls-cert-file={pki.crt('apiserver')}", f"--tls-private-key-file={pki.key('apiserver')}"),
        *(f"--client-ca-file={pki.certificate}", f"--authentication-config={pki.folder / ANONYMOUS_FILE}"),
        *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
        f"--service-account-key-file={pki.folder / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki.folder / 'service-accounts.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--kubelet-client-certificate={pki.crt('apiserver-kubelet-client')}",
        f"--kubelet-client-key={pki.key('apiserver-kubelet-client')}",
        *(f"--kubelet-certificate-authority={pki.certificate}", "--kubelet-preferred-address-types=InternalIP"),
        # The API server refuses loopback addresses in endpoints, its own included.
        "--endpoint-reconciler-type=none",
    ]


def controller_manager(program: Path, slot: Slot, pki: Authority) -> list[str]:
    """Command line of the controllers, without those that write endpoints."""
    return [
        *(str(program), "kube-controller-manager"),
        *_served("controller-manager", slot, slot.ports.controllers, pki),
        *(f"--root-ca-file={pki.certificate}", "--use-service-account-credentials"),
        f"--service-account-private-key-file={pki.folder / 'service-accounts.key'}",
        "--controllers=*,-endpoints-controller,-endpointslice-controller,-endpointslice-mirroring-controller",
        *(f"--node-monitor-grace-period={NODE_GRACE}", "--node-monitor-period=2s"),
    ]


def scheduler(program: Path, slot: Slot, pki: Authority) -> list[str]:
    """Command line of the scheduler."""
    return [str(program), "kube-scheduler", *_served("scheduler", slot, slot.ports.scheduler, pki)]


def _served(identity: str, slot: Slot, port: int, pki: Authority) -> list[str]:
    config = pki.folder / f"{identity}.kubeconfig"
    return [
        *(f"--kubeconfig={config}", f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"),
        *(f"--bind-address={slot.control_plane}", f"--secure-port={port}", "--leader-elect=false"),
        *(f"--tls-cert-file={pki.crt(identity)}", f"--tls-private-key-file={pki.key(identity)}"),
    ]


def hostlet(config: Path) -> list[str]:
    """Command line of the virtual kubelet."""
    return [sys.executable, "-m", "e2e.cluster.hostlet", "--config", str(config)]


def discovery(server: str, authority: Path, token_file: Path, out: Path) -> list[str]:
    """Command line of the program that finds Prometheus's targets."""
    return [
        *(sys.executable, "-m", "e2e.cluster.discovery", f"--server={server}", f"--authority={authority}"),
        *(f"--token-file={token_file}", f"--out={out}"),
    ]


def prometheus(program: str, slot: Slot, config: Path, data: Path) -> list[str]:
    """Command line of Prometheus."""
    return [
        *(program, f"--config.file={config}", f"--storage.tsdb.path={data}"),
        *(f"--web.listen-address={slot.prometheus}:{slot.ports.prometheus}", "--log.level=warn"),
    ]


def issue_all(pki: Authority, etcd_pki: Authority, slot: Slot, nodes: list[str]) -> None:
    """Makes every identity of the cluster; a node gets one to speak as and one to listen with."""
    etcd_pki.issue("etcd", "etcd", hosts=[slot.control_plane])
    (pki.folder / ANONYMOUS_FILE).write_text(ANONYMOUS)
    pki.issue(
        "apiserver",
        "kube-apiserver",
        hosts=[
            *(slot.control_plane, slot.kubernetes_service, "localhost", "kubernetes"),
            *("kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"),
        ],
    )
    pki.issue("apiserver-kubelet-client", "kube-apiserver-kubelet-client", groups=["system:masters"])
    pki.issue("admin", "admin", groups=["system:masters"])
    pki.issue("controller-manager", "system:kube-controller-manager", hosts=[slot.control_plane])
    pki.issue("scheduler", "system:kube-scheduler", hosts=[slot.control_plane])
    pki.issue("proxy", "system:kube-proxy")
    for index, node in enumerate(nodes):
        pki.issue(node, f"system:node:{node}", groups=["system:nodes"])
        pki.issue(f"{node}-server", f"system:node:{node}", groups=["system:nodes"], hosts=[slot.node(index), node])
