"""Tells processes apart: who started a cluster, whether that process still runs, and who ends with whom."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends (Linux prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def start_ticks(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; None if it has ended (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, ticks = fields[0], fields[19]
    return None if state == "Z" else ticks


def is_running(pid: int) -> bool:
    """Whether the process has not ended."""
    return start_ticks(pid) is not None


def reap(pid: int) -> None:
    """Collects a child that has ended; nothing happens where it is another process's child or still runs."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def write_processes(path: Path, *pids: int) -> None:
    """Notes processes in a file, one a line; an id alone says little, as ids are used again."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text("".join(f"{pid} {start_ticks(pid)}\n" for pid in pids))
    unfinished.rename(path)


def running_process(path: Path, line: int = 0) -> int | None:
    """The process that `write_processes` noted in a line, or None if it has ended or there is none."""
    try:
        pid, started = path.read_text().splitlines()[line].split()
    except (FileNotFoundError, ValueError, IndexError):
        return None
    return int(pid) if start_ticks(int(pid)) == started else None
