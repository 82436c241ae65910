"""Decides in which order prefill workers are asked: the least loaded first (TetriInfer, arXiv 2401.11181, 3.2; T1)."""

from __future__ import annotations

from typing import Protocol


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
