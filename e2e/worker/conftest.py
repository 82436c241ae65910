"""One prefill worker and one decode worker, started once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.quickstart import tiny_model
from e2e.worker.process import Worker, loopback
from headrace_core.api.names import Role


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker and a decode worker that can reach one another."""

    prefill: Worker
    decode: Worker


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny model's directory."""
    return tiny_model()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers write."""
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="session")
def pair(model: Path, logs: Path) -> Iterator[Pair]:
    """The two workers, ready."""
    workers = Pair(
        Worker(loopback(1), Role.PREFILL, model, logs, {}), Worker(loopback(2), Role.DECODE, model, logs, {})
    )
    try:
        for worker in (workers.prefill, workers.decode):
            print(f"{worker.address} ready after {worker.wait_until_ready():.1f} s; log: {worker.log}")
        yield workers
    finally:
        workers.prefill.stop()
        workers.decode.stop()
