"""The nonce by which a decode worker sees, after it has read KV, that the blocks were still that request's.

A prefill worker frees its blocks when a lease ends, and nothing stops a read that comes late, or is slow: it would get
another request's KV and a fluent, wrong answer. So each request on the prefill side writes a number of its own into a
slot of registered memory before its first block is computed, and wipes it before its blocks are freed. The number and
the slot's address travel with the KV's handle. The decode side reads the KV, then the slot: the number is there only
if the blocks were the request's all the while.
"""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass, field
from typing import Any, Final

PARAM: Final = "headrace_nonce"
"""Key in `kv_transfer_params`."""

SLOT_BYTES: Final = 8
NOTHING: Final = 0
"""What stands in a slot that holds no request's number."""


NOWHERE: Final = -1
"""The number of a nonce that stands in no slot: not even an empty one, or one that names no place, equals it."""


@dataclass(frozen=True, slots=True)
class Nonce:
    """One request's number, and where each rank of the prefill worker keeps it."""

    value: int
    addresses: dict[int, int]
    """Address of the slot by tensor rank."""

    def as_param(self) -> dict[str, Any]:
        """The form in which it travels; numbers beyond 2^53 are hex, because JSON readers round them."""
        return {"value": hex(self.value), "addresses": {str(rank): hex(at) for rank, at in self.addresses.items()}}

    @classmethod
    def from_params(cls, params: dict[str, Any] | None) -> Nonce | None:
        """The nonce in a KV handle; None when it has none (its prefill worker is a plain vLLM).

        One that is not in our form becomes a nonce that stands nowhere, and is never found.
        """
        param = (params or {}).get(PARAM)
        if param is None:
            return None
        try:
            addresses = {int(rank): int(at, 16) for rank, at in param["addresses"].items()}
            value = int(param["value"], 16)
        except (AttributeError, KeyError, TypeError, ValueError):
            return cls(NOWHERE, {})
        return cls(value, addresses) if value > NOTHING else cls(NOWHERE, {})


def slots_needed(blocks: int, running_requests: int) -> int:
    """Each request in hand has a block of its own, but for those that were preempted, which are put first."""
    return blocks + running_requests


@dataclass(slots=True)
class Slots:
    """The scheduler's side: which request has which slot, and which number."""

    count: int
    areas: dict[int, int] = field(default_factory=dict)
    """Address of the first slot by tensor rank, known once the ranks have registered their memory."""
    taken: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Slot and number by request."""
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.count))

    def take(self, request_id: str) -> tuple[int, int]:
        """The request's slot and number, new ones on the first call."""
        if request_id not in self.taken:
            self.taken[request_id] = (self._free.pop(), secrets.randbits(63) | 1)
        return self.taken[request_id]

    def give_back(self, request_id: str) -> int | None:
        """Frees the request's slot, which must be wiped before anyone writes to it; None if it had none."""
        slot, _ = self.taken.pop(request_id, (None, NOTHING))
        if slot is not None:
            self._free.append(slot)
        return slot

    def nonce(self, request_id: str) -> Nonce | None:
        """What goes with the handle of the request's KV."""
        if request_id not in self.taken or not self.areas:
            return None
        slot, value = self.taken[request_id]
        return Nonce(value, {rank: area + slot * SLOT_BYTES for rank, area in self.areas.items()})


class Area:
    """A rank's side: memory that other workers may read, one slot a request."""

    def __init__(self, slots: int) -> None:
        self._memory = (ctypes.c_int64 * slots)()
        self._slot_of: dict[str, int] = {}

    @property
    def address(self) -> int:
        """Address of the first slot."""
        return ctypes.addressof(self._memory)

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return ctypes.sizeof(self._memory)

    def write(self, request_id: str, slot: int, value: int) -> None:
        """Puts the request's number into its slot."""
        self._memory[slot] = value
        self._slot_of[request_id] = slot

    def wipe(self, request_id: str) -> None:
        """Makes the request's number unreadable."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._memory[slot] = NOTHING


class Inbox:
    """A rank's memory for numbers that it reads from others: one slot a read in flight."""

    def __init__(self, slots: int) -> None:
        self._memory = (ctypes.c_int64 * slots)()
        self._free = list(range(slots))

    @property
    def address(self) -> int:
        """Address of the first slot."""
        return ctypes.addressof(self._memory)

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return ctypes.sizeof(self._memory)

    def open(self) -> int | None:
        """An empty slot, or None when all are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._memory[slot] = NOTHING
        return slot

    def close(self, slot: int) -> int:
        """What came into the slot, which is free again."""
        value = self._memory[slot]
        self._free.append(slot)
        return value
