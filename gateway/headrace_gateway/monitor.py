"""Keeps the registry current: listens to every worker's load, and tells every prefill worker of the decode workers.

This is TetriInfer's cluster monitor (arXiv 2401.11181, section 3.2), inside each gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import ValidationError

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport, Peers
from headrace_gateway.errors import WorkerLost
from headrace_gateway.proxy import WorkerClient
from headrace_gateway.registry import Registry, Standing

log = logging.getLogger(__name__)

PERIOD_S = 0.1
"""TetriInfer's period of reports and broadcasts."""
STALL_S = 0.5
"""A round that comes so late means that this process stood still, not that the workers were silent."""
RECONNECT_S = 0.2


def is_given_up(
    silent_s: float | None, idle_s: float, *, begun: bool, abandon_after_s: float, stream_idle_s: float
) -> bool:
    """Whether a call to a worker is given up: the worker is silent as a whole, and this call has shown no life either.

    `silent_s` is the silence of its load stream, None for a worker that is no longer known (its pod is gone);
    `idle_s` is the time since the call was sent or had its last bytes. A stream that has begun cannot be taken
    elsewhere, so it gets more time.
    """
    bound_s = stream_idle_s if begun else abandon_after_s
    return idle_s >= bound_s and (silent_s is None or silent_s >= bound_s)


class Monitor:
    """Two streams a worker, begun and ended as workers come, change role and go."""

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        *,
        out_after_s: float,
        abandon_after_s: float,
        stream_idle_s: float,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._client = client
        self._out_after_s = out_after_s
        self._abandon_after_s = abandon_after_s
        self._stream_idle_s = stream_idle_s
        self._clock = clock
        self._chance = chance
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._peers_line = b""
        self._next_round = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        last_s = self._clock()
        try:
            while True:
                now_s = self._clock()
                if now_s - last_s > PERIOD_S + STALL_S:
                    self._registry.forgive(now_s - last_s)
                last_s = now_s
                self._round(now_s)
                await asyncio.sleep(PERIOD_S)
        finally:
            for task in (*self._listening.values(), *self._telling.values()):
                task.cancel()

    def _round(self, now_s: float) -> None:
        _match(self._listening, self._registry.addresses(), self._listen)
        prefill = {
            view.address
            for view in self._registry.views(now_s)
            if view.role is Role.PREFILL and view.standing is not Standing.OUT
        }
        _match(self._telling, prefill, self._tell)
        peers = Peers(decode=self._registry.reports(Role.DECODE, now_s))
        self._peers_line = peers.model_dump_json().encode() + b"\n"
        self._next_round.set()
        self._next_round = asyncio.Event()
        self._abandon(now_s)

    def _abandon(self, now_s: float) -> None:
        silent = self._registry.silent(now_s)
        given_up = self._client.abandon(
            lambda address, heard_at_s, begun: is_given_up(
                silent.get(address),
                now_s - heard_at_s,
                begun=begun,
                abandon_after_s=self._abandon_after_s,
                stream_idle_s=self._stream_idle_s,
            )
        )
        if given_up:
            log.warning("gave up %d calls to silent workers", given_up)

    async def _listen(self, address: str) -> None:
        while True:
            try:
                async for data in self._client.load_events(address, silence_s=self._out_after_s):
                    self._registry.hear(address, LoadReport.model_validate_json(data), self._clock())
            except WorkerLost as lost:
                log.debug("%s", lost)
            except ValidationError as error:
                log.warning("load report of %s is malformed: %s", address, error)
            await asyncio.sleep(RECONNECT_S * (0.5 + self._chance()))

    async def _tell(self, address: str) -> None:
        while True:
            try:
                await self._client.put_peers(address, self._peer_lines())
            except WorkerLost as lost:
                log.debug("%s", lost)
            await asyncio.sleep(RECONNECT_S * (0.5 + self._chance()))

    async def _peer_lines(self) -> AsyncIterator[bytes]:
        while True:
            yield self._peers_line
            await self._next_round.wait()


def _match(
    tasks: dict[str, asyncio.Task[None]],
    wanted: set[str],
    begin: Callable[[str], Any],
) -> None:
    """Begin a task for each wanted address that has none, or whose task has failed, and end the others."""
    for address in tasks.keys() - wanted:
        tasks.pop(address).cancel()
    for address in [address for address, task in tasks.items() if task.done()]:
        # It never ends by itself, so this is an error that nobody has thought of. It must not cost the worker.
        log.error("the stream of %s has failed, and begins again", address, exc_info=tasks.pop(address).exception())
    for address in wanted - tasks.keys():
        tasks[address] = asyncio.get_running_loop().create_task(begin(address))
