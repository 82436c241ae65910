"""Turns in a decode batch that is too large for one step: a round robin, as DistServe's simulator has it.

Its decode side takes requests from the front of a queue while their contexts fit into a step (50,000 tokens there), and
puts them back at the end: so above that limit residents take turns.
"""

from __future__ import annotations

from typing import final

from headrace_core.sim.batch import Batch
from headrace_core.sim.request import SimRequest


@final
class Turns:
    """Who takes part in the next step of a lane. A limit of 0 lets all take part."""

    __slots__ = ("_order", "_parked", "limit_tokens")

    def __init__(self, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._parked: list[SimRequest] = []
        """Who sits out, in the order of the queue."""
        self._order: list[SimRequest] = []
        """Who took part in the last step, in the order of the queue; empty while all fit."""

    def parked(self) -> int:
        """Requests that sit out."""
        return len(self._parked)

    def choose(self, batch: Batch, newcomers: list[SimRequest], now_ms: float) -> list[SimRequest]:
        """Let take part who is first in the queue. Returns who takes part now and did not in the step before."""
        if not self._parked and batch.kv_tokens <= self.limit_tokens:
            self._order = []
            return newcomers
        if self._parked:
            arrived = {request.number for request in newcomers}
            stepped = [one for one in self._order if one.running and one.number not in arrived]
            queue = self._parked + newcomers + stepped
        else:
            queue = batch.newest_first()
        before = {request.number for request in queue if request.running} - {one.number for one in newcomers}
        for request in queue:
            if request.running:
                batch.leave(request)
                if request.number in before:
                    request.last_token_ms = now_ms
        self._fill(batch, queue)
        return self._order

    def _fill(self, batch: Batch, queue: list[SimRequest]) -> None:
        room = self.limit_tokens
        count = 0
        for request in queue:
            context = request.whole_prompt_tokens + request.generated_tokens
            if context > room and count > 0:
                break
            room -= context
            count += 1
        self._order, self._parked = queue[:count], queue[count:]
        for request in self._order:
            batch.join(request)

    def steps_together(self, batch: Batch) -> int:
        """Steps for which the same requests take part."""
        if self._parked:
            return 1
        return max(1, (self.limit_tokens - batch.kv_tokens) // batch.size + 1)
