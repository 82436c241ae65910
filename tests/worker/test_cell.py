"""The memory shared by server and engine: what is written is read, by another process too, and torn records are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

import pytest

from headrace_core.api.names import Role
from headrace_worker.engine import cell as module
from headrace_worker.engine.cell import EngineCell
from headrace_worker.engine.interface import EngineState
from headrace_worker.errors import TornCellError

STATE = EngineState(*range(10, 10 + len(fields(EngineState))))


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCell]:
    monkeypatch.setattr(module, "_READ_TIMEOUT_S", 0.05)
    made = EngineCell.create(Role.DECODE)
    yield made
    made.close()


def test_a_new_cell_has_the_first_role_at_epoch_0(cell: EngineCell) -> None:
    assert cell.read_role() == (Role.DECODE, 0)


def test_the_engine_reads_what_the_server_wrote(cell: EngineCell) -> None:
    engines = EngineCell(cell.path)
    cell.write_role(Role.PREFILL, 7)
    assert engines.read_role() == (Role.PREFILL, 7)
    engines.publish(STATE)
    assert cell.state() == STATE
    assert cell.read_role() == (Role.PREFILL, 7), "the two halves overlap"


def test_a_state_that_was_never_published_is_an_error(cell: EngineCell) -> None:
    with pytest.raises(TornCellError, match=str(cell.path)):
        cell.state()


@pytest.mark.parametrize("byte", [0, 8, 100, module._STATE_RECORD.size], ids=lambda b: f"byte {b}")
def test_a_half_written_state_is_not_taken_for_a_state(cell: EngineCell, byte: int) -> None:
    cell.publish(STATE)
    cell._memory[module._STATE_OFFSET + byte] ^= 1
    with pytest.raises(TornCellError):
        cell.state()


def test_a_reader_never_sees_two_writes_mixed(cell: EngineCell) -> None:
    pid = os.fork()
    if pid == 0:
        writer = EngineCell(cell.path)
        for number in range(20_000):
            writer.publish(EngineState(*[number] * len(fields(EngineState))))
        os._exit(0)
    seen = set()
    cell.publish(EngineState(*[0] * len(fields(EngineState))))
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        state = cell.state()
        assert len({getattr(state, field.name) for field in fields(state)}) == 1, state
        seen.add(state.epoch)
    assert len(seen) > 1


def test_a_closed_cell_leaves_no_file(cell: EngineCell) -> None:
    cell.close()
    assert not cell.path.exists()
    cell.close()
