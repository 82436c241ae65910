"""The order in which prefill workers are asked."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from headrace_core.policy.routing import load_key


@dataclass(frozen=True)
class Load:
    pod: str
    queued_prefill_tokens: int = 0
    running_tokens: int = 0


CASES = {
    "nobody": ([], []),
    "fewest queued tokens, whatever runs": ([Load("a", 10, 0), Load("b", 9, 5000)], ["b", "a"]),
    "then fewest running tokens": ([Load("a", 10, 7), Load("b", 10, 6)], ["b", "a"]),
    "then the name": ([Load("c"), Load("a"), Load("b")], ["a", "b", "c"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_order(case: str) -> None:
    workers, expected = CASES[case]
    random.Random(0).shuffle(workers)
    assert [worker.pod for worker in sorted(workers, key=load_key)] == expected
