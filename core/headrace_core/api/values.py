"""Reads and writes the quantities of a custom resource that travel as text: durations and shares."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import StringConstraints

DURATION_PATTERN: Final = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
"""The Gateway API's pattern (GEP-2257): floats are no part of an API, because they do not survive a round trip."""
PERCENT_PATTERN: Final = r"^(100(\.0{1,3})?|[0-9]{1,2}(\.[0-9]{1,3})?)%$"

Duration = Annotated[str, StringConstraints(pattern=DURATION_PATTERN, max_length=28)]
"""Four parts of at most five digits and a unit: 28 characters."""
Percent = Annotated[str, StringConstraints(pattern=PERCENT_PATTERN, max_length=8)]

_UNITS_MS: Final = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_PART: Final = re.compile(r"([0-9]{1,5})(ms|h|m|s)")
_LARGEST_PART: Final = 99_999


def duration_s(text: str) -> float:
    """Seconds of a duration such as `1h30m` or `250ms`. A unit given twice counts twice, as in Go.

    Raises:
        ValueError: the text does not follow DURATION_PATTERN.
    """
    if not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError(f"{text!r} is no duration: write whole numbers with h, m, s or ms, such as 1m30s")
    return sum(int(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)) / 1000


def duration_text(seconds: float) -> str:
    """The shortest duration for a number of seconds, to the millisecond: the inverse of `duration_s`.

    Raises:
        ValueError: negative, or of more hours than the pattern has digits for.
    """
    rest = round(seconds * 1000)
    if rest < 0 or rest // _UNITS_MS["h"] > _LARGEST_PART:
        raise ValueError(f"{seconds} s has no text: a duration lies between 0s and {_LARGEST_PART}h")
    parts: list[str] = []
    for unit, size in _UNITS_MS.items():
        number, rest = divmod(rest, size)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


def share(text: str) -> float:
    """The share, 0 to 1, of a percent string such as `12.5%`.

    Raises:
        ValueError: the text does not follow PERCENT_PATTERN.
    """
    if not re.fullmatch(PERCENT_PATTERN, text):
        raise ValueError(f"{text!r} is no share: write a percentage from 0% to 100%, at most three decimals")
    return float(text[:-1]) / 100
