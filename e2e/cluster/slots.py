"""Claims a block of loopback addresses, so that clusters side by side never meet."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster.progress import ClusterError

SLOTS: Final = range(12)


@dataclass(frozen=True, slots=True)
class Slot:
    """A block of loopback: the control plane and the nodes, the pods, and the Services of one cluster."""

    number: int

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


class Claim:
    """A slot that is ours while this process lives: the lock goes with the process, however it ends."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()) / f"headrace-slots-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in SLOTS:
            self._file = (folder / str(number)).open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                continue
            self.slot = Slot(number)
            return
        raise ClusterError(f"{len(SLOTS)} local clusters run already: end one with `python -m e2e.cluster down`")
