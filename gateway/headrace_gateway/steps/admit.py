"""Decides whether the gateway takes one more request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace_gateway.errors import Overloaded


class Admission:
    """Counts the requests in flight, from before their body is read until their answer is complete."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the slots. Raises Overloaded when all are taken: queueing is the workers' business."""
        if self.in_flight >= self._limit:
            raise Overloaded(f"{self._limit} requests are in flight, which is the limit: try again shortly")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
