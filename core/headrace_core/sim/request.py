"""What a request is while it is simulated, and what its workers ask of the cluster around them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final, final

from headrace_core.policy.prefill_order import PrefillJob
from headrace_core.sim.outcome import Status

NOWHERE: Final = -1
NOT_YET: Final = math.nan


@final
class SimRequest(PrefillJob):
    """A request with its true length, its predicted one, and the times at which things happened to it (ms)."""

    __slots__ = (
        "admitted_ms",
        "arrival_ms",
        "bound_tokens",
        "cached_tokens",
        "decode_worker",
        "deflected",
        "finish_step",
        "first_token_ms",
        "generated_tokens",
        "heavy",
        "join_context",
        "join_step",
        "lane",
        "largest_gap_ms",
        "last_token_ms",
        "needs_fetch",
        "number",
        "output_tokens",
        "preemptions",
        "prefill_start_ms",
        "prefill_worker",
        "running",
        "second_token_ms",
        "slo_class",
        "status",
        "transferred_ms",
        "whole_prompt_tokens",
    )

    def __init__(self, number: int, arrival_ms: float, prompt_tokens: int, output_tokens: int, slo_class: int) -> None:
        super().__init__(prompt_tokens, number)
        self.number = number
        self.arrival_ms = arrival_ms
        self.whole_prompt_tokens = prompt_tokens
        """With the hits in the prefix cache; `prompt_tokens` is what is left to compute."""
        self.output_tokens = output_tokens
        self.slo_class = slo_class
        self.bound_tokens = output_tokens
        """Predicted output tokens, as the admission's bound has them. It grows when a request passes it."""
        self.heavy = False
        """Predicted to be a heavy decode."""
        self.cached_tokens = 0
        self.generated_tokens = 0
        """When it last joined or left a batch."""
        self.needs_fetch = False
        """Its KV lies on a prefill worker; else it is computed where it is admitted."""
        self.deflected = False
        self.running = False
        """In a decode batch."""
        self.lane = 0
        """The batch of its decode worker that it joins."""
        self.join_step = 0
        self.join_context = 0
        """Context of its first step in the batch, the token computed in that step included."""
        self.finish_step = 0
        self.prefill_worker = NOWHERE
        self.decode_worker = NOWHERE
        self.preemptions = 0
        self.status: int = int(Status.UNFINISHED)
        self.prefill_start_ms = NOT_YET
        self.first_token_ms = NOT_YET
        self.admitted_ms = NOT_YET
        self.transferred_ms = NOT_YET
        self.second_token_ms = NOT_YET
        self.last_token_ms = NOT_YET
        """The newest one, as of when it last joined or left a batch."""
        self.largest_gap_ms = 0.0

    def context_tokens(self) -> int:
        """Prompt and what was generated when it last joined or left a batch."""
        return self.whole_prompt_tokens + self.generated_tokens

    def held_tokens(self) -> int:
        """Tokens whose KV is there: all but the newest one, of which the next step computes it."""
        return self.whole_prompt_tokens + self.generated_tokens - 1

    def remaining_bound(self) -> int:
        """Predicted tokens still to come; at least one, since it is not at its end."""
        return max(1, self.bound_tokens - self.generated_tokens)

    def note_gap(self, gap_ms: float) -> None:
        """Keep the largest gap between two tokens."""
        self.largest_gap_ms = max(self.largest_gap_ms, gap_ms)


class Surroundings(ABC):
    """What a simulated worker asks of the cluster around it. `cluster.Simulation` is the one that answers."""

    @abstractmethod
    def wake_prefill(self, worker: int, at_ms: float, stamp: int) -> None:
        """Call the worker's prefill side at that time."""

    @abstractmethod
    def wake_lane(self, worker: int, lane: int, at_ms: float, stamp: int) -> None:
        """Call a decode lane of the worker at that time, after all that happens at it."""

    @abstractmethod
    def prefilled(self, request: SimRequest, now_ms: float) -> None:
        """A prefill worker has computed the whole prompt: the first token is there."""

    @abstractmethod
    def fetch(self, request: SimRequest, now_ms: float) -> None:
        """A decode worker has reserved the blocks for a request's KV."""

    @abstractmethod
    def ended(self, request: SimRequest, now_ms: float) -> None:
        """The request has its last token, or is rejected."""


@final
class KvCache:
    """The KV blocks of one worker."""

    __slots__ = ("block_ms", "block_tokens", "free_blocks", "last_ms", "least_free", "promised_blocks", "total_blocks")

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self.free_blocks = total_blocks
        self.promised_blocks = 0
        """Free ones that batches will open before their next boundaries."""
        self.least_free = total_blocks
        self.block_ms = 0.0
        """Held blocks integrated over time."""
        self.last_ms = 0.0

    def available_blocks(self) -> int:
        """Free ones that are not promised to a batch."""
        return self.free_blocks - self.promised_blocks

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return (tokens + self.block_tokens - 1) // self.block_tokens

    def take(self, blocks: int, now_ms: float) -> None:
        """Hold blocks from now on."""
        self.pass_time(now_ms)
        self.free_blocks -= blocks
        self.least_free = min(self.least_free, self.free_blocks)

    def give_back(self, blocks: int, now_ms: float) -> None:
        """Free blocks."""
        self.pass_time(now_ms)
        self.free_blocks += blocks

    def grow(self, blocks: int, now_ms: float) -> None:
        """Blocks that were taken one after the other since the last change, as a batch takes them while it decodes."""
        self.block_ms += 0.5 * blocks * (now_ms - self.last_ms)
        self.take(blocks, now_ms)

    def pass_time(self, now_ms: float) -> None:
        """Count what was held until now."""
        if now_ms > self.last_ms:
            self.block_ms += (self.total_blocks - self.free_blocks) * (now_ms - self.last_ms)
            self.last_ms = now_ms
