"""The order of events: by time, then by the order in which they were put in."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import final

Event = tuple[float, int, int, int, int, int]
"""Time in ms, sequence, kind, and three numbers whose meaning is the kind's."""


@final
class Clock:
    """Events to come. Two at the same time come in the order in which they were put in."""

    __slots__ = ("_events", "_sequence", "now_ms")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._sequence = 0
        self.now_ms = 0.0

    def put(self, at_ms: float, kind: int, first: int = 0, second: int = 0, third: int = 0) -> None:
        """Let an event happen at `at_ms`, which is not before now."""
        self._sequence += 1
        heappush(self._events, (at_ms, self._sequence, kind, first, second, third))

    def next_ms(self) -> float:
        """When the next event is; infinite when there is none."""
        return self._events[0][0] if self._events else float("inf")

    def pop(self) -> Event:
        """The next event; it is now. Raises IndexError when there is none."""
        event = heappop(self._events)
        self.now_ms = event[0]
        return event
