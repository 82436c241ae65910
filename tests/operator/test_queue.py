"""One key at a time, coalescing, back-off and the tick."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from headrace_operator.errors import ApiUnavailableError
from headrace_operator.queue import BACKOFF_FIRST_S, Queue

A, B = ("llm", "a"), ("llm", "b")


async def work(queue: Queue, reconcile: Callable[[tuple[str, str]], Awaitable[float | None]], for_s: float) -> None:
    task = asyncio.create_task(queue.run(reconcile, 4))
    await asyncio.sleep(for_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Log:
    """Remembers what was reconciled, and how many of one key ran at once."""

    def __init__(self, takes_s: float = 0.0, again_s: float | None = None) -> None:
        self.takes_s, self.again_s = takes_s, again_s
        self.done: list[tuple[str, str]] = []
        self.running: list[tuple[str, str]] = []
        self.overlaps = 0
        self.most = 0

    async def __call__(self, key: tuple[str, str]) -> float | None:
        self.overlaps += key in self.running
        self.running.append(key)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(self.takes_s)
        self.running.remove(key)
        self.done.append(key)
        return self.again_s


async def test_a_key_that_waits_is_one_key() -> None:
    queue, log = Queue(1), Log()
    for _ in range(5):
        queue.add(A)
    await work(queue, log, 0.05)
    assert log.done == [A]


async def test_a_key_added_while_worked_on_comes_once_more() -> None:
    queue, log = Queue(1), Log(takes_s=0.03)
    queue.add(A)

    async def add_more() -> None:
        await asyncio.sleep(0.01)
        for _ in range(3):
            queue.add(A)

    await asyncio.gather(work(queue, log, 0.15), add_more())
    assert log.done == [A, A]
    assert log.overlaps == 0


async def test_different_keys_run_side_by_side() -> None:
    queue, log = Queue(1), Log(takes_s=0.05)
    queue.add(A)
    queue.add(B)
    await work(queue, log, 0.1)
    assert log.most == 2


async def test_it_comes_again_after_the_time_it_asked_for() -> None:
    queue, log = Queue(1), Log(again_s=0.03)
    queue.add(A)
    await work(queue, log, 0.2)
    assert 3 <= len(log.done) <= 7


async def test_an_event_is_not_held_back_by_the_tick() -> None:
    queue, log = Queue(1), Log(again_s=10)
    queue.add(A)

    async def event() -> None:
        await asyncio.sleep(0.03)
        queue.add(A)

    await asyncio.gather(work(queue, log, 0.08), event())
    assert log.done == [A, A]


async def test_errors_back_off_and_are_forgotten_after_a_success() -> None:
    queue = Queue(5)
    times: list[float] = []
    loop = asyncio.get_running_loop()

    async def fails_three_times(_: tuple[str, str]) -> float | None:
        times.append(loop.time())
        if len(times) <= 3:
            raise ApiUnavailableError("away")
        return None

    queue.add(A)
    await work(queue, fails_three_times, BACKOFF_FIRST_S * 8.5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == 4
    for gap, expected in zip(gaps, [1, 2, 4], strict=True):
        assert gap >= BACKOFF_FIRST_S * expected * 0.95
    assert queue._failures == {}


async def test_an_error_that_is_none_of_ours_ends_the_process() -> None:
    queue = Queue(1)

    async def broken(_: tuple[str, str]) -> float | None:
        raise ZeroDivisionError

    queue.add(A)
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(queue.run(broken, 1), 1)
