"""Decides in which order a prefill worker computes prompts: FCFS, SJF or LJF inside sealed batches (T3).

Source: TetriInfer (arXiv 2401.11181), section 3.3.1: a raw queue, a scheduled queue, and `PrefillSchedBatch`, the
number of requests that are sorted at once. Ours is that a batch is sealed, and as late as can be: when the scheduled
queue cannot fill the next chunk. Later arrivals join a later batch, so at most `sched_batch - 1` of them overtake a
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final, final

try:
    from mypy_extensions import mypyc_attr
except ImportError:  # it comes with the compiler, and only the compiler reads the attribute

    def mypyc_attr(*_: str, **__: object) -> Callable[[type], type]:  # type: ignore[misc]
        """Leave a class as it is."""
        return lambda decorated: decorated


SCHED_BATCH: Final = 16
"""Requests that are sorted at once where nothing else is said (TetriInfer, figure 16)."""


class Order(StrEnum):
    """How the requests of a batch are sorted: by arrival, shortest prompt first, longest prompt first."""

    FCFS = "FCFS"
    SJF = "SJF"
    LJF = "LJF"


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillJob:
    """A prompt to compute. The worker and the simulator pass their own subclasses."""

    __slots__ = ("arrival_number", "prefilled_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, arrival_number: int) -> None:
        self.prompt_tokens = prompt_tokens
        """Tokens to compute; hits in the prefix cache are left out."""
        self.prefilled_tokens = 0
        """How many of them are in a pass that runs or has run."""
        self.arrival_number = arrival_number
        """Position in the order of arrival: it breaks ties."""


def _shortest_first(job: PrefillJob) -> tuple[int, int]:
    return job.prompt_tokens, job.arrival_number


def _longest_first(job: PrefillJob) -> tuple[int, int]:
    return -job.prompt_tokens, job.arrival_number


@final
class PrefillQueue:
    """The prompts of one prefill worker that are not yet taken into a pass.

    `raw` holds the arrivals in their order, `scheduled` what was sealed, in the order in which it will be computed.
    """

    __slots__ = ("order", "queued_tokens", "raw", "sched_batch", "scheduled", "scheduled_tokens")

    def __init__(self, order: Order, sched_batch: int = SCHED_BATCH) -> None:
        if sched_batch < 1:
            raise ValueError(f"sched_batch is {sched_batch}: give at least 1 request")
        self.order = order
        self.sched_batch = sched_batch
        self.raw: deque[PrefillJob] = deque()
        self.scheduled: deque[PrefillJob] = deque()
        self.queued_tokens = 0
        """Tokens in both queues, without those already taken."""
        self.scheduled_tokens = 0
        """The part of them that is scheduled."""

    def __len__(self) -> int:
        """Requests in both queues; one that is partly taken counts."""
        return len(self.raw) + len(self.scheduled)

    def add(self, job: PrefillJob) -> None:
        """Let a request join the raw queue, as the newest.

        Raises ValueError for one with nothing to compute: even a whole hit in the prefix cache computes a token.
        """
        tokens = job.prompt_tokens - job.prefilled_tokens
        if tokens < 1:
            raise ValueError(f"prompt_tokens is {job.prompt_tokens}: a job needs at least 1 token to compute")
        self.raw.append(job)
        self.queued_tokens += tokens

    def remove(self, job: PrefillJob) -> None:
        """Drop a request that was cancelled, wherever it waits. Raises ValueError for one that does not wait here."""
        tokens = job.prompt_tokens - job.prefilled_tokens
        if job in self.scheduled:
            self.scheduled.remove(job)
            self.scheduled_tokens -= tokens
        else:
            self.raw.remove(job)
        self.queued_tokens -= tokens

    def seal_until(self, tokens: int) -> None:
        """Seal batches until the scheduled queue holds so many tokens, or nothing is raw."""
        while self.scheduled_tokens < tokens and self.raw:
            self._seal()

    def _seal(self) -> None:
        """Sort the oldest raw requests and append them to the scheduled queue."""
        batch: list[PrefillJob] = []
        while self.raw and len(batch) < self.sched_batch:
            job = self.raw.popleft()
            self.scheduled_tokens += job.prompt_tokens - job.prefilled_tokens
            batch.append(job)
        if self.order is Order.SJF:
            batch.sort(key=_shortest_first)
        elif self.order is Order.LJF:
            batch.sort(key=_longest_first)
        self.scheduled.extend(batch)
