"""What the pods of one node share: settings, clients, addresses, caches, events, and delays that tests ask for."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster.hostlet.events import Events
from e2e.cluster.hostlet.kube import Kube
from e2e.cluster.hostlet.objects import ObjectCache
from e2e.cluster.hostlet.sandbox import Sandbox
from e2e.cluster.hostlet_config import HostletConfig

Json = dict[str, Any]


@dataclass
class FaultDelays:
    """Seconds by which a node is late with what it does; 0 unless a test says so."""

    status_s: float = 0.0
    termination_s: float = 0.0
    volumes_s: float = 0.0


class Addresses:
    """The addresses of one node's pods; a freed one is used again as late as can be."""

    def __init__(self, network: str) -> None:
        self._hosts = [str(each) for each in ipaddress.ip_network(network).hosts()]
        self._next = 0
        self._taken: set[str] = set()

    def take(self) -> str:
        """A free address; raises `RuntimeError` when all are taken."""
        for _ in self._hosts:
            address = self._hosts[self._next % len(self._hosts)]
            self._next += 1
            if address not in self._taken:
                self._taken.add(address)
                return address
        raise RuntimeError(f"pod_cidr: all {len(self._hosts)} addresses are taken")

    def give_back(self, address: str) -> None:
        """The address is free."""
        self._taken.discard(address)


# A pod that carries this with the value "paths" runs without namespaces also where they can be had, so that both ways
# can be tested on one machine.
SANDBOX_ANNOTATION = "hostlet/sandbox"


@dataclass
class NodeServices:
    """Everything a pod needs of its node."""

    config: HostletConfig
    address: str
    allocatable: Mapping[str, str]
    run_dir: Path
    base_env: Mapping[str, str]
    sandbox: Sandbox
    # The other way, for pods that ask for it (SANDBOX_ANNOTATION).
    path_sandbox: Sandbox
    kube: Kube
    objects: ObjectCache
    events: Events
    addresses: Addresses
    service_env: Callable[..., dict[str, str]]
    delays: FaultDelays = field(default_factory=FaultDelays)

    def sandbox_of(self, pod: Json) -> Sandbox:
        """How the pod sees its volumes."""
        wanted = (pod["metadata"].get("annotations") or {}).get(SANDBOX_ANNOTATION)
        return self.path_sandbox if wanted == self.path_sandbox.name else self.sandbox
