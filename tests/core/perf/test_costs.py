"""Step times from coefficients, against the formulas written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.perf.costs import NEVER_LARGE, StepCosts, squares

COSTS = StepCosts(
    prefill_base_ms=18.0,
    prefill_token_ms=0.1,
    prefill_square_ms=7e-6,
    decode_base_ms=20.0,
    decode_kv_token_ms=6e-4,
    decode_request_ms=0.04,
    large_decode_base_ms=7.0,
    large_decode_kv_token_ms=5e-4,
    large_decode_request_ms=0.16,
    large_decode_from=95,
    stages=2,
    hop_ms=2.0,
    scheduler_ms=2.0,
    scheduler_token_ms=1e-4,
)
tokens_of = st.integers(0, 200_000)
sizes = st.tuples(st.integers(1, 16_000), st.integers(1, 512), st.integers(1, 8_000))


def test_prefill_is_its_formula() -> None:
    assert COSTS.prefill_ms(300, 50_000.0) == pytest.approx(18 + 0.1 * 300 + 7e-6 * 50_000 + 2 * 2 + 2 + 1e-4 * 300)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (94, 20 + 6e-4 * 10_000 + 0.04 * 94 + 2 + 1e-4 * (10_000 - 94)),
        (95, 7 + 5e-4 * 10_000 + 0.16 * 95 + 2 + 1e-4 * (10_000 - 95)),
    ],
    ids=["the largest small batch", "the smallest large one"],
)
def test_decode_is_its_formula(requests: int, expected: float) -> None:
    assert COSTS.decode_ms(requests, 10_000) == pytest.approx(expected)


@pytest.mark.parametrize(("requests", "base_ms"), [(10, 20.0), (100, 18.0)], ids=["decode's base", "prefill's base"])
def test_a_mixed_step_pays_the_larger_base_and_the_scheduler_once(requests: int, base_ms: float) -> None:
    kv_ms, request_ms = (6e-4, 0.04) if requests < 95 else (5e-4, 0.16)
    expected = base_ms + 0.1 * 256 + 7e-6 * 65_536 + kv_ms * 5_000 + request_ms * requests + 4 + 2
    expected += 1e-4 * (256 + 5_000 - requests)
    assert COSTS.mixed_ms(256, 65_536.0, requests, 5_000) == pytest.approx(expected)


@given(sizes)
def test_a_mixed_step_meets_the_pure_ones_at_its_edges(size: tuple[int, int, int]) -> None:
    tokens, requests, context = size
    assert COSTS.mixed_ms(tokens, squares(0, tokens), 0, 0) == COSTS.prefill_ms(tokens, squares(0, tokens))
    assert COSTS.mixed_ms(0, 0.0, requests, requests * context) == COSTS.decode_ms(requests, requests * context)


@given(sizes)
def test_a_mixed_step_costs_more_than_either_part_and_less_than_both(size: tuple[int, int, int]) -> None:
    tokens, requests, context = size
    t2, kv = squares(0, tokens), requests * context
    mixed = COSTS.mixed_ms(tokens, t2, requests, kv)
    alone = (COSTS.prefill_ms(tokens, t2), COSTS.decode_ms(requests, kv))
    assert max(alone) < mixed < sum(alone)


@given(sizes)
def test_the_next_pass_enters_after_one_stage(size: tuple[int, int, int]) -> None:
    tokens, requests, context = size
    t2, kv = squares(0, tokens), requests * context
    scheduler_ms = 2 + 1e-4 * (tokens + kv - requests)
    whole = COSTS.mixed_ms(tokens, t2, requests, kv)
    assert COSTS.stage_ms(tokens, t2, requests, kv) == pytest.approx(scheduler_ms + (whole - scheduler_ms) / 2)


def test_with_one_stage_the_next_pass_enters_when_the_last_is_done() -> None:
    one = StepCosts(
        prefill_base_ms=1.0,
        prefill_token_ms=0.1,
        prefill_square_ms=0.0,
        decode_base_ms=1.0,
        decode_kv_token_ms=0.0,
        decode_request_ms=0.0,
        large_decode_base_ms=1.0,
        large_decode_kv_token_ms=0.0,
        large_decode_request_ms=0.0,
    )
    assert one.large_decode_from == NEVER_LARGE
    assert one.stage_ms(10, 100.0, 0, 0) == one.prefill_ms(10, 100.0) == 2.0


@given(st.integers(0, 10_000), st.lists(st.integers(1, 5_000), min_size=1, max_size=20))
def test_the_shares_of_chunks_add_up_to_the_square(offset: int, chunks: list[int]) -> None:
    done, total = offset, squares(0, offset)
    for chunk in chunks:
        total += squares(done, chunk)
        done += chunk
    assert total == float(done * done)
