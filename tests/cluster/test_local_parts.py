"""The parts of the local cluster that need no cluster: addresses, ownership, and the parent that keeps its children."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster.api import open_cluster
from e2e.cluster.components import Component
from e2e.cluster.local import remove_data
from e2e.cluster.processes import is_running, running_process, write_processes
from e2e.cluster.progress import ClusterError
from e2e.cluster.slots import SLOTS, Ports, Slot, claim_slot
from e2e.cluster.supervisor import Supervisor, hold_file, pid_file


def eventually(is_so: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_blocks_of_two_slots_never_meet() -> None:
    def blocks(number: int) -> set[str]:
        slot = Slot(number, Ports())
        networks = [slot.control_plane, slot.prometheus, slot.node(0), slot.pods(0), slot.pods(1), slot.services]
        return {".".join(network.split(".")[:2]) for network in networks}

    seen = [block for number in SLOTS for block in blocks(number)]
    assert len(seen) == len(set(seen))


def test_a_port_that_is_taken_everywhere_is_not_used() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))  # noqa: S104 - this is what is tested
        everywhere.listen()
        wanted = Ports(scheduler=everywhere.getsockname()[1])
        claim = claim_slot(wanted)
        assert claim.slot.ports.scheduler != wanted.scheduler
        assert claim.slot.taken_ports() == []
    other = claim_slot()
    assert other.slot.number != claim.slot.number
    other.lock.close()
    claim.lock.close()


def test_a_slot_whose_addresses_are_used_is_left_alone() -> None:
    free = claim_slot()
    free.lock.close()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((free.slot.control_plane, free.slot.ports.apiserver))
        stranger.listen()
        claim = claim_slot()
    assert claim.slot.number != free.slot.number
    claim.lock.close()


def test_a_process_id_that_is_used_again_is_not_its_owner(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    assert running_process(noted) is None
    write_processes(noted, os.getpid(), os.getppid())
    assert running_process(noted) == os.getpid()
    assert running_process(noted, line=1) == os.getppid()
    assert running_process(noted, line=2) is None
    noted.write_text(f"{os.getpid()} 1\n")
    assert running_process(noted) is None

    ended = subprocess.Popen(["true"])
    write_processes(noted, ended.pid)
    eventually(lambda: not is_running(ended.pid))
    assert running_process(noted) is None
    ended.wait()


def test_of_a_cluster_that_ended_only_logs_stay(tmp_path: Path) -> None:
    for file in ("logs/etcd.log", "pki/ca.key", "etcd/data", "hostlet/node-a/logs/pod/0.log", "hostlet/x", "pid"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "logs" / "node-a").symlink_to(tmp_path / "hostlet" / "node-a" / "logs")
    remove_data(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["logs/etcd.log", "logs/node-a/pod/0.log"]


class Kept:
    """A supervisor that watches one sleeping program from a thread."""

    def __init__(self, folder: Path) -> None:
        reading, self.lifeline = os.pipe()
        self.folder = folder
        self._supervisor = Supervisor(folder, folder, reading)
        self._supervisor.start(Component("sleeper", ["sleep", "600"], lambda: True))
        self.watching = threading.Thread(target=self._supervisor.watch)
        self.watching.start()

    def pid(self) -> int:
        return int(pid_file(self.folder, "sleeper").read_text())

    def end(self) -> None:
        self._supervisor.stop()
        self.watching.join()
        self._supervisor.end_all()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.end()


def test_a_program_that_ends_is_started_again_unless_it_is_held(kept: Kept) -> None:
    first = kept.pid()
    time.sleep(1)  # a program that ends at once is started again after a second
    os.kill(first, 9)
    eventually(lambda: kept.pid() != first and is_running(kept.pid()))

    second = kept.pid()
    hold_file(kept.folder, "sleeper").touch()
    eventually(lambda: not is_running(second))
    time.sleep(1.2)
    assert kept.pid() == second, "it was started while it was held"
    hold_file(kept.folder, "sleeper").unlink()
    eventually(lambda: kept.pid() != second and is_running(kept.pid()))


def test_the_end_of_the_lifeline_is_the_end(kept: Kept) -> None:
    assert kept.watching.is_alive()
    os.close(kept.lifeline)
    eventually(lambda: not kept.watching.is_alive())


def test_a_program_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, tmp_path, None)
    failing = Component("etcd", ["sh", "-c", "echo address in use; exit 4"], lambda: False)
    with pytest.raises(ClusterError, match=r"etcd ended with code 4; log: .*etcd\.log\n    address in use"):
        supervisor.start(Component("sleeper", ["sleep", "600"], lambda: True), failing)
    supervisor.end_all()
    assert not is_running(int(pid_file(tmp_path, "sleeper").read_text()))


# CLUSTER -> what is said where PATH is empty
UNUSABLE = {
    "kind": "kind is not on the PATH: install kind",
    "minikube": "CLUSTER=minikube is unknown: use one of local, kind, current",
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_cluster_that_cannot_be_had(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", kind)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=UNUSABLE[kind]):
        open_cluster("any").up()
