"""Runs an operator as a process of this machine, so that a test can end it at a chosen step and look at its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from e2e.deployed import until

EXIT_CRASHED = 70
EXIT_LEASE_LOST = 3
CRASH_POINTS = ["Reserved", "Labelled", "Draining", "Switched", "Relabelled", "RelabelledOutcome"]
"""Where `HEADRACE_CRASH_AFTER` can end an operator: after each step of a flip, and after its outcome is written."""


class Operator:
    """One operator process at a time; a context manager that ends it."""

    def __init__(self, kubeconfig: Path, folder: Path, name: str, **environment: str) -> None:
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "KUBE"))},
            "KUBECONFIG": str(kubeconfig),
            "POD_NAME": name,
            "HEADRACE_POD_IP": "127.0.0.1",
            "METRICS_PORT": "0",
            "HEALTH_PORT": "0",
            "LEASE_DURATION_SECONDS": "6",
            "LEASE_RENEW_DEADLINE_SECONDS": "5",
            "LEASE_RETRY_SECONDS": "0.5",
            "TICK_SECONDS": "2",
            **environment,
        }
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, crash_after: str = "") -> Operator:
        """Start it, to end right after a step of a flip if one is given."""
        environment = self._environment | ({"HEADRACE_CRASH_AFTER": crash_after} if crash_after else {})
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace_operator"], env=environment, stdout=log, stderr=log
            )
        return self

    def leads(self) -> bool:
        """Whether it has taken the Lease."""
        return self.log.exists() and "leading as" in self.log.read_text()

    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout_s: float) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def wait_crashed(self, timeout_s: float = 30) -> None:
        """Wait until it has ended at the step it was given."""
        until("the operator to end itself", lambda: not self.running(), timeout_s=timeout_s, seen=self.log_tail)
        assert self.wait(1) == EXIT_CRASHED, self.log_tail()

    def pause(self) -> None:
        """Stop it in its tracks, as a node does that is cut off."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None and self.running():
            self._process.kill()
            self._process.wait(10)

    def stop(self) -> int:
        """End it as Kubernetes does; its exit status."""
        if self._process is None or not self.running():
            return 0
        self._process.terminate()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def log_tail(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
