"""Decides what a Kubernetes resource quantity is worth."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_FORM = re.compile(r"^([+-]?[0-9.]+)([eE][+-]?[0-9]+|[A-Za-z]*)$")
_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{suffix: Fraction(1000 ** (power + 1)) for power, suffix in enumerate("kMGTPE")},
    **{suffix + "i": Fraction(1024 ** (power + 1)) for power, suffix in enumerate("KMGTPE")},
}


def parse_quantity(text: str) -> Fraction:
    """The exact value of `text`, such as 500m, 2, 1Gi or 1e3; raises `ValueError` when it is none."""
    match = _FORM.match(text)
    if not match:
        raise ValueError(f"not a quantity: {text!r}")
    number, suffix = match.groups()
    if suffix[:1] in ("e", "E") and suffix not in _SUFFIXES:
        return Fraction(f"{number}{suffix}")
    if suffix not in _SUFFIXES:
        raise ValueError(f"not a quantity: {text!r} (unknown suffix {suffix!r})")
    return Fraction(number) * _SUFFIXES[suffix]


def format_divided(value: Fraction, divisor: Fraction) -> str:
    """`value` in whole units of `divisor`, rounded up, as the downward API prints it."""
    return str(math.ceil(value / divisor))
