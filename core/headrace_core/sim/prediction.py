"""Draws the predicted length of a request, as right as the scenario says that predictions are."""

from __future__ import annotations

from random import Random
from typing import final

from headrace_core.policy.admission import Bound
from headrace_core.policy.dispatch import HEAVY_DECODE_TOKENS
from headrace_core.sim.request import SimRequest
from headrace_core.sim.scenario import Prediction


@final
class Predictor:
    """One draw a request, in the order of arrival, so that no policy changes what is predicted for whom."""

    def __init__(self, prediction: Prediction, bound: Bound, randomness: Random) -> None:
        self._accuracy = prediction.accuracy
        self._granularity = prediction.granularity
        self._quantile = prediction.quantile
        self._bound = bound
        self._randomness = randomness

    def predict(self, request: SimRequest) -> None:
        """Set the bound and whether it is heavy. A wrong bucket is a neighbour of the right one, and says the opposite
        of heavy where the bucket's own bounds leave it open."""
        bucket = (request.output_tokens - 1) // self._granularity
        right = self._accuracy >= 1.0 or self._randomness.random() < self._accuracy
        heavy = request.output_tokens > HEAVY_DECODE_TOKENS
        if not right:
            bucket += -1 if bucket > 0 and self._randomness.random() < 0.5 else 1  # noqa: PLR2004 - either side
        low, high = bucket * self._granularity, (bucket + 1) * self._granularity
        if low >= HEAVY_DECODE_TOKENS:
            request.heavy = True
        elif high <= HEAVY_DECODE_TOKENS:
            request.heavy = False
        else:
            request.heavy = heavy if right else not heavy
        if self._bound is Bound.LOWER:
            request.bound_tokens = max(1, low)
        elif self._bound is Bound.UPPER:
            request.bound_tokens = high
        else:
            request.bound_tokens = max(1, low + int(self._quantile * self._granularity))
