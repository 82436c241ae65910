"""Finds the coefficients of `StepCosts` in measured steps, and the factors that bring a profile to observed times.

The form is DistServe's (OSDI 2024, appendix A). Least squares of the relative error, since SLOs are relative too, with
coefficients that are never negative (ours: DistServe's own fits leave a negative square term in one profile, and then
a long prompt takes less time than a short one). No numerical library: a worker refits with what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.perf.costs import StepCosts
from headrace_core.perf.errors import FitError

_UNKNOWNS: Final = 3
_SINGULAR: Final = 1e-12
"""Pivot, of columns scaled to length one, under which two columns say the same."""
_SMALLEST_FACTOR: Final = 0.05
_LARGEST_FACTOR: Final = 20.0
_FACTOR_TOLERANCE: Final = 0.01
_HALVINGS: Final = 12
"""From 1/20..20 to a hundredth: (ln 400) / 2^12 is 0.0015."""
_ROUNDS: Final = 2
"""Decode, then prefill, and both again: colocated, each moves the other a little."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured pass: prefill when `requests` is 0, else decode. See `StepCosts` for the counts."""

    measured_ms: float
    tokens: int = 0
    squares: float = 0.0
    requests: int = 0
    kv_tokens: int = 0


@final
@dataclass(frozen=True, slots=True)
class Residual:
    """How far the fitted times are from the measured ones. Shares: 0.1 is 10 %."""

    mape: float
    """Mean absolute relative error."""
    p95: float
    """95th percentile of it (nearest rank)."""
    samples: int


@final
@dataclass(frozen=True, slots=True)
class Line:
    """Coefficients of base, tokens (or KV tokens) and squares (or requests), in ms, and their residual."""

    base_ms: float
    first_ms: float
    second_ms: float
    residual: Residual

    def at(self, first: float, second: float) -> float:
        """The fitted time."""
        return self.base_ms + self.first_ms * first + self.second_ms * second


def fit_prefill(steps: Sequence[Step]) -> Line:
    """Base, per token and per unit of t2, from measured prefill passes.

    Raises:
        FitError: fewer than three passes, or times that are not above 0.
    """
    return _fit([(step.tokens, step.squares, step.measured_ms) for step in steps], "prefill")


def fit_decode(steps: Sequence[Step]) -> Line:
    """Base, per KV token and per request, from measured decode steps.

    Raises:
        FitError: fewer than three steps, or times that are not above 0.
    """
    return _fit([(step.kv_tokens, step.requests, step.measured_ms) for step in steps], "decode")


def fit_large_decode(steps: Sequence[Step], kv_token_ms: float) -> Line:
    """As `fit_decode` with the KV coefficient given, for large batches that were measured at one context only.

    Raises:
        FitError: fewer than two batch sizes, or times that the KV alone exceeds.
    """
    if len({step.requests for step in steps}) < _UNKNOWNS - 1:
        raise FitError("decode: measure at least two large batch sizes")
    rows = [(1.0, float(step.requests)) for step in steps]
    rest_ms = [step.measured_ms - kv_token_ms * step.kv_tokens for step in steps]
    if min(rest_ms) <= 0:
        raise FitError("decode: the KV coefficient given exceeds a measured step: fit it on small batches again")
    scales = [1 / step.measured_ms for step in steps]
    base_ms, request_ms = _least_squares(rows, rest_ms, scales)
    fitted = [base_ms + kv_token_ms * step.kv_tokens + request_ms * step.requests for step in steps]
    return Line(base_ms, kv_token_ms, request_ms, residual(fitted, [step.measured_ms for step in steps]))


def residual(fitted_ms: Sequence[float], measured_ms: Sequence[float]) -> Residual:
    """The relative errors of fitted times."""
    errors = sorted(abs(fit / seen - 1) for fit, seen in zip(fitted_ms, measured_ms, strict=True))
    return Residual(math.fsum(errors) / len(errors), errors[math.ceil(0.95 * len(errors)) - 1], len(errors))


@final
@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the prefill and the decode coefficients of a profile."""

    prefill: float
    decode: float


@final
@dataclass(frozen=True, slots=True)
class Latency:
    """What a user sees under a known load: the same statistic (a mean, a median) of both."""

    ttft_ms: float
    tpot_ms: float


def corrected(costs: StepCosts, correction: Correction) -> StepCosts:
    """The coefficients times their factors. Scheduler cost and hops stay: they are not the accelerator's."""
    prefill, decode = correction.prefill, correction.decode
    return replace(
        costs,
        prefill_base_ms=costs.prefill_base_ms * prefill,
        prefill_token_ms=costs.prefill_token_ms * prefill,
        prefill_square_ms=costs.prefill_square_ms * prefill,
        decode_base_ms=costs.decode_base_ms * decode,
        decode_kv_token_ms=costs.decode_kv_token_ms * decode,
        decode_request_ms=costs.decode_request_ms * decode,
        large_decode_base_ms=costs.large_decode_base_ms * decode,
        large_decode_kv_token_ms=costs.large_decode_kv_token_ms * decode,
        large_decode_request_ms=costs.large_decode_request_ms * decode,
    )


def calibrate(observed: Latency, predict: Callable[[Correction], Latency]) -> Correction:
    """The factors with which `predict`, a simulation of the load observed, shows what was observed, within 1 %.

    TTFT under load is no multiple of the prefill time, since the queue grows faster: so the factors are searched, by
    halving, which needs only that a slower prefill never shortens TTFT, nor a slower decode TPOT. About 50 predictions.

    Raises:
        FitError: an observed time is not above 0, or no factor between 1/20 and 20 reaches it.
    """
    if not (observed.ttft_ms > 0 and observed.tpot_ms > 0):
        raise FitError("calibrate: give an observed TTFT and TPOT above 0")
    prefill = decode = 1.0

    def tpot_ms(factor: float) -> float:
        return predict(Correction(prefill, factor)).tpot_ms

    def ttft_ms(factor: float) -> float:
        return predict(Correction(factor, decode)).ttft_ms

    for _ in range(_ROUNDS):
        decode = _search("TPOT", observed.tpot_ms, tpot_ms)
        prefill = _search("TTFT", observed.ttft_ms, ttft_ms)
    return Correction(prefill, decode)


def _search(name: str, observed_ms: float, predict_ms: Callable[[float], float]) -> float:
    low, high = _SMALLEST_FACTOR, _LARGEST_FACTOR
    if predict_ms(low) > observed_ms or predict_ms(high) < observed_ms:
        raise FitError(
            f"calibrate: no factor between {low} and {high} brings the simulated {name} to {observed_ms:g} ms:"
            " check the load, the model and the accelerator that were given with it"
        )
    factor = 1.0
    for _ in range(_HALVINGS):
        predicted_ms = predict_ms(factor)
        if abs(predicted_ms / observed_ms - 1) <= _FACTOR_TOLERANCE / 10:
            return factor
        if predicted_ms < observed_ms:
            low = factor
        else:
            high = factor
        factor = math.sqrt(low * high)
    return factor


def _fit(points: Sequence[tuple[float, float, float]], what: str) -> Line:
    if len(points) < _UNKNOWNS:
        raise FitError(f"{what}: {len(points)} measured steps; measure at least {_UNKNOWNS}, of different sizes")
    measured_ms = [point[2] for point in points]
    if not all(0 < one < math.inf for one in measured_ms):
        raise FitError(f"{what}: a measured step is not above 0 ms: leave out steps that were not timed")
    rows = [(1.0, float(first), float(second)) for first, second, _ in points]
    base_ms, first_ms, second_ms = _least_squares(rows, measured_ms, [1 / one for one in measured_ms])
    fitted = [base_ms + first_ms * first + second_ms * second for first, second, _ in points]
    return Line(base_ms, first_ms, second_ms, residual(fitted, measured_ms))


def _least_squares(rows: Sequence[tuple[float, ...]], targets: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Non-negative x with the least sum of (scale * (row . x - target))^2.

    With two or three unknowns the exact answer is the best of the plain solutions over every subset of the columns
    that comes out non-negative; of equal ones the largest subset, and then the one with the earlier columns.
    """
    unknowns = len(rows[0])
    weighted = [[value * scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    goals = [target * scale for target, scale in zip(targets, scales, strict=True)]
    lengths = [math.sqrt(math.fsum(row[column] ** 2 for row in weighted)) or 1.0 for column in range(unknowns)]
    scaled = [[value / length for value, length in zip(row, lengths, strict=True)] for row in weighted]
    best, best_loss = [0.0] * unknowns, math.inf
    for subset in sorted(range(1, 1 << unknowns), key=lambda bits: (-bits.bit_count(), bits)):
        columns = [column for column in range(unknowns) if subset >> column & 1]
        solved = _solve([[row[column] for column in columns] for row in scaled], goals)
        if solved is None or min(solved) < 0:
            continue
        loss = math.fsum(
            (math.fsum(row[column] * value for column, value in zip(columns, solved, strict=True)) - goal) ** 2
            for row, goal in zip(scaled, goals, strict=True)
        )
        if loss < best_loss * (1 - 1e-9):
            best_loss, best = loss, [0.0] * unknowns
            for column, value in zip(columns, solved, strict=True):
                best[column] = value / lengths[column]
    return best


def _solve(rows: Sequence[Sequence[float]], goals: Sequence[float]) -> list[float] | None:
    """Plain least squares by Gram-Schmidt; None where two columns say the same."""
    count = len(rows[0])
    basis: list[list[float]] = []
    upper = [[0.0] * count for _ in range(count)]
    for column in range(count):
        vector = [row[column] for row in rows]
        for earlier in range(column):
            overlap = math.fsum(one * other for one, other in zip(basis[earlier], vector, strict=True))
            upper[earlier][column] = overlap
            vector = [one - overlap * other for one, other in zip(vector, basis[earlier], strict=True)]
        length = math.sqrt(math.fsum(one * one for one in vector))
        if length * length < _SINGULAR:
            return None
        upper[column][column] = length
        basis.append([one / length for one in vector])
    answer = [0.0] * count
    for column in reversed(range(count)):
        rest = math.fsum(one * goal for one, goal in zip(basis[column], goals, strict=True))
        rest -= math.fsum(upper[column][later] * answer[later] for later in range(column + 1, count))
        answer[column] = rest / upper[column][column]
    return answer
