"""A client of the hostlet's fault controls, for tests: loses nodes, kills and freezes pods, makes a node slow."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class ControlError(Exception):
    """The hostlet refused an order; the message says why."""


class HostletControl:
    """Gives orders through the control socket under the hostlet's run folder; each returns when it is done."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / "control.sock"

    def _order(self, order: str, **arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self._path))
            connection.sendall(json.dumps({"order": order, **arguments}).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        if "error" in answer:
            raise ControlError(answer["error"])
        return answer["result"]

    def state(self) -> dict[str, Any]:
        """Nodes with their pods, containers and processes, and the sandbox in use."""
        return dict(self._order("state"))

    def lose_node(self, node: str) -> None:
        """Kill the node's processes and end its lease and reports, without telling the API server."""
        self._order("lose_node", node=node)

    def restore_node(self, node: str) -> None:
        """Bring a lost node back, as after a reboot."""
        self._order("restore_node", node=node)

    def kill_container(self, namespace: str, pod: str, container: str = "", signal: str = "SIGKILL") -> None:
        """Send a signal to every process of a container (the first one when none is named)."""
        self._order("kill_container", namespace=namespace, pod=pod, container=container, signal=signal)

    def freeze_pod(self, namespace: str, pod: str) -> None:
        """Stop all processes of a pod (SIGSTOP)."""
        self._order("freeze_pod", namespace=namespace, pod=pod)

    def thaw_pod(self, namespace: str, pod: str) -> None:
        """Let a frozen pod go on (SIGCONT)."""
        self._order("thaw_pod", namespace=namespace, pod=pod)

    def delay(
        self,
        node: str,
        *,
        status_s: float | None = None,
        termination_s: float | None = None,
        volumes_s: float | None = None,
    ) -> None:
        """Make a node late, in seconds: status reports, the end of a terminated pod's object, updates of volumes."""
        given = {"status_s": status_s, "termination_s": termination_s, "volumes_s": volumes_s}
        self._order("delay", node=node, delays={key: value for key, value in given.items() if value is not None})
