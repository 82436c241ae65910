"""Role changes carried out over a small engine: the drain, the switch, the roll-back, the failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace_core.api.names import Role
from headrace_core.api.wire import ErrorCode, Phase, RoleRequest
from headrace_worker.changer import RoleChanger
from headrace_worker.door import Door
from headrace_worker.metrics import Metrics
from headrace_worker.role import Identity, Standing
from tests.worker.fakes import FakeEngine, until


@asynccontextmanager
async def changing(engine: FakeEngine, **options: Any) -> AsyncIterator[tuple[RoleChanger, Door, Metrics]]:
    clock = asyncio.get_running_loop().time
    door, metrics = Door(Standing(Role.PREFILL), clock), Metrics()
    values = {"drain_poll_s": 0.001, "switch_timeout_s": 5.0} | options
    changer = RoleChanger(door, engine, metrics, Identity("boot", ""), clock=clock, **values)
    task = asyncio.create_task(changer.run())
    try:
        yield changer, door, metrics
        if task.done():
            await task
    finally:
        task.cancel()


def to_decode(drain_timeout: float = 5.0, epoch: int = 0) -> RoleRequest:
    return RoleRequest(role=Role.DECODE, expected_epoch=epoch, drain_timeout=drain_timeout)


async def test_an_idle_worker_switches_at_once() -> None:
    engine = FakeEngine()
    async with changing(engine) as (changer, door, metrics):
        assert changer.ask(to_decode()) is None
        assert door.standing.phase is Phase.DRAINING  # before anything could run: the door is closed by the request
        await until(lambda: door.standing.phase is Phase.READY)
        assert (door.standing.role, door.standing.epoch) == (Role.DECODE, 1)
        assert engine.switches == [(Role.DECODE, 1)]
        text = metrics.exposition(b"").decode()
        assert "headrace_worker_switch_seconds_count 1.0" in text
        assert "headrace_worker_drain_seconds_count 1.0" in text


LEFT_OVER: dict[str, Callable[[FakeEngine, Door], None]] = {
    "at the door": lambda _, door: setattr(door, "in_flight", 1),
    "queued": lambda engine, _: engine.set(queued_requests=1),
    "running": lambda engine, _: engine.set(running_requests=1),
    "being received": lambda engine, _: engine.set(receiving_requests=1),
    "held for others": lambda engine, _: engine.set(held_requests=1, held_kv_blocks=3),
}


@pytest.mark.parametrize("leave_over", LEFT_OVER.values(), ids=LEFT_OVER.keys())
async def test_nothing_is_switched_while_work_is_left(leave_over: Callable[[FakeEngine, Door], None]) -> None:
    engine = FakeEngine()
    async with changing(engine) as (changer, door, _):
        leave_over(engine, door)
        changer.ask(to_decode())
        await asyncio.sleep(0.05)
        assert (door.standing.phase, engine.switches) == (Phase.DRAINING, [])
        door.in_flight = 0
        engine.set(queued_requests=0, running_requests=0, receiving_requests=0, held_requests=0, held_kv_blocks=0)
        await until(lambda: door.standing.phase is Phase.READY)
        assert door.standing.role is Role.DECODE
        assert door.standing.last_switch is not None
        assert door.standing.last_switch.drain_seconds >= 0.05
        assert door.standing.last_switch.switch_seconds < 0.05


async def test_the_switch_lasts_until_the_scheduler_has_read_the_epoch() -> None:
    engine = FakeEngine(stuck=asyncio.Event())
    async with changing(engine) as (changer, door, _):
        changer.ask(to_decode())
        await until(lambda: engine.switches != [])
        await asyncio.sleep(0.05)
        assert (door.standing.phase, door.standing.epoch) == (Phase.SWITCHING, 0)
        assert engine.stuck is not None
        engine.stuck.set()
        await until(lambda: door.standing.phase is Phase.READY)
        assert door.standing.last_switch is not None
        assert door.standing.last_switch.switch_seconds >= 0.05
        assert door.standing.last_switch.drain_seconds < 0.05


async def test_the_deadline_rolls_back_with_a_new_epoch_that_the_engine_reads_too() -> None:
    engine = FakeEngine()
    engine.set(held_requests=1)
    async with changing(engine) as (changer, door, metrics):
        changer.ask(to_decode(drain_timeout=0.05))
        await until(lambda: door.standing.phase is Phase.READY)
        assert (door.standing.role, door.standing.epoch) == (Role.PREFILL, 1)
        assert engine.switches == [(Role.PREFILL, 1)]
        last = door.standing.last_switch
        assert last is not None
        assert last.outcome == "RolledBack"
        assert last.drain_seconds >= 0.05
        text = metrics.exposition(b"").decode()
        assert "headrace_worker_switch_seconds_count 0.0" in text  # a roll-back is no switch
        assert "headrace_worker_drain_seconds_count 1.0" in text
        # The next change takes the next epoch.
        engine.set(held_requests=0)
        refusal = changer.ask(to_decode())
        assert refusal is not None
        assert refusal.code is ErrorCode.STALE_EPOCH
        assert changer.ask(to_decode(epoch=1)) is None
        await until(lambda: door.standing.epoch == 2)
        assert door.standing.role is Role.DECODE


async def test_a_repeat_begins_nothing_anew() -> None:
    engine = FakeEngine()
    engine.set(running_requests=1)
    async with changing(engine) as (changer, door, _):
        assert changer.ask(to_decode()) is None
        await asyncio.sleep(0.02)
        began_s = door.standing.change and door.standing.change.began_s
        assert changer.ask(to_decode()) is None
        assert began_s == (door.standing.change and door.standing.change.began_s)
        engine.set(running_requests=0)
        await until(lambda: door.standing.phase is Phase.READY)
        await asyncio.sleep(0.02)
        assert engine.switches == [(Role.DECODE, 1)]


async def test_an_engine_that_reads_nothing_fails_the_worker() -> None:
    engine = FakeEngine(stuck=asyncio.Event())
    async with changing(engine, switch_timeout_s=0.03) as (changer, door, _):
        changer.ask(to_decode())
        await until(lambda: door.standing.phase is Phase.FAILED)
        assert door.enter(None) == "failed"


async def test_an_engine_that_reads_another_epoch_fails_the_worker() -> None:
    engine = FakeEngine(reads=7)
    async with changing(engine) as (changer, door, metrics):
        changer.ask(to_decode())
        await until(lambda: door.standing.phase is Phase.FAILED)
        assert "headrace_worker_switch_seconds_count 0.0" in metrics.exposition(b"").decode()


async def test_an_engine_that_is_gone_ends_the_run() -> None:
    engine = FakeEngine()

    async def lose_it() -> None:
        async with changing(engine) as (changer, _, _):
            engine.broken = RuntimeError("gone")
            changer.ask(to_decode())
            await asyncio.sleep(0.05)

    with pytest.raises(RuntimeError, match="gone"):
        await lose_it()


async def test_the_description_counts_requests_once() -> None:
    engine = FakeEngine()
    engine.set(queued_requests=1, running_requests=1, receiving_requests=1, held_kv_blocks=9)
    async with changing(engine) as (changer, door, _):
        door.in_flight = 2
        told = changer.describe()
        assert (told.draining_requests, told.held_kv_blocks) == (3, 9)
        door.in_flight = 5
        assert changer.describe().draining_requests == 5
