"""What the worker needs of an engine: its state, a switch of its role, and the release of KV nobody fetches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace_core.api.names import Role


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the scheduler last published. Counters grow from the start of the process."""

    epoch: int
    """The epoch that the scheduler has read from the role cell."""
    queued_requests: int
    running_requests: int
    receiving_requests: int
    """Requests whose KV is on its way from a prefill worker."""
    held_requests: int
    """Finished prefills whose KV a decode worker has yet to pull."""
    held_kv_blocks: int
    free_kv_blocks: int
    total_kv_blocks: int
    block_size: int
    """Tokens in a KV block."""
    queued_prefill_tokens: int
    """Prompt tokens of queued requests, and what running ones have still to compute of theirs."""
    running_tokens: int
    """Tokens in the KV cache of running requests."""
    heavy_requests: int
    light_requests: int
    prefilled_tokens: int
    """Counter: prompt tokens that this engine computed itself."""
    kv_received_bytes: int
    kv_receives: int
    kv_sent_bytes: int
    kv_receive_failures: int

    @property
    def is_drained(self) -> bool:
        """Nothing queued, running or being received, and no KV held for others."""
        return not (self.queued_requests or self.running_requests or self.receiving_requests or self.held_requests)


class Engine(Protocol):
    """An engine that can change its role while it runs."""

    def state(self) -> EngineState:
        """The newest state, read without waiting for the engine."""
        ...

    async def switch(self, role: Role, epoch: int) -> int:
        """Writes role and epoch into the role cell, wakes the scheduler, returns the epoch that it has read."""
        ...

    async def release(self, request_id: str) -> bool:
        """Frees the KV held for a request that nobody will fetch; False if none is held."""
        ...

    async def ended(self) -> None:
        """Returns once the engine's process is gone. What `state` gives from then on is what it published last."""
        ...

    async def is_alive(self) -> bool:
        """Whether the engine's process still runs and answers."""
        ...
