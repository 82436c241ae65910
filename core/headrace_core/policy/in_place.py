"""Decides how many prompt tokens a decode worker computes in its next step, beside the tokens of its residents (K4).

Source: Kairos (arXiv 2607.02043): the step that `deflection` expects when it sends a prompt here, decided anew at each
step, since the batch may have changed.
"""

from __future__ import annotations

from headrace_core.perf.costs import StepCosts, squares


def chunk_tokens(
    costs: StepCosts,
    ladder: tuple[int, ...],
    *,
    requests: int,
    kv_tokens: int,
    done: int,
    left: int,
    limit_ms: float,
    token_budget: int,
) -> int:
    """The largest chunk of the ladder with which the step stays within the limit; 0 where none does.

    `done` tokens of the prompt are computed and `left` are not; `kv_tokens` sums the residents' contexts in the step.
    Beside no resident the smallest rung is always taken: waiting would help nobody.
    """
    room = min(left, token_budget - requests)
    if room < 1:
        return 0
    chunk = 0
    for rung in ladder:
        chunk = min(rung, room)
        if costs.mixed_ms(chunk, squares(done, chunk), requests, kv_tokens + done) <= limit_ms:
            return chunk
    return chunk if requests == 0 else 0
