"""The local cluster from its users' side: starts and ends `e2e.cluster.local`, and what can be done to it alone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from e2e.cluster import build
from e2e.cluster.api import ROOT, RUNS, Ability, Cluster, wait_for
from e2e.cluster.hostlet.control import HostletControl
from e2e.cluster.local import remove_data
from e2e.cluster.processes import is_running, reap, running_process, start_ticks, write_processes
from e2e.cluster.progress import AlreadyRunningError, ClusterError, say, tail
from e2e.cluster.prometheus import SCRAPE_INTERVAL_S
from e2e.cluster.supervisor import hold_file, pid_file

UP_TIMEOUT_S = 120.0
DOWN_TIMEOUT_S = 60.0
OLD_LOGS_S = 24 * 3600.0
"""Age from which the logs of clusters that have ended are removed."""


class LocalCluster(Cluster):
    """A control plane, nodes and Prometheus on loopback, in `build/cluster/NAME`."""

    abilities = frozenset(Ability)
    scrape_interval_s = float(SCRAPE_INTERVAL_S)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lifeline: int | None = None

    def up(self, *, keep: bool = False) -> None:
        """Brings the cluster up, in the place of an earlier one of this name that did not end well.

        Raises:
            AlreadyRunningError: one of that name is running.
            ClusterError: a program did not come up.
        """
        build.tools()
        RUNS.mkdir(parents=True, exist_ok=True)
        with (RUNS / ".lock").open("w") as lock:
            # Two that start at once must not take the same folder, or sweep the other's away.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._is_orphaned():
                wait_for("the cluster of a run that was killed to end", lambda: not self.parent_pid(), timeout_s=30)
            if self.parent_pid() is not None:
                raise AlreadyRunningError(f"the cluster {self.name} is running: end it with {self._down_command}")
            _sweep()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.logs_dir.mkdir(parents=True)
            parent = self._launch(keep=keep)
        say(f"starting a control plane, two nodes and Prometheus ({self.folder.relative_to(ROOT)})")
        log = self.logs_dir / "cluster.log"
        failed = self.folder / "failed"
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not (self.folder / "ready.json").exists():
            if parent.poll() is not None or time.monotonic() > deadline:
                why = failed.read_text() if failed.exists() else f"log: {log}{tail(log)}"
                self.down()
                raise ClusterError(f"the local cluster did not come up: {why}")
            time.sleep(0.1)

    def _launch(self, *, keep: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "e2e.cluster.local", f"--folder={self.folder}"]
        reading = subprocess.DEVNULL
        if not keep:
            # Never closed by hand but in `down`: the kernel does it when this process ends, however it ends.
            reading, self._lifeline = os.pipe()
            command.append("--lifeline")
        with (self.logs_dir / "cluster.log").open("w") as output:
            parent = subprocess.Popen(
                command, cwd=ROOT, stdin=reading, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        if reading != subprocess.DEVNULL:
            os.close(reading)
        write_processes(self.folder / "pid", parent.pid, *([] if keep else [os.getpid()]))
        return parent

    def down(self) -> None:
        """Ends all of the cluster's programs and removes its data; the logs stay for a day."""
        pid = self.parent_pid()
        if pid is not None:
            started = start_ticks(pid)
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + DOWN_TIMEOUT_S
            while start_ticks(pid) == started:
                reap(pid)
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        self.__dict__.pop("_ready", None)

    def discard_logs(self) -> None:
        """Removes the logs of a cluster that has ended."""
        if self.parent_pid() is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_up(self) -> bool:
        """Whether it has come up and runs."""
        return self.parent_pid() is not None and (self.folder / "ready.json").exists()

    @cached_property
    def _ready(self) -> dict[str, Any]:
        path = self.folder / "ready.json"
        if not self.is_up:
            raise ClusterError(f"the cluster {self.name} is not up")
        ready: dict[str, Any] = json.loads(path.read_text())
        return ready

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        return Path(self._ready["kubeconfig"])

    @property
    def kubectl_path(self) -> Path:
        """Path of kubectl."""
        return Path(self._ready["kubectl"])

    @property
    def helm_path(self) -> Path:
        """Path of helm."""
        return Path(self._ready["helm"])

    @property
    def prometheus_url(self) -> str:
        """Address of Prometheus."""
        return str(self._ready["prometheus_url"])

    @property
    def faults(self) -> HostletControl:
        """What can be done to nodes and pods: lose, kill, freeze, delay."""
        return HostletControl(self.folder / "hostlet")

    def service_url(self, name: str, *, namespace: str) -> str:
        """Address of a Service's first port: ClusterIPs are loopback addresses here."""
        spec = self.get("service", name, namespace=namespace)["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def pod_url(self, name: str, port: int, *, namespace: str) -> str:
        """Address of a port of a pod: pod addresses are loopback addresses here."""
        return f"http://{self.get('pod', name, namespace=namespace)['status']['podIP']}:{port}"

    def pid_of(self, component: str) -> int:
        """Process id of one of the cluster's programs."""
        return int(pid_file(self.folder, component).read_text())

    def pod_pids(self) -> list[int]:
        """Process ids of everything that runs in pods."""
        nodes = self.faults.state()["nodes"].values()
        containers = [found for node in nodes for pod in node["pods"].values() for found in pod["containers"].values()]
        return [pid for found in containers for pid in found["pids"]]

    @contextmanager
    def held(self, component: str) -> Iterator[None]:
        """Ends a program, and lets it start again at the end of the block."""
        pid = self.pid_of(component)
        hold_file(self.folder, component).touch()
        wait_for(f"{component} to end", lambda: not is_running(pid), timeout_s=30)
        try:
            yield
        finally:
            hold_file(self.folder, component).unlink(missing_ok=True)
            wait_for(f"{component} to start", lambda: self.pid_of(component) != pid, timeout_s=30)

    def restart_apiserver(self) -> None:
        """Ends the API server, starts it again, and waits until it answers."""
        with self.held("kube-apiserver"):
            pass
        self.wait_for_apiserver()

    def wait_for_apiserver(self) -> None:
        """Waits until the API server says that it is ready."""

        def ready() -> bool:
            return self.try_kubectl("get", "--raw=/readyz").returncode == 0

        wait_for("the API server to be ready", ready, timeout_s=60)

    @property
    def _down_command(self) -> str:
        return f"`python -m e2e.cluster down --name {self.name}`"

    def parent_pid(self) -> int | None:
        """Process id of the parent of the cluster's programs, or None if there is none."""
        return running_process(self.folder / "pid")

    def _is_orphaned(self) -> bool:
        """Whether it is about to end because the process that started it has."""
        noted = self.folder / "pid"
        is_kept = noted.exists() and len(noted.read_text().splitlines()) == 1
        return self.parent_pid() is not None and not is_kept and running_process(noted, line=1) is None


def _sweep() -> None:
    """Removes what clusters left that were killed, and the logs of those that ended long ago."""
    for folder in RUNS.iterdir():
        if not folder.is_dir() or running_process(folder / "pid") is not None:
            continue
        if time.time() - folder.stat().st_mtime > OLD_LOGS_S:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            remove_data(folder)
