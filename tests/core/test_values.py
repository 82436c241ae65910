"""Durations and shares as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.api.values import duration_s, duration_text, share

DURATIONS = {
    "0s": 0.0,
    "15s": 15.0,
    "2m": 120.0,
    "1h30m": 5400.0,
    "250ms": 0.25,
    "1h2m3s4ms": 3723.004,
    "90s": 90.0,
    "1m1m": 120.0,
    "99999h": 99999 * 3600.0,
}


@pytest.mark.parametrize("text", DURATIONS)
def test_a_duration_in_seconds(text: str) -> None:
    assert duration_s(text) == DURATIONS[text]


@pytest.mark.parametrize("text", ["", "15", "1.5s", "-1s", "1d", "s", "1 s", "100000s", "1s1s1s1s1s", "1S", "1s\n"])
def test_what_is_no_duration_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        duration_s(text)


@given(st.integers(0, 99_999 * 3_600_000 + 3_599_999))
def test_a_duration_survives_the_round_trip(milliseconds: int) -> None:
    text = duration_text(milliseconds / 1000)
    assert duration_s(text) == pytest.approx(milliseconds / 1000, abs=1e-6)


@pytest.mark.parametrize("seconds", [-0.001, 100_000 * 3600.0])
def test_seconds_without_a_text_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="has no text"):
        duration_text(seconds)


SHARES = {"0%": 0.0, "10%": 0.1, "12.5%": 0.125, "100%": 1.0, "100.000%": 1.0, "99.999%": 0.99999}


@pytest.mark.parametrize("text", SHARES)
def test_a_share(text: str) -> None:
    assert share(text) == pytest.approx(SHARES[text])


@pytest.mark.parametrize("text", ["", "10", "0.1", "101%", "100.1%", "-1%", "1.2345%", " 10%", "10 %", "10%\n"])
def test_what_is_no_share_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is no share"):
        share(text)
