"""A simulated prefill worker: its queue, its passes through the pipeline stages, its prefix cache."""

from __future__ import annotations

from typing import cast, final

from headrace_core.perf.costs import StepCosts, squares
from headrace_core.policy.chunking import Piece, cut, take
from headrace_core.policy.prefill_order import PrefillQueue
from headrace_core.sim.outcome import Status
from headrace_core.sim.request import KvCache, SimRequest, Surroundings
from headrace_core.sim.scenario import PrefillRules


@final
class PrefixCache:
    """The prompt prefixes that a worker remembers: hashes of blocks, the least recently used one forgotten first."""

    __slots__ = ("_hashes", "block_tokens", "capacity_blocks")

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_tokens // block_tokens if block_tokens > 0 else 0
        self._hashes: dict[int, None] = {}

    def hit_tokens(self, hashes: tuple[int, ...], prompt_tokens: int) -> int:
        """Leading tokens of a prompt that are remembered. The last token is computed in any case."""
        found = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            del self._hashes[block_hash]
            self._hashes[block_hash] = None
            found += 1
        return min(found * self.block_tokens, prompt_tokens - 1)

    def remember(self, hashes: tuple[int, ...]) -> None:
        """Keep a prompt that was computed."""
        for block_hash in hashes:
            self._hashes.pop(block_hash, None)
            self._hashes[block_hash] = None
        while len(self._hashes) > self.capacity_blocks:
            del self._hashes[next(iter(self._hashes))]

    def forget(self) -> None:
        """Start cold, as after a flip."""
        self._hashes.clear()


@final
class PrefillReplica:
    """The prefill side of one worker.

    A pass enters the first pipeline stage when that is free, and leaves the last one `stages` stage times later, or
    later still when a slower pass is ahead of it. The blocks of a prompt are held from its first pass until its KV was
    fetched; a prompt that finds no free blocks waits, and with it those behind.
    """

    __slots__ = (
        "_around",
        "_batching",
        "_limit_tokens",
        "_passes",
        "_stage_free_ms",
        "_stamp",
        "_waking",
        "busy_ms",
        "cache",
        "costs",
        "held_requests",
        "kv",
        "passes",
        "queue",
        "queued_squares",
        "under_way_requests",
        "under_way_tokens",
        "worker",
    )

    def __init__(
        self,
        worker: int,
        costs: StepCosts,
        kv: KvCache,
        cache: PrefixCache,
        *,
        around: Surroundings,
        rules: PrefillRules,
    ) -> None:
        self.worker = worker
        self.costs = costs
        self.kv = kv
        self.cache = cache
        self.queue = PrefillQueue(rules.order, rules.sched_batch)
        self.queued_squares = 0.0
        """Share of the queued prompts in t2, see `perf.costs.squares`."""
        self.busy_ms = 0.0
        self.passes = 0
        self.held_requests = 0
        """Whose KV is here and was not fetched yet, those under way included."""
        self.under_way_tokens = 0
        self.under_way_requests = 0
        self._around = around
        self._batching = rules.batching
        self._limit_tokens = rules.limit_tokens
        self._passes: list[tuple[float, list[Piece]]] = []
        self._stage_free_ms = [0.0] * costs.stages
        self._stamp = 0
        self._waking = False

    def is_idle(self) -> bool:
        """Whether nothing is queued, computed or held: what a drain waits for."""
        return len(self.queue) == 0 and not self._passes and self.held_requests == 0

    def add(self, request: SimRequest, hashes: tuple[int, ...], now_ms: float) -> None:
        """Queue a request. One whose prompt can never be held here is rejected."""
        request.prefill_worker = self.worker
        if self.kv.blocks(request.whole_prompt_tokens) > self.kv.total_blocks:
            request.status = int(Status.REJECTED)
            self._around.ended(request, now_ms)
            return
        if hashes:
            request.cached_tokens = self.cache.hit_tokens(hashes, request.whole_prompt_tokens)
            request.prompt_tokens = request.whole_prompt_tokens - request.cached_tokens
        self.queue.add(request)
        self.queued_squares += squares(request.cached_tokens, request.prompt_tokens)
        self.poke(now_ms)

    def poke(self, now_ms: float) -> None:
        """Look at the queue as soon as the first stage is free, after all that happens at that time."""
        if not self._waking and len(self.queue) > 0:
            self._waking = True
            self._around.wake_prefill(self.worker, max(now_ms, self._stage_free_ms[0]), -1)

    def wake(self, now_ms: float, stamp: int) -> None:
        """Start a pass (stamp -1), or end the oldest one."""
        if stamp < 0:
            self._waking = False
            self._start(now_ms)
        else:
            self._end(now_ms)

    def release(self, request: SimRequest, now_ms: float) -> None:
        """The KV was fetched, or nobody needs it."""
        self.held_requests -= 1
        self.kv.give_back(self.kv.blocks(request.whole_prompt_tokens), now_ms)
        self.poke(now_ms)

    def _start(self, now_ms: float) -> None:
        pieces = self._that_fit(cut(self.queue, self._batching, self._limit_tokens), now_ms)
        if not pieces:
            return  # the next release looks again
        tokens, t2 = 0, 0.0
        for piece in pieces:
            request = _request(piece)
            tokens += piece.tokens
            t2 += squares(request.cached_tokens + piece.offset, piece.tokens)
            if piece.offset == 0:
                request.prefill_start_ms = now_ms
                self.under_way_requests += 1
        take(self.queue, pieces)
        self.queued_squares -= t2
        self.under_way_tokens += tokens
        self._stamp += 1
        self.passes += 1
        end_ms = self._through_the_stages(now_ms, tokens, t2)
        self._passes.append((end_ms, pieces))
        self._around.wake_prefill(self.worker, end_ms, self._stamp)
        self.poke(now_ms)

    def _through_the_stages(self, now_ms: float, tokens: int, t2: float) -> float:
        """When a pass that enters now leaves the last stage."""
        costs, free = self.costs, self._stage_free_ms
        if costs.stages == 1:
            at_ms = now_ms + costs.prefill_ms(tokens, t2)
            free[0] = at_ms
            self.busy_ms += at_ms - now_ms
            return at_ms
        first_ms = costs.stage_ms(tokens, t2, 0, 0)
        later_ms = (costs.prefill_ms(tokens, t2) - first_ms) / (costs.stages - 1)
        at_ms = now_ms + first_ms
        self.busy_ms += first_ms
        free[0] = at_ms
        for stage in range(1, costs.stages):
            at_ms = max(at_ms, free[stage]) + later_ms
            free[stage] = at_ms
        return at_ms

    def _that_fit(self, pieces: list[Piece], now_ms: float) -> list[Piece]:
        """The leading pieces for whose prompts there are blocks, which are taken."""
        for position, piece in enumerate(pieces):
            if piece.offset > 0:
                continue
            blocks = self.kv.blocks(_request(piece).whole_prompt_tokens)
            if blocks > self.kv.available_blocks():
                return pieces[:position]
            self.kv.take(blocks, now_ms)
            self.held_requests += 1
        return pieces

    def _end(self, now_ms: float) -> None:
        _, pieces = self._passes.pop(0)
        for piece in pieces:
            self.under_way_tokens -= piece.tokens
            request = _request(piece)
            if piece.offset + piece.tokens == request.prompt_tokens:
                self.under_way_requests -= 1
                self._around.prefilled(request, now_ms)


def _request(piece: Piece) -> SimRequest:
    return cast(SimRequest, piece.job)
