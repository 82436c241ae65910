"""Answers what a predicted length means: its class, bounds and quantiles, and what is left of it while decoding (T4).

Source: TetriInfer (arXiv 2401.11181), section 3.3.2: class k of granularity G is [kG, (k+1)G) output tokens, the last
one open. Ours is one distribution over buckets of 100 tokens, from which every granularity, the quantiles and the odds
of a heavy decode come. Inside a bucket all lengths count as equally likely, in the open one up to `max_tokens`; a
longer answer is cut there, and counts as one of `max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from headrace_core.policy.dispatch import HEAVY_DECODE_TOKENS

BUCKET_TOKENS: Final = 100
"""Width of a bucket: the finest granularity of the paper."""
_ROUNDING: Final = 1e-9


@final
class LengthDistribution:
    """How likely it is that an answer ends in each bucket of 100 output tokens, when it goes on after those generated.

    `shares` need not add up to 1; the last bucket is open. Raises ValueError for shares that are no distribution, and
    for `max_tokens` under 1.
    """

    __slots__ = ("generated_tokens", "max_tokens", "shares")

    def __init__(self, shares: Sequence[float], max_tokens: int) -> None:
        total = math.fsum(shares)
        if not 0 < total < math.inf or min(shares) < 0:
            raise ValueError(f"shares add up to {total}: give one of 0 or more for each bucket, and one above 0")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: a request generates at least 1 token")
        self.max_tokens = max_tokens
        self.generated_tokens = 0
        """Tokens that are generated already; see `given`."""
        self.shares: list[float] = [share / total for share in shares]

    def predicted_class(self, granularity: int) -> int:
        """The most likely class, the lower one of equals. An answer longer than `max_tokens` is in the class of that.

        Raises ValueError for a granularity that buckets of 100 tokens cannot make up.
        """
        of_bucket = _classes_of_buckets(len(self.shares), granularity)
        highest = min(of_bucket[-1], self.max_tokens // granularity)
        sums = [0.0] * (highest + 1)
        for bucket, share in enumerate(self.shares):
            sums[min(of_bucket[bucket], highest)] += share
        return sums.index(max(sums))

    def bounds(self, length_class: int, granularity: int) -> tuple[int, int]:
        """The two ends of a class, in output tokens, as admission and dispatch take them.

        The upper end of the last class, which is open, is `max_tokens`; no end is above that, and none is passed
        already.
        """
        last = _classes_of_buckets(len(self.shares), granularity)[-1]
        lower = min(max(length_class * granularity, self.generated_tokens + 1), self.max_tokens)
        upper = self.max_tokens if length_class >= last else (length_class + 1) * granularity
        return lower, max(lower, min(upper, self.max_tokens))

    def quantile(self, probability: float) -> int:
        """The fewest output tokens within which the answer ends with at least this probability, 0 to 1."""
        if not 0 < probability <= 1:
            raise ValueError(f"probability is {probability}: give a number above 0 and up to 1")
        below = 0.0
        tokens = self.max_tokens
        for bucket, share in enumerate(self.shares):
            if share > 0 and below + share >= probability - _ROUNDING:
                first, last = self._span(bucket)
                steps = math.ceil((probability - below) / share * (last - first + 1) - _ROUNDING)
                tokens = first + min(max(steps, 1), last - first + 1) - 1
                break
            below += share
        return min(tokens, self.max_tokens)

    @property
    def median(self) -> int:
        """Half of such answers end within so many tokens."""
        return self.quantile(0.5)

    @property
    def p90(self) -> int:
        """Nine of ten end within so many tokens."""
        return self.quantile(0.9)

    def heavy_probability(self, heavy_tokens: int = HEAVY_DECODE_TOKENS) -> float:
        """The odds of more output tokens than this."""
        if heavy_tokens >= self.max_tokens:
            return 0.0
        odds = 0.0
        for bucket, share in enumerate(self.shares):
            first, last = self._span(bucket)
            longer = last - max(first - 1, heavy_tokens)
            if longer > 0:
                odds += share * longer / (last - first + 1)
        return min(odds, 1.0)

    def given(self, generated_tokens: int) -> LengthDistribution:
        """What is left once so many tokens are generated and the answer goes on: passed buckets are dropped.

        A request past all that was predicted moves to the bucket in which its next token falls. Raises ValueError at
        `max_tokens`, where it ends, and for fewer tokens than before.
        """
        if not self.generated_tokens <= generated_tokens < self.max_tokens:
            raise ValueError(
                f"generated_tokens is {generated_tokens}: give at least the {self.generated_tokens} of before, "
                f"and fewer than max_tokens, {self.max_tokens}"
            )
        left = [0.0] * len(self.shares)
        for bucket, share in enumerate(self.shares):
            first, last = self._span(bucket)
            longer = last - max(first - 1, generated_tokens)
            if longer > 0:
                left[bucket] = share * longer / (last - first + 1)
        if math.fsum(left) == 0:
            left[min((generated_tokens + 1) // BUCKET_TOKENS, len(left) - 1)] = 1.0
        made = LengthDistribution(left, self.max_tokens)
        made.generated_tokens = generated_tokens
        return made

    def _span(self, bucket: int) -> tuple[int, int]:
        """First and last length in a bucket that are still possible. Of a passed bucket the last comes before the
        first by any number, and it has no share."""
        first = max(bucket * BUCKET_TOKENS, self.generated_tokens + 1)
        if bucket < len(self.shares) - 1:
            return first, (bucket + 1) * BUCKET_TOKENS - 1
        return first, max(first, self.max_tokens)


def next_bound(generated_tokens: int, granularity: int, max_tokens: int) -> int:
    """The bound of a request that has passed its own: the upper end of the class it is in, at most `max_tokens`."""
    return min((generated_tokens // granularity + 1) * granularity, max_tokens)


def _classes_of_buckets(buckets: int, granularity: int) -> list[int]:
    if granularity < BUCKET_TOKENS or granularity % BUCKET_TOKENS:
        raise ValueError(f"granularity is {granularity}: give a multiple of {BUCKET_TOKENS} tokens")
    return [bucket * BUCKET_TOKENS // granularity for bucket in range(buckets)]
