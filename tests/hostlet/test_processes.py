"""What is found out about processes and sockets of this machine, and the shim that ends with the hostlet."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cluster.hostlet.listeners import from_proc, wildcard_listeners
from e2e.cluster.hostlet.process import descendants, socket_inodes
from e2e.cluster.hostlet.sandbox import (
    Launch,
    Mount,
    NamespaceSandbox,
    PathSandbox,
    Sandbox,
    StartError,
    choose_sandbox,
)


def listening(family: socket.AddressFamily, address: str) -> socket.socket:
    found = socket.socket(family)
    found.bind((address, 0))
    found.listen()
    return found


@pytest.mark.parametrize("read", [wildcard_listeners, lambda: dict(from_proc())], ids=["netlink", "proc"])
def test_sockets_on_all_addresses_are_found(read: Callable[[], dict[int, tuple[str, int]]]) -> None:
    cases = [
        (socket.AF_INET, "0.0.0.0", "0.0.0.0"),  # noqa: S104
        (socket.AF_INET6, "::", "::"),
        (socket.AF_INET, "127.0.0.1", None),
        (socket.AF_INET6, "::1", None),
    ]
    for family, address, shown in cases:
        with listening(family, address) as sock:
            inode = os.fstat(sock.fileno()).st_ino
            assert inode in socket_inodes(os.getpid())
            found = read().get(inode)
            assert found == ((shown, sock.getsockname()[1]) if shown else None), address


def test_a_connected_socket_is_no_listener() -> None:
    with listening(socket.AF_INET, "0.0.0.0") as server, socket.create_connection(server.getsockname()) as client:  # noqa: S104
        assert os.fstat(client.fileno()).st_ino not in wildcard_listeners()


@pytest.fixture(params=["namespaces", "paths"])
async def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "paths":
        return PathSandbox()
    chosen = await choose_sandbox("auto")
    if not isinstance(chosen, NamespaceSandbox):
        pytest.skip("this machine forbids namespaces")
    return chosen


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def launch(folder: Path, script: str, **env: str) -> Launch:
    volume = folder / "volume"
    volume.mkdir()
    (volume / "file").write_text("content\n")
    return Launch(
        argv=["sh", "-c", script],
        env={"PATH": os.environ["PATH"], **env},
        workdir="/",
        mounts=[Mount(volume, "/mounted/here")],
        hostname="pod",
        folder=folder,
        log_path=folder / "log",
    )


async def test_a_program_sees_its_mounts_and_gives_its_exit_code(sandbox: Sandbox, tmp_path: Path) -> None:
    running = await sandbox.start(launch(tmp_path, 'cat /mounted/here/file "$FILE"; exit 7', FILE="/mounted/here/file"))
    assert await running.wait() == 7
    assert (tmp_path / "log").read_text() == "content\ncontent\n"
    assert not Path("/mounted").exists()


async def test_exec_sees_the_same(sandbox: Sandbox, tmp_path: Path) -> None:
    running = await sandbox.start(launch(tmp_path, "sleep 60", NAME="value"))
    process = await sandbox.exec(running, ["sh", "-c", "cat /mounted/here/file; echo $NAME"])
    output, _ = await process.communicate()
    assert output == b"content\nvalue\n"
    running.signal_everything(signal.SIGKILL)
    assert await running.wait() == 137


async def test_all_that_a_program_started_ends_with_it(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "(setsid sh -c 'sleep 60; sleep 60' &) ; sleep 0.3; exit 0"
    running = await sandbox.start(launch(tmp_path, script))
    await asyncio.sleep(0.15)
    pids = running.processes()
    assert len(pids) >= 3
    assert await running.wait() == 0
    assert not living(pids)


async def test_what_is_not_there_cannot_start(sandbox: Sandbox, tmp_path: Path) -> None:
    wanted = launch(tmp_path, "true")
    with pytest.raises(StartError, match="no-such-program"):
        await sandbox.start(Launch(**{**vars(wanted), "argv": ["no-such-program"]}))


STARTER = """
import asyncio, os, sys
from pathlib import Path
from e2e.cluster.hostlet.sandbox import Launch, NamespaceSandbox, PathSandbox
async def main():
    sandbox = {"namespaces": NamespaceSandbox, "paths": PathSandbox}[sys.argv[1]]()
    folder = Path(sys.argv[2])
    argv = ["sh", "-c", "trap '' TERM; (setsid sleep 60 &); sleep 60"]
    running = await sandbox.start(Launch(argv, dict(os.environ), "/", [], "pod", folder, folder / "log"))
    await asyncio.sleep(0.3)
    print(*running.processes(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_processes_end_with_a_killed_parent(sandbox: Sandbox, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, sandbox.name, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        pids = [int(each) for each in starter.stdout.readline().split()]
        assert len(pids) >= 3
        assert set(pids) <= set(descendants(starter.pid))
        starter.kill()
    deadline = time.monotonic() + 5
    while left := living(pids):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


async def test_a_sandbox_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="none of auto, namespaces, paths"):
        await choose_sandbox("docker")


async def test_the_choice_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("PATH", "/nowhere")
    assert (await choose_sandbox("auto")).name == "paths"
    assert "bwrap and nsenter cannot be found" in caplog.text
    with pytest.raises(RuntimeError, match="sandbox: namespaces is asked for"):
        await choose_sandbox("namespaces")
