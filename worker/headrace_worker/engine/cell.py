"""The memory that a worker's server and its engine share: the role goes one way, the engine's state the other.

An engine in the middle of a step answers no call, so what the other side must know at any moment stands here. Each
half has one writer. A reader may meet a half-written record; its checksum tells, and the reader looks again.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import zlib
from dataclasses import astuple, fields
from pathlib import Path
from typing import Final

from headrace_core.api.names import Role
from headrace_worker.engine.interface import EngineState
from headrace_worker.errors import TornCellError

ENV_CELL: Final = "HEADRACE_ENGINE_CELL"
"""Path of the cell's file: set by the server for the engine's processes, which may be forked or spawned."""

_SIZE: Final = mmap.PAGESIZE
_STATE_OFFSET: Final = 1024
_ROLES: Final = tuple(Role)
_ROLE_RECORD: Final = struct.Struct("@2Q")
_STATE_RECORD: Final = struct.Struct(f"@{len(fields(EngineState))}Q")
_CHECKSUM: Final = struct.Struct("@I")
_READ_TIMEOUT_S: Final = 1.0
"""A record is written in microseconds. One that is torn for so long was left by a writer that died."""


class EngineCell:
    """One worker's cell. The server creates it; the engine opens it by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)

    @classmethod
    def create(cls, role: Role) -> EngineCell:
        """Makes a cell at epoch 0 in a file of its own, there until either side calls `close`."""
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - memory, where there is any
        handle, name = tempfile.mkstemp(prefix="headrace-cell-", dir=directory)
        os.ftruncate(handle, _SIZE)
        os.close(handle)
        cell = cls(Path(name))
        cell.write_role(role, 0)
        return cell

    def write_role(self, role: Role, epoch: int) -> None:
        """Says which role the engine has from its next look on."""
        self._write(0, _ROLE_RECORD.pack(_ROLES.index(role), epoch))

    def read_role(self) -> tuple[Role, int]:
        """The role and the epoch that the server wrote last."""
        number, epoch = _ROLE_RECORD.unpack(self._read(0, _ROLE_RECORD.size))
        return _ROLES[number], epoch

    def publish(self, state: EngineState) -> None:
        """Replaces the engine's state."""
        self._write(_STATE_OFFSET, _STATE_RECORD.pack(*astuple(state)))

    def state(self) -> EngineState:
        """The state that the engine published last.

        Raises:
            TornCellError: the engine never published, or died while it did.
        """
        return EngineState(*_STATE_RECORD.unpack(self._read(_STATE_OFFSET, _STATE_RECORD.size)))

    def close(self) -> None:
        """Removes the cell's file. Processes that have it open keep what they have."""
        self.path.unlink(missing_ok=True)

    def _write(self, offset: int, record: bytes) -> None:
        self._memory[offset : offset + len(record) + _CHECKSUM.size] = record + _CHECKSUM.pack(_checksum(record))

    def _read(self, offset: int, size: int) -> bytes:
        deadline = time.monotonic() + _READ_TIMEOUT_S
        while True:
            whole = self._memory[offset : offset + size + _CHECKSUM.size]
            record, (checksum,) = whole[:size], _CHECKSUM.unpack(whole[size:])
            if checksum == _checksum(record):
                return record
            if time.monotonic() > deadline:
                raise TornCellError(f"the record at {offset} of {self.path} was left half-written")
            time.sleep(0)


def _checksum(record: bytes) -> int:
    return ~zlib.crc32(record) & 0xFFFFFFFF  # inverted, so that an empty page is no valid record
