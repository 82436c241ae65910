"""Carries out role changes: watches the drain, tells the engine, and takes the time of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace_core.api.names import Outcome
from headrace_core.api.wire import Phase, RoleRequest, RoleState
from headrace_worker import role
from headrace_worker.door import Door
from headrace_worker.engine.interface import Engine
from headrace_worker.metrics import Metrics
from headrace_worker.role import Identity, Refusal

log = logging.getLogger(__name__)


class RoleChanger:
    """One change at a time, from `ask` to the epoch that the scheduler has read."""

    def __init__(
        self,
        door: Door,
        engine: Engine,
        metrics: Metrics,
        me: Identity,
        *,
        drain_poll_s: float,
        switch_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._door = door
        self._engine = engine
        self._metrics = metrics
        self._me = me
        self._drain_poll_s = drain_poll_s
        self._switch_timeout_s = switch_timeout_s
        self._clock = clock
        self._asked = asyncio.Event()

    def ask(self, request: RoleRequest) -> Refusal | None:
        """Begin a change, or say why not. From here on the door is closed; `run` does the rest."""
        self._door.standing, refusal = role.ask(self._door.standing, request, self._me, self._clock())
        if refusal is None:
            self._asked.set()
        return refusal

    def describe(self) -> RoleState:
        """The state for `GET /v1/pd_role`."""
        state = self._engine.state()
        in_engine = state.queued_requests + state.running_requests + state.receiving_requests
        return role.describe(
            self._door.standing,
            self._me,
            requests=max(self._door.in_flight, in_engine),
            held_kv_blocks=state.held_kv_blocks,
        )

    async def run(self) -> None:
        """Carry out what is asked for, until cancelled. Ends with the engine's own error when the engine is gone."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._change()

    async def _change(self) -> None:
        door = self._door
        while door.standing.phase is Phase.DRAINING:
            is_drained = door.is_drained(self._engine.state())
            door.standing = role.drain(door.standing, is_drained=is_drained, now_s=self._clock())
            if door.standing.phase is Phase.DRAINING:
                await asyncio.sleep(self._drain_poll_s)
        step = role.next_step(door.standing)
        if step is None:
            return
        try:
            async with asyncio.timeout(self._switch_timeout_s):
                epoch_read = await self._engine.switch(step.role, step.epoch)
        except TimeoutError:
            door.standing = role.failed(door.standing)
            log.exception("the engine did not read epoch %d in %g s", step.epoch, self._switch_timeout_s)
            return
        door.standing = role.switched(door.standing, epoch_read, self._clock())
        self._tell(epoch_read)

    def _tell(self, epoch_read: int) -> None:
        standing, last = self._door.standing, self._door.standing.last_switch
        if standing.phase is Phase.FAILED or last is None:
            log.error("the engine read epoch %d instead of %d", epoch_read, standing.epoch + 1)
            return
        self._metrics.drain_seconds.observe(last.drain_seconds)
        if last.outcome == Outcome.SUCCEEDED:
            self._metrics.switch_seconds.observe(last.switch_seconds)
        log.info(
            "%s: %s to %s at epoch %d, drain %.3f s, switch %.2f ms",
            last.outcome,
            last.from_role,
            last.to_role,
            last.epoch,
            last.drain_seconds,
            last.switch_seconds * 1000,
        )
