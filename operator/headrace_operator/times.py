"""Turns the API's times of day (RFC 3339) into seconds since the epoch, and back."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def parse(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time.

    Raises:
        ValueError: the text is no such time.
    """
    return datetime.fromisoformat(text).timestamp()


def whole(seconds: float) -> str:
    """The time as `metav1.Time` writes it: whole seconds, rounded down, in UTC."""
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro(seconds: float) -> str:
    """The time as `metav1.MicroTime` writes it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
