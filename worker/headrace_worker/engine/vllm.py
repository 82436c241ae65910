"""vLLM as the worker's engine: switches and releases are calls into its core, the state is read from the cell."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from headrace_worker.engine.cell import EngineCell
from headrace_worker.engine.interface import EngineState

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_core.api.names import Role

ANSWER_TIMEOUT_S: Final = 10.0
"""Longer than any single step takes: calls are answered between steps."""

ENDED_POLL_S: Final = 0.1

CALL_READ_ROLE: Final = "headrace_read_role"
"""The engine core's call that looks at the cell and returns the epoch there."""
CALL_RELEASE: Final = "headrace_release"
"""The engine core's call that ends the lease of a request's KV."""


class VllmEngine:
    """An `Engine` over a running vLLM."""

    def __init__(self, llm: AsyncLLM, cell: EngineCell) -> None:
        self._llm = llm
        self._cell = cell

    def state(self) -> EngineState:
        """The state that the scheduler published last; see `EngineCell.state` for the error."""
        return self._cell.state()

    async def switch(self, role: Role, epoch: int) -> int:
        """Writes role and epoch, wakes the scheduler, and returns the epoch that it has read."""
        self._cell.write_role(role, epoch)
        read: int = await self._llm.engine_core.call_utility_async(CALL_READ_ROLE)
        return read

    async def release(self, request_id: str) -> bool:
        """Frees the KV of a finished prefill, named by the `remote_request_id` of its `kv_transfer_params`."""
        released: bool = await self._llm.engine_core.call_utility_async(CALL_RELEASE, request_id)
        return released

    async def ended(self) -> None:
        """Returns once the engine's process has ended or given up; vLLM watches it from a thread."""
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM gives no event
            await asyncio.sleep(ENDED_POLL_S)

    async def is_alive(self) -> bool:
        """Whether the engine answers a call within `ANSWER_TIMEOUT_S`."""
        if self._llm.errored:
            return False
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._llm.engine_core.call_utility_async(CALL_READ_ROLE)
        except TimeoutError:
            return False
        return not self._llm.errored
