"""Decides how a container sees its volumes: in a mount namespace, or by translated paths where none may be made."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.cluster.hostlet import shim
from e2e.cluster.hostlet.namespaces import bwrap_arguments
from e2e.cluster.hostlet.process import descendants, signal_all

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_START_TIMEOUT_S = 10.0
_ENTER_STEP_S = 0.002


class StartError(Exception):
    """A container's program cannot be started (the kubelet's RunContainerError, exit code 128)."""


@dataclass(frozen=True)
class Mount:
    """`source` of this machine, seen by the container at `path`."""

    source: Path
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Launch:
    """A program with all that it needs; `folder` is the container's own, `log_path` takes both its outputs."""

    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: str
    mounts: Sequence[Mount]
    hostname: str
    folder: Path
    log_path: Path


class Running:
    """A started container: `main_pid` is its first process, `outer` the one that ends when all of it has ended."""

    def __init__(self, launch: Launch, outer: asyncio.subprocess.Process, main_pid: int) -> None:
        self.launch = launch
        self.outer = outer
        self.main_pid = main_pid

    async def wait(self) -> int:
        """Exit code of the first process, 128 + number when a signal ended it."""
        code = await self.outer.wait()
        return code if code >= 0 else 128 - code

    def processes(self) -> list[int]:
        """All processes of the container, the first one first."""
        return descendants(self.outer.pid)

    def signal_main(self, number: signal.Signals) -> None:
        """Signal the first process only, as a container runtime does for SIGTERM."""
        if self.outer.returncode is None:
            signal_all([self.main_pid], number)

    def signal_everything(self, number: signal.Signals) -> None:
        """Signal every process of the container."""
        if self.outer.returncode is None:
            signal_all(self.processes(), number)


class Sandbox(Protocol):
    """A way to start containers, and to run one more program inside a running one."""

    name: str

    async def start(self, launch: Launch) -> Running:
        """Start the program; raises `StartError`."""
        ...

    async def exec(self, running: Running, argv: Sequence[str]) -> asyncio.subprocess.Process:
        """Run `argv` in the container with its environment; stdout and stderr are one pipe."""
        ...


class NamespaceSandbox:
    """Bubblewrap: own mounts, processes and host name; the program is process 1 and dies with the hostlet."""

    name = "namespaces"

    async def start(self, launch: Launch) -> Running:
        """Start under bwrap."""
        program = _find(launch.argv[0], launch.env)
        arguments = bwrap_arguments([(m.source, m.path, m.read_only) for m in launch.mounts])
        command = [
            *("bwrap", *arguments, "--unshare-pid", "--unshare-uts", "--hostname", launch.hostname),
            *("--as-pid-1", "--die-with-parent", "--chdir", launch.workdir),
        ]
        running = await _spawn(command, [program, *launch.argv[1:]], launch.env, launch)
        await _until_entered(running.main_pid)
        return running

    async def exec(self, running: Running, argv: Sequence[str]) -> asyncio.subprocess.Process:
        """Enter the container's namespaces."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return await _piped(
            [
                *("nsenter", f"--target={running.main_pid}", *user, "--mount", "--pid", "--uts"),
                *(f"--wdns={running.launch.workdir}", "--", *argv),
            ],
            running.launch.env,
        )


class PathSandbox:
    """No namespaces: mount paths in command, arguments and environment are replaced by where the files are.

    A program that reads the service account's fixed path finds nothing there, so it gets a KUBECONFIG with the same
    token and authority, which Kubernetes clients take when they are not in a cluster.
    """

    name = "paths"

    async def start(self, launch: Launch) -> Running:
        """Start under the shim."""
        argv, env = self._translated(launch, launch.argv)
        _find(argv[0], env)
        workdir = translate(launch.workdir, launch.mounts)
        command = [sys.executable, "-I", "-S", shim.__file__, "--chdir", workdir]
        return await _spawn(command, argv, env, launch)

    async def exec(self, running: Running, argv: Sequence[str]) -> asyncio.subprocess.Process:
        """Run beside the container's processes."""
        translated, env = self._translated(running.launch, argv)
        # Ends with the hostlet, as what runs in namespaces does.
        wrapper = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        return await _piped([*wrapper, *translated], env, translate(running.launch.workdir, running.launch.mounts))

    def _translated(self, launch: Launch, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        env = {key: translate(value, launch.mounts) for key, value in launch.env.items()}
        account = next((m.source for m in launch.mounts if m.path.rstrip("/") == SERVICE_ACCOUNT), None)
        if account and "KUBECONFIG" not in env:
            env["KUBECONFIG"] = str(write_kubeconfig(launch.folder, account, env))
        return [translate(each, launch.mounts) for each in argv], env


def translate(text: str, mounts: Sequence[Mount]) -> str:
    """Replace each mount path in `text`, where it stands as a path of its own or as the start of one."""
    for mount in sorted(mounts, key=lambda each: -len(each.path)):
        path = re.escape(mount.path.rstrip("/"))
        target = str(mount.source)
        text = re.sub(rf"(?:(?<=://)|(?<![\w./-])){path}(?![\w.-])", lambda _, target=target: target, text)  # type: ignore[misc]
    return text


def write_kubeconfig(folder: Path, account: Path, env: Mapping[str, str]) -> Path:
    """A kubeconfig of the service account whose mounted files are in `account`."""
    server = f"https://{env['KUBERNETES_SERVICE_HOST']}:{env['KUBERNETES_SERVICE_PORT']}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "pod",
        "contexts": [{"name": "pod", "context": {"cluster": "cluster", "user": "serviceaccount"}}],
        "clusters": [
            {"name": "cluster", "cluster": {"server": server, "certificate-authority": str(account / "ca.crt")}}
        ],
        "users": [{"name": "serviceaccount", "user": {"tokenFile": str(account / "token")}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


async def choose_sandbox(wanted: str) -> Sandbox:
    """The sandbox that this machine allows; `wanted` is auto, namespaces or paths. Says the choice once."""
    if wanted not in ("auto", "namespaces", "paths"):
        raise ValueError(f"sandbox: {wanted!r} is none of auto, namespaces, paths")
    reason = "it is asked for" if wanted == "paths" else await _why_no_namespaces()
    if not reason:
        log.info("pods run in mount namespaces (bubblewrap)")
        return NamespaceSandbox()
    if wanted == "namespaces":
        raise RuntimeError(f"sandbox: namespaces is asked for, but {reason}")
    log.info("pods run without namespaces, by translated paths: %s", reason)
    return PathSandbox()


async def _until_entered(pid: int) -> None:
    """Wait until bwrap has made the namespaces and become the program: before, there is nothing to enter."""
    try:
        while _command(pid) == "bwrap":  # noqa: ASYNC110 - the kernel tells nobody of an exec
            await asyncio.sleep(_ENTER_STEP_S)
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended already


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def _why_no_namespaces() -> str:
    missing = [tool for tool in ("bwrap", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"{' and '.join(missing)} cannot be found"
    trial = [
        *("bwrap", *bwrap_arguments([(Path("/proc/self"), "/var/run/trial", True)]), "--unshare-pid", "--unshare-uts"),
        *("--hostname", "trial", "--as-pid-1", "--die-with-parent", "--", "/bin/sh", "-c", "test -r /proc/1/stat"),
    ]
    process = await _piped(trial, os.environ)
    output, _ = await process.communicate()
    return "" if process.returncode == 0 else f"bwrap fails: {output.decode(errors='replace').strip()}"


def _find(program: str, env: Mapping[str, str]) -> str:
    found = shutil.which(program, path=env.get("PATH", os.defpath))
    if not found:
        raise StartError(f'exec: "{program}": no such executable file in $PATH')
    return found


async def _piped(argv: Sequence[str], env: Mapping[str, str], workdir: str = "/") -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *argv,
        env=dict(env),
        cwd=workdir,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def _spawn(wrapper: Sequence[str], argv: Sequence[str], env: Mapping[str, str], launch: Launch) -> Running:
    info, info_end = os.pipe()
    with launch.log_path.open("ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *wrapper,
                *("--info-fd", str(info_end), "--", *argv),
                env=dict(env),
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(info_end,),
            )
        except (OSError, ValueError) as error:
            os.close(info)
            raise StartError(str(error)) from error
        finally:
            os.close(info_end)
    try:
        text = await _read_all(info)
    except BaseException:
        process.kill()
        raise
    if not text:
        await process.wait()
        raise StartError(f"{wrapper[0]} ended before the program began; see {launch.log_path}")
    return Running(launch, process, json.loads(text)["child-pid"])


async def _read_all(descriptor: int) -> bytes:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            return await reader.readuntil(b"}")
    except asyncio.IncompleteReadError:
        return b""
    finally:
        transport.close()
