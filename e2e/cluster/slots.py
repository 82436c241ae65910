"""Claims a block of loopback addresses, and free ports on it, so that clusters side by side never meet."""

from __future__ import annotations

import socket
from dataclasses import dataclass, fields
from typing import Final

from e2e.cluster.progress import ClusterError

SLOTS: Final = range(12)
MAX_NODES: Final = 8


@dataclass(frozen=True, slots=True)
class Ports:
    """Where each program of a cluster listens: the usual port, unless something holds it on all addresses."""

    apiserver: int = 6443
    etcd: int = 2379
    etcd_peer: int = 2380
    controllers: int = 10257
    scheduler: int = 10259
    kubelet: int = 10250
    prometheus: int = 9090


USUAL_PORTS: Final = Ports()


@dataclass(frozen=True, slots=True)
class Slot:
    """A block of loopback: the control plane and the nodes, the pods, and the Services of one cluster."""

    number: int
    ports: Ports

    @property
    def control_plane(self) -> str:
        """Address of etcd, the API server, the controllers and the scheduler."""
        return f"127.{60 + self.number}.0.1"

    @property
    def prometheus(self) -> str:
        """Address of Prometheus."""
        return f"127.{60 + self.number}.0.2"

    def node(self, index: int) -> str:
        """Address of a node's kubelet server."""
        return f"127.{60 + self.number}.1.{index + 1}"

    def pods(self, index: int) -> str:
        """Network of a node's pods."""
        return f"127.{20 + self.number}.{index}.0/24"

    @property
    def services(self) -> str:
        """Network of the ClusterIPs."""
        return f"127.{100 + self.number}.0.0/16"

    @property
    def kubernetes_service(self) -> str:
        """ClusterIP of the Service `kubernetes`: the first address of the network."""
        return f"127.{100 + self.number}.0.1"

    @property
    def apiserver_url(self) -> str:
        """URL of the API server."""
        return f"https://{self.control_plane}:{self.ports.apiserver}"

    @property
    def prometheus_url(self) -> str:
        """URL of Prometheus."""
        return f"http://{self.prometheus}:{self.ports.prometheus}"

    def _listeners(self) -> dict[str, list[str]]:
        elsewhere = {"kubelet": [self.node(index) for index in range(MAX_NODES)], "prometheus": [self.prometheus]}
        return {field.name: elsewhere.get(field.name, [self.control_plane]) for field in fields(Ports)}

    def taken_ports(self) -> list[str]:
        """The programs whose port something else holds, by their names in `Ports`."""
        listeners = self._listeners().items()
        return [name for name, hosts in listeners if not _are_free(hosts, getattr(self.ports, name))]

    def with_free_ports(self) -> Slot:
        """This slot, with another port in the place of each that is taken."""
        ports = {name: getattr(self.ports, name) for name in self._listeners()}
        for name in self.taken_ports():
            ports[name] = _free_port(self._listeners()[name][0])
        return Slot(self.number, Ports(**ports))


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot that is ours while this process lives.

    The claim is a name among the abstract Unix sockets: it ends with the process, however that ends, and it reaches as
    far as the loopback addresses do (one network namespace), whoever the users and wherever their folders are.
    """

    lock: socket.socket
    slot: Slot


def claim_slot(ports: Ports = USUAL_PORTS) -> Claim:
    """Claims a slot that nobody has and whose addresses nobody listens on.

    Raises:
        ClusterError: every slot is claimed.
    """
    second_choice: Claim | None = None
    for number in SLOTS:
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0headrace-local-cluster-{number}")
        except OSError:
            lock.close()
            continue
        slot = Slot(number, ports)
        # What listens on this slot's own addresses may use the rest of them too: leave it alone if we can.
        if not slot.taken_ports():
            return Claim(lock, slot)
        if second_choice is None:
            second_choice = Claim(lock, slot)
        else:
            lock.close()
    if second_choice is None:
        raise ClusterError(f"{len(SLOTS)} local clusters run already: end one with `python -m e2e.cluster down`")
    # No slot has all its ports: a program of this machine listens on all addresses.
    return Claim(second_choice.lock, second_choice.slot.with_free_ports())


def _are_free(hosts: list[str], port: int) -> bool:
    for host in hosts:
        with socket.socket() as listener:
            # As servers do: a connection that is winding down does not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError:
                return False
    return True


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port
