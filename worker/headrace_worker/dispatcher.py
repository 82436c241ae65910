"""Names the decode workers for a finished prefill, by the core's rule over the peers that are known here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace_core.api.wire import HandoffAnswer, WorkerRef
from headrace_core.policy.dispatch import (
    HEAVY_DECODE_TOKENS,
    DecodeTable,
    RandomSource,
    Request,
    choose,
    explain,
)
from headrace_worker.peers import PeerTable

log = logging.getLogger(__name__)


class Dispatcher:
    """TetriInfer's dispatcher: one in each prefill worker, all of them without a word to one another."""

    def __init__(
        self, peers: PeerTable, randomness: RandomSource, clock: Callable[[], float], *, max_model_len: int
    ) -> None:
        self._peers = peers
        self._randomness = randomness
        self._clock = clock
        self._max_model_len = max_model_len
        self._table = DecodeTable()

    def dispatch(self, *, prompt_tokens: int, max_tokens: int | None) -> HandoffAnswer:
        """Choose for a request of so many prompt tokens that may generate `max_tokens`, or all the context holds."""
        room = max(0, self._max_model_len - prompt_tokens)
        bound = room if max_tokens is None else min(max_tokens, room)
        request = Request(prompt_tokens=prompt_tokens, bound_tokens=bound, heavy=bound > HEAVY_DECODE_TOKENS)
        self._table.hear(self._peers.newest(self._clock()))
        decision = choose(self._table.loads(), request, self._randomness)
        if decision.ranking:
            self._table.place(decision.ranking[0].pod, request)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", explain(decision, request))
        return HandoffAnswer(
            decode_workers=tuple(
                WorkerRef(pod=load.pod, address=load.address, epoch=load.epoch) for load in decision.ranking
            ),
            overcommitted=decision.overcommitted,
            prompt_tokens=prompt_tokens,
        )
