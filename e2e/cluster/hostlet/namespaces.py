"""Decides the bubblewrap arguments that put a container's volumes at their mount paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# A device folder of the container's own: the usual few devices, and shared memory that no other container sees.
_TAIL = ["--proc", "/proc", "--dev", "/dev"]


def bwrap_arguments(mounts: Sequence[tuple[Path, str, bool]]) -> list[str]:
    """Arguments for (source, mount path, read-only) triples over this machine's file system.

    A mount path that this machine lacks is never created on it: the deepest folder that exists is replaced by an
    empty one in memory with every entry bound into it, and the path is made there.
    """
    placed = sorted((_real(path), source, read_only) for source, path, read_only in mounts)
    inside = ["/dev", "/proc", *(path for path, _, _ in placed)]
    opened = sorted({_anchor(path) for path in inside if not _covered(path, inside) and not os.path.lexists(path)})
    arguments = [] if "/" in opened else ["--dev-bind", "/", "/"]
    for folder in opened:
        arguments += _rebuilt(folder, opened)
    arguments += _TAIL
    for path, source, read_only in placed:
        arguments += ["--ro-bind" if read_only else "--bind", str(source), path]
    return arguments


def _real(path: str) -> str:
    """The path with the links of this machine followed, except for parts that do not exist."""
    return os.path.realpath(path)


def _anchor(path: str) -> str:
    folder = os.path.dirname(path)  # noqa: PTH120 - strings, as bwrap takes them
    while not Path(folder).is_dir():
        folder = os.path.dirname(folder)  # noqa: PTH120
    return folder


def _covered(path: str, paths: Sequence[str]) -> bool:
    return any(path.startswith(other.rstrip("/") + "/") for other in paths if other != path)


def _rebuilt(folder: str, opened: Sequence[str]) -> list[str]:
    arguments = [] if folder == "/" else ["--tmpfs", folder]
    for name in sorted(os.listdir(folder)):  # noqa: PTH208
        entry = os.path.join(folder, name)  # noqa: PTH118
        if Path(entry).is_symlink():
            arguments += ["--symlink", os.readlink(entry), entry]  # noqa: PTH115
        elif entry not in (*opened, "/proc", "/dev"):
            arguments += ["--dev-bind", entry, entry]
    return arguments
