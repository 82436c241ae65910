"""The settings that the cluster's bring-up hands to the hostlet, as one JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class NodeConfig:
    """One node that the hostlet offers; paths are absolute, quantities are Kubernetes quantities."""

    name: str
    # Loopback address of the node (its InternalIP); the kubelet server listens on it at `kubelet_port`.
    address: str
    # Kubeconfig with a client certificate of system:node:NAME in group system:nodes.
    kubeconfig: str
    # Certificate and key of the kubelet server, and the authority whose client certificates it accepts.
    serving_cert: str
    serving_key: str
    client_ca: str
    # Loopback network that pod addresses come from, such as 127.11.0.0/24.
    pod_cidr: str
    cpu: str = "8"
    memory: str = "32Gi"
    gpus: int = 0
    pods: int = 110
    zone: str = ""
    accelerator: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    kubelet_port: int = 10250


@dataclass(frozen=True)
class HostletConfig:
    """Everything the hostlet needs; times are in seconds."""

    # URL and authority of the API server, as pods are told of it.
    apiserver: str
    ca: str
    nodes: list[NodeConfig]
    # Loopback network of the ClusterIPs, such as 127.100.0.0/16.
    service_cidr: str
    # Kubeconfig that may list and watch services and pods (system:kube-proxy and pods).
    proxy_kubeconfig: str
    # Image name without tag -> argv of its entry point.
    images: dict[str, list[str]]
    # Folder for volumes, logs and the control socket; the hostlet's own.
    run_dir: str
    # Variables that every container gets, such as UCX_TLS=tcp.
    env: dict[str, str] = field(default_factory=dict)
    # How pods see their volumes: auto, namespaces (bubblewrap) or paths (translated paths).
    sandbox: str = "auto"
    # Restart delays: the first, and the longest; the kubelet's are 10 and 300.
    backoff_base_s: float = 10.0
    backoff_max_s: float = 300.0
    # Delay between a change of a Secret, ConfigMap or label and the update of mounted files; the kubelet's is up to 60.
    volume_sync_delay_s: float = 1.0
    # Period of the search for pods that listen on all addresses.
    bind_check_s: float = 1.0
    lease_renew_s: float = 10.0

    @classmethod
    def load(cls, path: str | Path) -> HostletConfig:
        """Read the file that `save` wrote; raises `TypeError` naming a field that is unknown or missing."""
        data = json.loads(Path(path).read_text())
        return cls(**{**data, "nodes": [NodeConfig(**node) for node in data["nodes"]]})

    def save(self, path: str | Path) -> None:
        """Write the settings as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2))
