"""Prints an answer as text or as JSON, with its explanation where one is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def print_answer(
    arguments: argparse.Namespace,
    answer: Answer,
    *,
    text: Callable[[Answer], str],
    json: Callable[[Answer], str],
    explanation: Callable[[Answer], str],
) -> None:
    """Follow the flags `--json` and `--explain`: JSON stands alone on the standard output."""
    if arguments.json:
        print(json(answer))
        if arguments.explain:
            print(explanation(answer), file=sys.stderr)
        return
    print(text(answer))
    if arguments.explain:
        print(f"\n{explanation(answer)}")
