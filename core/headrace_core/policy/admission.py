"""Decides whether a decode worker admits a waiting request to its batch, by the KV cache that is and will be free (T8).

Source: TetriInfer (arXiv 2401.11181), section 3.4. `Greedy` is vLLM's rule, as the paper describes it. Of the reserve
policies the paper gives the aim; the formula of `ReserveDynamic`, what happens with nothing running, and the step at
which to ask again are ours. Readings of the paper differ on the bound, so it is an argument. `Greedy` admits one block
ahead, the reserve policies as far as the prediction sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final


class Admission(StrEnum):
    """The policies."""

    GREEDY = "Greedy"
    """The context and one more token fit in the KV that is free."""
    RESERVE_STATIC = "ReserveStatic"
    """The context and the bound of the predicted bucket fit in the KV that is free."""
    RESERVE_DYNAMIC = "ReserveDynamic"
    """There is room until the shortest remaining request ends, for all the batch to grow."""


class Bound(StrEnum):
    """Which end of the predicted bucket counts as the remaining tokens."""

    LOWER = "Lower"
    UPPER = "Upper"
    QUANTILE = "Quantile"


class Reason(StrEnum):
    """Why a request is admitted (the first two) or waits."""

    FITS = "Fits"
    NOTHING_RUNNING = "NothingRunning"
    """Admitted although the prediction does not fit: with nothing running, waiting would free nothing."""
    NO_ROOM_NOW = "NoRoomNow"
    """The context and one more token do not fit."""
    NO_ROOM_LATER = "NoRoomLater"
    """It would fit now, and not with what is predicted."""
    BATCH_FULL = "BatchFull"
    NEVER_FITS = "NeverFits"
    """The context and one more token are more than the worker's whole KV cache."""


@final
@dataclass(slots=True, kw_only=True)
class DecodeMemory:
    """A decode worker's KV cache and batch, before the request is admitted."""

    block_size: int
    """Tokens in one KV block, at least 1."""
    total_blocks: int
    free_blocks: int
    running: int
    """Requests in the batch."""
    fewest_remaining: int
    """The fewest predicted remaining tokens of a running request; 0 when none runs."""
    max_running: int
    """Requests that the batch may hold."""


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision. One that depends on nothing but its reason is a shared constant."""

    reason: Reason
    ask_again_steps: int = 0
    """Decode steps in which the answer stays the same while the batch does; 0: it stays until the batch changes."""

    @property
    def admits(self) -> bool:
        """Whether the request joins the batch."""
        return self.reason is Reason.FITS or self.reason is Reason.NOTHING_RUNNING


FITS: Final = Verdict(Reason.FITS)
NOTHING_RUNNING: Final = Verdict(Reason.NOTHING_RUNNING)
NO_ROOM_NOW: Final = Verdict(Reason.NO_ROOM_NOW)
NO_ROOM_LATER: Final = Verdict(Reason.NO_ROOM_LATER)
BATCH_FULL: Final = Verdict(Reason.BATCH_FULL)
NEVER_FITS: Final = Verdict(Reason.NEVER_FITS)


def decide(policy: Admission, memory: DecodeMemory, context_tokens: int, remaining_bound: int) -> Verdict:
    """Whether a request joins the batch at this step.

    `context_tokens` is the prompt, plus what was generated before a preemption; `remaining_bound` the tokens that it is
    predicted to generate still, by the bound in use. Free blocks may only fall while the batch stays the same, as they
    do while requests grow: that is what `ask_again_steps` builds on.
    """
    block = memory.block_size
    free = memory.free_blocks
    need = (context_tokens + block) // block  # blocks of the context and one token, rounded up
    if need > memory.total_blocks:
        return NEVER_FITS
    if memory.running >= memory.max_running:
        return BATCH_FULL
    if need > free:
        return NO_ROOM_NOW
    if policy is Admission.GREEDY:
        return FITS
    if policy is Admission.RESERVE_STATIC:
        if (context_tokens + remaining_bound + block - 1) // block <= free:
            return FITS
        return NOTHING_RUNNING if memory.running == 0 else NO_ROOM_LATER
    if memory.running == 0:
        return FITS if need + (remaining_bound + block - 1) // block <= free else NOTHING_RUNNING
    return _reserve_dynamic(memory, need, remaining_bound)


def _reserve_dynamic(memory: DecodeMemory, need: int, remaining_bound: int) -> Verdict:
    """Each of the n + 1 requests may open ceil(r / block) blocks until the shortest of them ends, r tokens from now."""
    block = memory.block_size
    shortest = min(memory.fewest_remaining, remaining_bound)
    # blocks that each of them may open within what is free
    allowance = (memory.free_blocks - need) // (memory.running + 1)
    if (shortest + block - 1) // block <= allowance:
        return FITS
    # r falls by one a step. It fits at the earliest when r blocks are down to the allowance, which never grows.
    return Verdict(Reason.NO_ROOM_LATER, memory.fewest_remaining - allowance * block)


def explain(verdict: Verdict, memory: DecodeMemory, context_tokens: int, remaining_bound: int) -> str:
    """The decision in words, for a log."""
    asks = f"{context_tokens} tokens of context and {remaining_bound} predicted"
    state = (
        f"{memory.free_blocks} of {memory.total_blocks} blocks of {memory.block_size} tokens free, "
        f"{memory.running} of {memory.max_running} running"
    )
    why = {
        Reason.FITS: "admitted",
        Reason.NOTHING_RUNNING: "admitted since nothing runs, though the prediction does not fit",
        Reason.NO_ROOM_NOW: "waits for the batch to change, the context does not fit",
        Reason.NO_ROOM_LATER: "waits, the prediction does not fit",
        Reason.BATCH_FULL: "waits for the batch to change, it is full",
        Reason.NEVER_FITS: "refused, the context is more than the whole KV cache",
    }[verdict.reason]
    again = f", ask again after {verdict.ask_again_steps} steps" if verdict.ask_again_steps else ""
    return f"{asks}: {why}{again} ({state})"
