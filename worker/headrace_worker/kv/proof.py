"""What proves that KV pulled from a prefill worker is the request's own: a nonce beside it, and the memory it lies in.

A prefill worker gives a request's blocks to another one when the lease ends, and a pull that comes later reads whatever
lies there by then, with success. So every request that is held gets a nonce, written before its KV handle is given out
and cleared before its blocks are freed. Who reads the KV first and finds the nonce after it knows that the blocks were
the request's own until the last byte was read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

NONCE_BYTES: Final = 16
NO_NONCE: Final = bytes(NONCE_BYTES)
_SLOT_KEY: Final = "headrace_nonce_slot"
_NONCE_KEY: Final = "headrace_nonce"


@dataclass(frozen=True, slots=True)
class Proof:
    """The nonce of one held request, and where it stands while the request is held."""

    slot: int
    nonce: bytes

    @classmethod
    def fresh(cls, slot: int) -> Proof:
        """A proof that no other request has had."""
        return cls(slot, secrets.token_bytes(NONCE_BYTES))

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Proof | None:
        """What `kv_transfer_params` say; None where they carry none or a malformed one."""
        slot, nonce = params.get(_SLOT_KEY), params.get(_NONCE_KEY)
        if not isinstance(slot, int) or not isinstance(nonce, str):
            return None
        try:
            raw = bytes.fromhex(nonce)
        except ValueError:
            return None
        return cls(slot, raw) if len(raw) == NONCE_BYTES and raw != NO_NONCE and slot >= 0 else None

    def as_params(self) -> dict[str, Any]:
        """The fields that travel with the KV handle."""
        return {_SLOT_KEY: self.slot, _NONCE_KEY: self.nonce.hex()}


class Nonces:
    """Nonces in memory at a fixed address, which NIXL can register: one for each slot, all clear at first."""

    def __init__(self, slots: int, memory: mmap.mmap) -> None:
        self.slots = slots
        self._memory = memory
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)
        self.size = slots * NONCE_BYTES

    @classmethod
    def private(cls, slots: int) -> Nonces:
        """Nonces of this process alone: what a decode worker reads into."""
        return cls(slots, mmap.mmap(-1, slots * NONCE_BYTES))

    @classmethod
    def shared(cls, name: str, slots: int) -> Nonces:
        """The same nonces in every process of one engine: its scheduler writes them, its ranks' agents serve them.

        Raises:
            OSError: the file cannot be made or mapped.
        """
        path = _path(name)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, slots * NONCE_BYTES)  # whoever comes first makes it; for the others it has this size
            return cls(slots, mmap.mmap(handle, slots * NONCE_BYTES))
        finally:
            os.close(handle)

    @staticmethod
    def forget(name: str) -> None:
        """Removes the name of shared nonces; those who have them keep them."""
        _path(name).unlink(missing_ok=True)

    def write(self, proof: Proof) -> None:
        """Puts a nonce into its slot."""
        self._memory[self._bytes(proof.slot)] = proof.nonce

    def clear(self, slot: int) -> None:
        """Takes the nonce out of a slot: from here on no read of its KV can be proven."""
        self._memory[self._bytes(slot)] = NO_NONCE

    def read(self, slot: int) -> bytes:
        """What stands in a slot."""
        return self._memory[self._bytes(slot)]

    def place(self, slot: int) -> tuple[int, int, int]:
        """Address, length and device of a slot, as NIXL describes memory."""
        return place(self.address, slot)

    def _bytes(self, slot: int) -> slice:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return slice(slot * NONCE_BYTES, (slot + 1) * NONCE_BYTES)


def place(base_address: int, slot: int) -> tuple[int, int, int]:
    """Address, length and device of a slot of nonces that begin at an address, as NIXL describes memory."""
    return base_address + slot * NONCE_BYTES, NONCE_BYTES, 0


def _path(name: str) -> Path:
    memory = Path("/dev/shm")  # noqa: S108 - memory, where there is any
    folder = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"headrace-nonces-{name}"
