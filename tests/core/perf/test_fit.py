"""Coefficients from measured steps, and factors from what users see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from headrace_core.perf.costs import StepCosts, squares
from headrace_core.perf.errors import FitError
from headrace_core.perf.fit import (
    Correction,
    Latency,
    Step,
    calibrate,
    corrected,
    fit_decode,
    fit_large_decode,
    fit_prefill,
    residual,
)

SIZES = (128, 256, 512, 1024, 2048, 4096)


def prefill_steps(base: float, token: float, square: float) -> list[Step]:
    return [
        Step(measured_ms=base + token * size + square * squares(0, size), tokens=size, squares=squares(0, size))
        for size in SIZES
    ]


def decode_steps(base: float, kv: float, request: float) -> list[Step]:
    return [
        Step(measured_ms=base + kv * n * context + request * n, requests=n, kv_tokens=n * context)
        for n in (1, 8, 32, 64)
        for context in (128, 1024)
    ]


@given(st.floats(0.1, 100), st.floats(1e-3, 1), st.floats(0, 1e-4))
def test_prefill_coefficients_come_back(base: float, token: float, square: float) -> None:
    line = fit_prefill(prefill_steps(base, token, square))
    assert (line.base_ms, line.first_ms) == pytest.approx((base, token), rel=1e-6)
    assert line.second_ms == pytest.approx(square, rel=1e-5, abs=1e-10)
    assert line.residual.p95 < 1e-9


@given(st.floats(0.1, 100), st.floats(1e-5, 1e-2), st.floats(1e-3, 1))
def test_decode_coefficients_come_back(base: float, kv: float, request: float) -> None:
    line = fit_decode(decode_steps(base, kv, request))
    assert (line.base_ms, line.first_ms, line.second_ms) == pytest.approx((base, kv, request), rel=1e-6)


@settings(max_examples=200)
@given(st.lists(st.floats(0.5, 200), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_coefficient_is_negative_and_none_fits_better(measured: list[float]) -> None:
    steps = [
        Step(measured_ms=ms, tokens=size, squares=squares(0, size)) for ms, size in zip(measured, SIZES, strict=True)
    ]
    line = fit_prefill(steps)
    found = np.array([line.base_ms, line.first_ms, line.second_ms])
    assert (found >= 0).all()
    rows = np.array([[1.0, step.tokens, step.squares] for step in steps]) / np.array(measured)[:, None]
    scale = np.linalg.norm(rows, axis=0)
    _, best = nnls(rows / scale, np.ones(len(steps)))
    assert np.linalg.norm(rows @ found - 1) <= best + 1e-7


def test_large_batches_keep_the_given_kv_coefficient() -> None:
    line = fit_large_decode(
        [Step(measured_ms=10 + 1e-3 * n * 576 + 0.5 * n, requests=n, kv_tokens=n * 576) for n in (32, 64)], 1e-3
    )
    assert (line.base_ms, line.first_ms, line.second_ms) == pytest.approx((10, 1e-3, 0.5))


def test_the_residual_is_the_mean_and_the_95th_percentile_of_relative_errors() -> None:
    measured = [100.0] * 20
    fitted = [100.0] * 18 + [110.0, 140.0]
    found = residual(fitted, measured)
    assert (found.mape, found.p95, found.samples) == pytest.approx((0.025, 0.1, 20))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (prefill_steps(1, 1, 0)[:2], "2 measured steps"),
        ([*prefill_steps(1, 1, 0), Step(measured_ms=0.0, tokens=1, squares=1.0)], "not above 0"),
        ([*prefill_steps(1, 1, 0), Step(measured_ms=float("nan"), tokens=1, squares=1.0)], "not above 0"),
    ],
    ids=["too few", "a zero", "not a number"],
)
def test_what_cannot_be_fitted_is_refused(steps: list[Step], words: str) -> None:
    with pytest.raises(FitError, match=words):
        fit_prefill(steps)


def test_large_batches_that_cannot_be_fitted_are_refused() -> None:
    one = Step(measured_ms=10.0, requests=64, kv_tokens=64)
    with pytest.raises(FitError, match="two large batch sizes"):
        fit_large_decode([one, one], 0.0)
    with pytest.raises(FitError, match="exceeds a measured step"):
        fit_large_decode([one, replace(one, requests=32)], 1.0)


def queue(correction: Correction) -> Latency:
    """M/D/1 before prefill at rate 0.4 with a service time of 1 ms, and a decode that prefill slows a little."""
    service = correction.prefill
    load = 0.4 * service
    wait = load * service / (2 * (1 - load)) if load < 1 else 1e9
    return Latency(ttft_ms=wait + service + 0.2 * correction.decode, tpot_ms=20 * correction.decode + 0.5 * service)


@given(st.floats(0.3, 2.2), st.floats(0.3, 3))
def test_calibration_finds_the_factors_behind_what_is_seen(prefill: float, decode: float) -> None:
    seen = queue(Correction(prefill, decode))
    found = queue(calibrate(seen, queue))
    assert (found.ttft_ms, found.tpot_ms) == pytest.approx((seen.ttft_ms, seen.tpot_ms), rel=0.01)


@pytest.mark.parametrize(
    ("seen", "words"),
    [(Latency(0.0, 10.0), "above 0"), (Latency(5.0, 1e6), "simulated TPOT"), (Latency(1e-3, 30.0), "simulated TTFT")],
)
def test_calibration_says_when_no_factor_reaches(seen: Latency, words: str) -> None:
    with pytest.raises(FitError, match=words):
        calibrate(seen, queue)


def test_a_correction_scales_the_accelerator_and_not_the_scheduler() -> None:
    costs = StepCosts(
        prefill_base_ms=1.0,
        prefill_token_ms=0.1,
        prefill_square_ms=1e-5,
        decode_base_ms=2.0,
        decode_kv_token_ms=1e-4,
        decode_request_ms=0.1,
        large_decode_base_ms=1.0,
        large_decode_kv_token_ms=2e-4,
        large_decode_request_ms=0.2,
        large_decode_from=50,
        stages=2,
        hop_ms=0.5,
        scheduler_ms=3.0,
    )
    slower = corrected(costs, Correction(2.0, 3.0))
    assert slower.prefill_ms(100, 1e4) - 4 == pytest.approx(2 * (costs.prefill_ms(100, 1e4) - 4))
    for requests in (10, 60):
        assert slower.decode_ms(requests, 9_000) - 3 == pytest.approx(3 * (costs.decode_ms(requests, 9_000) - 3))
