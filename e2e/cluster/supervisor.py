"""Keeps the programs of a cluster running: starts them, starts one again that ended, ends all when it is told to.

A program can be held: while the file `<name>.hold` stands in the folder it is ended and not started again. So a test
can stop Prometheus or restart the API server by touching files, whatever process it runs in.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path

from e2e.cluster.components import Component
from e2e.cluster.processes import die_with_parent
from e2e.cluster.progress import ClusterError, tail

UP_TIMEOUT_S = 60.0
# The API server would wait a minute for its watches to end; nothing here needs that.
END_TIMEOUT_S = 4.0
# A program that ends as soon as it is started is not started more often than this.
START_AGAIN_AFTER_S = 1.0


class Supervisor:
    """The programs of one cluster, children of this process, with their logs in one folder.

    `lifeline` is the reading end of a pipe: when its other end is closed, it is time to end.
    """

    def __init__(self, folder: Path, logs: Path, lifeline: int | None) -> None:
        self._folder = folder
        self._logs = logs
        self._lifeline = lifeline
        self._components: list[Component] = []
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._told_to_stop = False

    def start(self, *components: Component) -> None:
        """Starts programs and waits until all are up.

        Raises:
            ClusterError: one ended, or was not up after a minute, or the cluster is to end.
        """
        for component in components:
            self._components.append(component)
            self._launch(component)
        deadline = time.monotonic() + UP_TIMEOUT_S
        waiting = list(components)
        while waiting := [component for component in waiting if not component.is_up()]:
            for component in waiting:
                self._check_start(component, is_late=time.monotonic() > deadline)
            time.sleep(0.05)

    def _check_start(self, component: Component, *, is_late: bool) -> None:
        code = self._running[component.name].poll()
        log = self._logs / f"{component.name}.log"
        if code is not None:
            raise ClusterError(f"{component.name} ended with code {code}; log: {log}{tail(log)}")
        if is_late:
            raise ClusterError(f"{component.name} is not up after {UP_TIMEOUT_S:.0f} s; log: {log}{tail(log)}")
        if self._is_to_end():
            raise ClusterError(f"told to end while {component.name} was starting")

    def watch(self) -> None:
        """Starts again what ends, and obeys the holds, until `stop` is called (by a signal) or the lifeline ends."""
        while not self._is_to_end():
            for component in self._components:
                process = self._running[component.name]
                held = hold_file(self._folder, component.name).exists()
                if held and process.poll() is None:
                    _end(process)
                elif not held and process.poll() is not None and not self._is_to_end():
                    self._launch_again(component)
            time.sleep(0.1)

    def stop(self) -> None:
        """Makes `start` and `watch` end."""
        self._told_to_stop = True

    def end_all(self) -> None:
        """Ends the programs, the last started first."""
        for component in reversed(self._components):
            if process := self._running.get(component.name):
                _end(process)

    def _is_to_end(self) -> bool:
        if not self._told_to_stop and self._lifeline is not None:
            # Nobody writes to it: readable means that the other end is closed.
            self._told_to_stop = bool(select.select([self._lifeline], [], [], 0)[0])
        return self._told_to_stop

    def _launch_again(self, component: Component) -> None:
        if time.monotonic() - self._started[component.name] < START_AGAIN_AFTER_S:
            return
        code = self._running[component.name].returncode
        print(f"{component.name} ended with code {code}: starting it again", flush=True)
        self._launch(component)

    def _launch(self, component: Component) -> None:
        self._started[component.name] = time.monotonic()
        with (self._logs / f"{component.name}.log").open("ab") as log:
            process = subprocess.Popen(
                component.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **component.env},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        self._running[component.name] = process
        # Others read this file at any time: it is never half written.
        unfinished = self._folder / f"{component.name}.pid.unfinished"
        unfinished.write_text(str(process.pid))
        unfinished.rename(pid_file(self._folder, component.name))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def hold_file(folder: Path, component: str) -> Path:
    """While this file stands, the program is ended and stays so."""
    return folder / f"{component}.hold"


def pid_file(folder: Path, component: str) -> Path:
    """Holds the process id of the program."""
    return folder / f"{component}.pid"
