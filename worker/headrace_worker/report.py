"""Writes the worker's load reports: one each interval and one at each change of role, the same to all who listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace_core.api.wire import LoadReport
from headrace_worker.door import Door
from headrace_worker.engine.interface import Engine, EngineState
from headrace_worker.role import Identity, Standing


def load_report(
    standing: Standing, state: EngineState, *, pod: str, address: str, boot_id: str, sequence: int
) -> LoadReport:
    """What the gateways and dispatchers know of this worker."""
    return LoadReport(
        pod=pod,
        address=address,
        boot_id=boot_id,
        sequence=sequence,
        role=standing.role,
        epoch=standing.epoch,
        accepting=standing.accepts,
        queued_requests=state.queued_requests + state.receiving_requests,
        running_requests=state.running_requests,
        queued_prefill_tokens=state.queued_prefill_tokens,
        running_tokens=state.running_tokens,
        free_kv_blocks=state.free_kv_blocks,
        total_kv_blocks=state.total_kv_blocks,
        block_size=state.block_size,
        heavy_requests=state.heavy_requests,
        light_requests=state.light_requests,
    )


class Reporter:
    """Looks at the engine once an interval, for the reports and for the busy seconds."""

    def __init__(self, door: Door, engine: Engine, me: Identity, *, pod: str, address: str, interval_s: float) -> None:
        self._door = door
        self._engine = engine
        self._me = me
        self._pod = pod
        self._address = address
        self._interval_s = interval_s
        self._sequence = 0
        self.listeners = 0
        """Streams of reports that are open. Without any no report is written."""
        self._line = b""
        self._next = asyncio.Event()
        self._closed = False
        door.on_change(self.publish)

    def publish(self) -> None:
        """Take a look, and pass it on to all who listen."""
        state = self._engine.state()
        self._door.look(state)
        if not self.listeners:
            return
        self._sequence += 1
        report = load_report(
            self._door.standing,
            state,
            pod=self._pod,
            address=self._address,
            boot_id=self._me.boot_id,
            sequence=self._sequence,
        )
        self._line = report.model_dump_json().encode()
        self._wake()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self.publish()
            await asyncio.sleep(self._interval_s)

    async def reports(self) -> AsyncGenerator[bytes, None]:
        """Each report as JSON, beginning with one made for this listener, until `close`."""
        self.listeners += 1
        try:
            self.publish()
            while not self._closed:
                wait_for_next = self._next
                yield self._line
                await wait_for_next.wait()
        finally:
            self.listeners -= 1

    def close(self) -> None:
        """End all streams of reports: the server is about to close."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
