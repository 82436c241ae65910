"""Serves the control socket: carries out the orders of `control.HostletControl` on the nodes of this hostlet."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from e2e.cluster.hostlet.node import Node
from e2e.cluster.hostlet.pod import Pod

Json = dict[str, Any]


class OrderError(Exception):
    """An order names something that is not there."""


class Offers(Protocol):
    """The nodes, and how one is lost and brought back."""

    nodes: dict[str, Node]
    sandbox_name: str

    async def lose(self, name: str) -> None:
        """End a node's work at once."""
        ...

    async def restore(self, name: str) -> None:
        """Begin a lost node's work again."""
        ...


class ControlServer:
    """One JSON order a connection, one JSON answer: {"result": ...} or {"error": "..."}."""

    def __init__(self, offers: Offers, path: Path) -> None:
        self._offers = offers
        self._path = path
        self._server: asyncio.Server | None = None
        self._orders: dict[str, Callable[[Json], Awaitable[Any]]] = {
            "state": self._state,
            "lose_node": self._lose,
            "restore_node": self._restore,
            "kill_container": self._kill,
            "freeze_pod": self._freeze,
            "thaw_pod": self._thaw,
            "delay": self._delay,
        }

    async def start(self) -> None:
        """Listen on the socket; one that an ended hostlet left is replaced."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(await reader.readline())
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except ConnectionError:  # the client has left
            return
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Json:
        try:
            order = json.loads(line)
            carry_out = self._orders[order["order"]]
            return {"result": await carry_out(order)}
        except OrderError as error:
            return {"error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"not an order of this hostlet: {line.decode(errors='replace').strip()} ({error!r})"}

    async def _state(self, _: Json) -> Json:
        nodes = {
            name: {
                "online": node.online,
                "pods": {f"{pod.namespace}/{pod.name}": _shown(pod) for pod in node.pods.values()},
            }
            for name, node in self._offers.nodes.items()
        }
        return {"sandbox": self._offers.sandbox_name, "nodes": nodes}

    def _node(self, order: Json) -> Node:
        if order["node"] not in self._offers.nodes:
            raise OrderError(f"node: {order['node']!r} is none of {', '.join(self._offers.nodes)}")
        return self._offers.nodes[order["node"]]

    def _pod(self, order: Json) -> Pod:
        for node in self._offers.nodes.values():
            if pod := node.find(order["namespace"], order["pod"]):
                return pod
        raise OrderError(f"pod: {order['namespace']}/{order['pod']} does not run here")

    async def _lose(self, order: Json) -> None:
        await self._offers.lose(self._node(order).config.name)

    async def _restore(self, order: Json) -> None:
        await self._offers.restore(self._node(order).config.name)

    async def _kill(self, order: Json) -> None:
        pod, name = self._pod(order), order["container"]
        chosen = [each for each in pod.main if name in ("", each.name)] or [
            each for each in pod.init if each.name == name
        ]
        if not chosen or not chosen[0].running:
            raise OrderError(f"container: {name!r} does not run in {pod.namespace}/{pod.name}")
        chosen[0].kill(signal.Signals[order["signal"]])

    async def _freeze(self, order: Json) -> None:
        self._pod(order).signal_everything(signal.SIGSTOP)

    async def _thaw(self, order: Json) -> None:
        self._pod(order).signal_everything(signal.SIGCONT)

    async def _delay(self, order: Json) -> None:
        delays = self._node(order).services.delays
        for key, value in order["delays"].items():
            if not hasattr(delays, key):
                raise OrderError(f"delays: {key!r} is none of status_s, termination_s, volumes_s")
            setattr(delays, key, float(value))


def _shown(pod: Pod) -> Json:
    return {
        "uid": pod.uid,
        "ip": pod.pod_ip,
        "phase": pod.phase(),
        "containers": {
            each.name: {
                "main_pid": each.running.main_pid if each.running else None,
                "pids": each.running.processes() if each.running else [],
                "restarts": each.record.restart_count,
                "log": str(pod.log_path(each.name, each.record.restart_count)),
            }
            for each in pod.containers()
        },
    }
