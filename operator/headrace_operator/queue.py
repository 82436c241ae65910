"""Decides which cluster is reconciled next: one key at a time, coalesced, with back-off after errors and a tick."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from headrace_operator.errors import ApiError, RetryableError
from headrace_operator.reflector import Key

log: Final = logging.getLogger(__name__)

BACKOFF_FIRST_S: Final = 0.1

Reconcile = Callable[[Key], Awaitable[float | None]]
"""Reconciles a cluster; returns after how many seconds to come again, or None: not at all."""


class Queue:
    """Keys that wait. A key that is added while it waits is one key; while it is worked on, it comes once more."""

    def __init__(self, backoff_max_s: float) -> None:
        self._backoff_max_s = backoff_max_s
        self._ready: deque[Key] = deque()
        self._waiting: set[Key] = set()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._arrived = asyncio.Event()

    def add(self, key: Key) -> None:
        """Have a key reconciled as soon as possible."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._arrived.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Have a key reconciled after a while, unless something comes up earlier."""
        if key in self._waiting:
            return
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self.add, key)

    async def run(self, reconcile: Reconcile, concurrency: int) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(reconcile))

    async def _work(self, reconcile: Reconcile) -> None:
        while True:
            key = await self._take()
            try:
                delay_s = await self._once(reconcile, key)
            finally:
                self._working.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            elif delay_s is not None:
                self.add_after(key, delay_s)

    async def _once(self, reconcile: Reconcile, key: Key) -> float | None:
        try:
            again_s: float | None = await reconcile(key)
        except (RetryableError, ApiError) as error:
            count = self._failures.get(key, 0) + 1
            self._failures[key] = count
            delay_s = min(self._backoff_max_s, BACKOFF_FIRST_S * 2.0 ** min(count - 1, 16))
            log.warning("%s/%s: %s; again in %.1f s", *key, error, delay_s)
            # What comes up meanwhile would find the same error: the back-off holds it too.
            self._again.discard(key)
            return delay_s
        self._failures.pop(key, None)
        return again_s

    async def _take(self) -> Key:
        while not self._ready:
            self._arrived.clear()
            await self._arrived.wait()
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        return key
