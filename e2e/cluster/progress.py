"""Long steps: a line that says what is being done, a log of each command, and a clear end when one fails."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.processes import die_with_parent

LINE_EVERY_S = 10.0
LINE_WIDTH = 60


class ClusterError(Exception):
    """A step of the cluster's life that failed; the message says which, why, and where its log is."""


class AlreadyRunningError(ClusterError):
    """Somebody uses a cluster of that name: it was left as it is, and must not be ended by who found it."""


def say(text: str) -> None:
    """Prints one progress line."""
    print(f"[cluster] {text}", flush=True)


def tail(log: Path, lines: int = 8) -> str:
    """The end of a log, indented, for an error message."""
    if not log.exists():
        return ""
    return "".join(f"\n    {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "its start")
    return last if len(last) <= LINE_WIDTH else f"{last[:LINE_WIDTH]}..."


def run_logged(
    what: str,
    command: Sequence[object],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    expected: str = "",
) -> None:
    """Runs a command (strings and paths) with its output in `log`, and says every 10 s what it is at.

    The command ends with this process.

    Raises:
        ClusterError: the command cannot be started, or ends with a code other than 0.
    """
    say(what + (f" ({expected})" if expected else ""))
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    next_line = started + LINE_EVERY_S
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - long steps run before there are threads
            )
        except OSError as error:
            raise ClusterError(f"{what}: {error}") from error
        while (code := process.poll()) is None:
            now = time.monotonic()
            if now > next_line:
                next_line = now + LINE_EVERY_S
                say(f"  {what}: {now - started:.0f} s so far; at {_last_line(log)}")
            time.sleep(0.2)
    if code != 0:
        raise ClusterError(f"{what} failed with exit code {code}; log: {log}{tail(log)}")
