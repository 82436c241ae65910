"""Decides in which order prefill workers are asked: the least loaded first (TetriInfer, arXiv 2401.11181, 3.2; T1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final


class PrefillLoad(Protocol):
    """What the order reads of a prefill worker."""

    @property
    def pod(self) -> str:
        """The worker's pod."""

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that wait there, or are on their way."""

    @property
    def running_tokens(self) -> int:
        """Tokens of the requests that run there."""


def load_key(worker: PrefillLoad) -> tuple[int, int, str]:
    """Sort key of the order: queued prefill tokens, then running tokens, then the name, so that ties are stable."""
    return worker.queued_prefill_tokens, worker.running_tokens, worker.pod


@final
@dataclass(slots=True)
class PrefillWorker:
    """A prefill worker for `least_loaded`, which knows it by its position in the list."""

    queued_prefill_tokens: int
    running_tokens: int
    accepting: bool


def least_loaded(workers: list[PrefillWorker]) -> int:
    """The position of the accepting worker that `load_key` puts first, position for name; -1 where none accepts."""
    best = -1
    for index, worker in enumerate(workers):
        if not worker.accepting:
            continue
        if best >= 0:
            found = workers[best]
            if worker.queued_prefill_tokens > found.queued_prefill_tokens:
                continue
            same = worker.queued_prefill_tokens == found.queued_prefill_tokens
            if same and worker.running_tokens >= found.running_tokens:
                continue
        best = index
    return best
