"""Times one pass of a worker: prefill, decode or both, from the coefficients of a (model, accelerator, parallelism).

Source: the latency model of DistServe (OSDI 2024), appendix A, in the linear form in which it is fitted: a pass of
prefill costs base + tokens + sum of squares, a decode step base + KV tokens + requests, each with its coefficient. The
step that mixes both is ours: the weights are read once, so the larger base counts and the rest adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

NEVER_LARGE: Final = 1 << 60
"""`large_decode_from` of a profile with one decode fit."""


@final
@dataclass(slots=True, kw_only=True)
class StepCosts:
    """The coefficients of one shape: a model on an accelerator, with its tensor and pipeline degree. All in ms.

    The times are those of a whole pass, through all pipeline stages. Nothing is checked here, on the hottest path of
    the simulator: `profiles` and `model` make these and check what they are given.
    """

    prefill_base_ms: float
    prefill_token_ms: float
    prefill_square_ms: float
    """Per unit of t2, see `squares`."""
    decode_base_ms: float
    decode_kv_token_ms: float
    decode_request_ms: float
    large_decode_base_ms: float
    large_decode_kv_token_ms: float
    large_decode_request_ms: float
    large_decode_from: int = NEVER_LARGE
    """The smallest batch for which the `large_decode_` coefficients hold."""
    stages: int = 1
    """Pipeline stages. Each takes 1/stages of the pass."""
    hop_ms: float = 0.0
    """Added for each stage of a pass that holds prefill. What a decode step pays for hops is in its base."""
    scheduler_ms: float = 0.0
    """Paid once a pass, before its first stage."""
    scheduler_token_ms: float = 0.0
    """Paid with it for each token of context: prompt tokens of the pass, and the KV that its decodes found."""

    def prefill_ms(self, tokens: int, squares: float) -> float:
        """One pass over `tokens` prompt tokens, with t2 = `squares` summed over its pieces."""
        return (
            self.prefill_base_ms
            + self.prefill_token_ms * tokens
            + self.prefill_square_ms * squares
            + self.hop_ms * self.stages
            + self.scheduler_ms
            + self.scheduler_token_ms * tokens
        )

    def decode_ms(self, requests: int, kv_tokens: int) -> float:
        """One token for each of `requests`; `kv_tokens` sums their contexts, the token computed here included."""
        scheduler_ms = self.scheduler_ms + self.scheduler_token_ms * (kv_tokens - requests)
        if requests < self.large_decode_from:
            step_ms = self.decode_base_ms + self.decode_kv_token_ms * kv_tokens + self.decode_request_ms * requests
        else:
            step_ms = (
                self.large_decode_base_ms
                + self.large_decode_kv_token_ms * kv_tokens
                + self.large_decode_request_ms * requests
            )
        return step_ms + scheduler_ms

    def mixed_ms(self, tokens: int, squares: float, requests: int, kv_tokens: int) -> float:
        """One pass with prompt tokens and decodes. It is `prefill_ms` without decodes, `decode_ms` without prompt."""
        if requests == 0:
            return self.prefill_ms(tokens, squares)
        if tokens == 0:
            return self.decode_ms(requests, kv_tokens)
        large = requests >= self.large_decode_from
        both_ms = self.prefill_ms(tokens, squares) + self.decode_ms(requests, kv_tokens) - self.scheduler_ms
        return both_ms - min(self.prefill_base_ms, self.large_decode_base_ms if large else self.decode_base_ms)

    def stage_ms(self, tokens: int, squares: float, requests: int, kv_tokens: int) -> float:
        """The gap after which the next pass may enter: the scheduler and one stage of `mixed_ms`, same arguments."""
        context_tokens = tokens + kv_tokens - requests
        scheduler_ms = self.scheduler_ms + self.scheduler_token_ms * context_tokens
        return scheduler_ms + (self.mixed_ms(tokens, squares, requests, kv_tokens) - scheduler_ms) / self.stages


def squares(offset: int, tokens: int) -> float:
    """A chunk's share of t2, the sum of squared prompt lengths: `tokens` of a prompt of which `offset` are computed.

    The shares of a prompt's chunks add up to its length squared. A float: batch sums pass 2^31 soon.
    """
    end = offset + tokens
    return float(end * end - offset * offset)
