"""Decides which prompt tokens the next prefill pass computes: fixed chunks, or whole prompts up to a limit (T5, D6).

Sources: TetriInfer (arXiv 2401.11181), section 3.3.3, for chunks; DistServe (OSDI 2024), section 4.3, for batches of
whole prompts. The paper pads the last chunk; ours does not, since vLLM's kernels take ragged batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from headrace_core.policy.prefill_order import PrefillJob, PrefillQueue


class Batching(StrEnum):
    """How a pass is filled."""

    CHUNKED = "Chunked"
    """The stream of scheduled tokens is cut every `limit_tokens`, through requests and across sealed batches."""
    LM_BATCH = "LmBatch"
    """Whole prompts while their sum stays within L_m, the tokens that saturate the accelerator; a longer one alone."""
    WHOLE_QUEUE = "WholeQueue"
    """The same rule with the most tokens that a pass may hold as its limit, as in DistServe's simulator. There a prompt
    over the limit waits for ever; ours runs it alone."""


@final
@dataclass(slots=True)
class Piece:
    """A part of one prompt in a pass."""

    job: PrefillJob
    offset: int
    """Tokens of `job.prompt_tokens` before the piece; hits in the prefix cache are not among them."""
    tokens: int


def cut(queue: PrefillQueue, batching: Batching, limit_tokens: int) -> list[Piece]:
    """Plan the next pass: pieces in the order of the queue, none when nothing waits.

    It may seal batches, and takes nothing: `take` does. Raises ValueError for a limit under one token.
    """
    if limit_tokens < 1:
        raise ValueError(f"limit_tokens is {limit_tokens}: a pass needs room for at least 1 token")
    queue.seal_until(limit_tokens)
    whole = batching is not Batching.CHUNKED
    pieces: list[Piece] = []
    room = limit_tokens
    for job in queue.scheduled:
        if room == 0:
            break
        offset = job.prefilled_tokens
        tokens = job.prompt_tokens - offset
        if tokens > room:
            if not whole:
                pieces.append(Piece(job, offset, room))
            elif not pieces:
                pieces.append(Piece(job, offset, tokens))
            break
        pieces.append(Piece(job, offset, tokens))
        room -= tokens
    return pieces


def take(queue: PrefillQueue, pieces: list[Piece]) -> None:
    """Take a planned pass out of the queue: jobs advance, and those at their end leave.

    Raises ValueError when the pieces are not the front of the queue.
    """
    for piece in pieces:
        job = piece.job
        if not queue.scheduled or queue.scheduled[0] is not job or job.prefilled_tokens != piece.offset:
            raise ValueError("pieces is not the front of this queue: cut again after each take or remove")
        job.prefilled_tokens += piece.tokens
        queue.scheduled_tokens -= piece.tokens
        queue.queued_tokens -= piece.tokens
        if job.prefilled_tokens == job.prompt_tokens:
            queue.scheduled.popleft()
