"""Tells prefill workers in the background that nobody will come for a KV, so that they need not keep its lease."""

from __future__ import annotations

import asyncio
import logging

from headrace_core.api.wire import PATH_RELEASE, Release
from headrace_gateway.errors import WorkerLost
from headrace_gateway.ports import Workers
from headrace_gateway.steps.prefill import Prefilled

log = logging.getLogger(__name__)

MAX_PENDING = 1024
ATTEMPTS = 3
TIMEOUT_S = 2.0
FIRST_WAIT_S = 0.1


class Releases:
    """Releases under way. What cannot be released ends with its lease."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, prefilled: Prefilled, request_id: str) -> None:
        """Release a KV soon; never blocks. Harmless where it has been fetched or released already."""
        if len(self._tasks) >= MAX_PENDING:
            log.warning("too many releases are pending: the KV of %s stays until its lease ends", request_id)
            return
        task = asyncio.get_running_loop().create_task(self._release(prefilled, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is under way, and cancel the rest."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, prefilled: Prefilled, request_id: str) -> None:
        body = Release(kv_transfer_params=prefilled.kv_transfer_params).model_dump_json().encode()
        failure = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 4 ** (attempt - 1))
            try:
                async with (
                    asyncio.timeout(TIMEOUT_S),
                    self._workers.post(prefilled.address, PATH_RELEASE, body, request_id) as stream,
                ):
                    await stream.read()
                    if stream.status < 500:  # noqa: PLR2004 - HTTP's classes
                        return
                    failure = f"status {stream.status}"
            except (WorkerLost, TimeoutError) as error:
                failure = str(error) or "timeout"
        log.info("the KV of %s at %s stays until its lease ends: %s", request_id, prefilled.address, failure)
