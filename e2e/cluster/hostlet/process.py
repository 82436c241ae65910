"""Touches processes: finds the tree below one, signals it, and says what it listens on."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


def children_by_parent() -> dict[int, list[int]]:
    """Every process of this machine under its parent's id."""
    result: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir(_PROC):  # noqa: PTH208 - thousands of names, no Path needed
        if name.isdigit():
            parent = _parent(name)
            if parent is not None:
                result[parent].append(int(name))
    return result


def _parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - this runs once per process
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command between the parentheses may hold anything, so count from the last one: state, ppid.
    return int(stat[stat.rindex(b")") + 2 :].split(maxsplit=2)[1])


def descendants(root: int) -> list[int]:
    """The processes below `root`, parents first, without `root`."""
    children = children_by_parent()
    found, queue = [], list(children.get(root, []))
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue += children.get(pid, [])
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still lives."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def socket_inodes(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open; empty when it is gone."""
    folder = f"/proc/{pid}/fd"
    found: set[int] = set()
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found
