"""Decides that a pod which listens on all addresses has to end: local pods share one network stack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from e2e.cluster.hostlet.listeners import wildcard_listeners
from e2e.cluster.hostlet.pod import Pod
from e2e.cluster.hostlet.process import socket_inodes

REASON = "ListensOnAllAddresses"
LOOKS = 10
"""How often a socket is looked at that belongs to no pod. A program may listen before its container counts as started;
after that the socket is another program's of this machine."""


async def guard(pods: Callable[[], Iterable[Pod]], period_s: float) -> None:
    """Look for such sockets every `period_s` seconds, for ever."""
    looks: dict[int, int] = {}
    while True:
        await asyncio.sleep(period_s)
        listeners = wildcard_listeners()
        looks = {inode: looks.get(inode, 0) + 1 for inode in listeners}
        fresh = {inode for inode, count in looks.items() if count <= LOOKS}
        if not fresh:
            continue
        for pod in pods():
            for container in pod.containers():
                for pid in container.running.processes() if container.running else []:
                    for inode in fresh & socket_inodes(pid):
                        address, port = listeners[inode]
                        pod.fail(REASON, explain(container.name, address, port, pod.pod_ip))


def explain(container: str, address: str, port: int, pod_ip: str) -> str:
    """The message of such a pod."""
    shown = f"[{address}]" if ":" in address else address
    return (
        f"container {container} listens on {shown}:{port}, which would answer for every pod of this machine: "
        f"listen on the pod's own address ({pod_ip}, status.podIP)"
    )
