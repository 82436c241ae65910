"""Counts what is at work here, and lets new work in or turns it away: the fence that a role change relies on.

Labels and load reports only steer the traffic. Whatever they say, nothing gets past the door while the role changes,
and nothing that is past it is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from headrace_core.api.wire import Handoff
from headrace_worker import role
from headrace_worker.engine.interface import EngineState
from headrace_worker.role import Standing


@final
class BusyClock:
    """Sums up the seconds in which there was work."""

    __slots__ = ("_busy", "_since_s", "_total_s")

    def __init__(self, now_s: float) -> None:
        self._busy = False
        self._since_s = now_s
        self._total_s = 0.0

    def set(self, *, busy: bool, now_s: float) -> None:
        """From now on there is work, or there is none."""
        self._total_s = self.total_s(now_s)
        self._busy, self._since_s = busy, now_s

    def total_s(self, now_s: float) -> float:
        """Busy seconds so far. Never falls."""
        return self._total_s + (max(0.0, now_s - self._since_s) if self._busy else 0.0)


@final
class Door:
    """The worker's one mutable place: its standing, and how many requests are inside."""

    def __init__(self, standing: Standing, clock: Callable[[], float]) -> None:
        self._standing = standing
        self._clock = clock
        self._busy = BusyClock(clock())
        self._engine_is_busy = False
        self._listeners: list[Callable[[], None]] = []
        self.in_flight = 0
        """Requests between their admission and the last byte of their answer."""

    @property
    def standing(self) -> Standing:
        """Role, epoch and phase at this moment."""
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        if standing != self._standing:
            self._standing = standing
            for tell in self._listeners:
                tell()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each change of the standing."""
        self._listeners.append(tell)

    def enter(self, handoff: Handoff | None) -> str | None:
        """Count a request in, or say why it is turned away. Who is let in must `leave`."""
        reason = role.refuse_work(self._standing, handoff)
        if reason is None:
            self.in_flight += 1
            self._update()
        return reason

    def leave(self) -> None:
        """The last byte of an answer is out, or nobody wants it any more."""
        self.in_flight -= 1
        if self.in_flight == 0:
            # The engine was last looked at when this request was inside. If it goes on without one, the next look
            # says so; else a short request would count as work until then.
            self._engine_is_busy = False
        self._update()

    def look(self, state: EngineState) -> None:
        """Take over from the engine whether it is at work; KV that is only held for others is no work."""
        self._engine_is_busy = bool(state.queued_requests or state.running_requests or state.receiving_requests)
        self._update()

    def is_drained(self, state: EngineState) -> bool:
        """Whether nothing is left of the work: not between door and engine, not in the engine, not held for others.

        What has left the door, the engine has published before; so `state` must be the newest one.
        """
        return not self.in_flight and state.is_drained

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request inside, since the process started."""
        return self._busy.total_s(self._clock())

    def _update(self) -> None:
        self._busy.set(busy=self.in_flight > 0 or self._engine_is_busy, now_s=self._clock())
