"""Touches one container that has no namespaces: starts its program, gathers its orphans, ends all with the hostlet.

Runs alone (`python -I -S shim.py --chdir DIR --info-fd FD -- PROGRAM ARGS...`), so it imports nothing of the project.
"""

from __future__ import annotations

import os
import signal
import sys

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    import ctypes  # noqa: PLC0415 - the module is also imported for its path alone

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(root: int) -> list[int]:
    """The processes below `root`."""
    found, queue = [], [root]
    while queue:
        parent = queue.pop()
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as file:  # noqa: PTH123
                children = [int(each) for each in file.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += children
        queue += children
    return found


def end_all() -> None:
    """Kill every process below this one, also those that are born meanwhile, and wait for them."""
    while True:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def end_with_hostlet(*_: object) -> None:
    """Signal handler: the hostlet is gone, or gives up this container."""
    end_all()
    os._exit(137)


def main() -> int:
    """Run the program; returns its exit code, 128 + number when a signal ended it."""
    split = sys.argv.index("--")
    options = dict(zip(sys.argv[1:split:2], sys.argv[2:split:2], strict=True))
    program, info = sys.argv[split + 1 :], int(options["--info-fd"])
    parent = os.getppid()
    prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, end_with_hostlet)
    prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 137
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.close(info)
        try:
            os.chdir(options["--chdir"])
            os.execvp(program[0], program)  # noqa: S606
        except OSError as error:
            print(f"exec {program[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(128)
    os.write(info, b'{"child-pid": %d}' % child)
    os.close(info)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            end_all()
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    os._exit(main())
