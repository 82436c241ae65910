"""Admission against the rule, spelled out, and when to ask again against asking at every step."""

from __future__ import annotations

import math
import random

import pytest

from headrace_core.policy import admission
from headrace_core.policy.admission import Admission, DecodeMemory, Reason

GREEDY, STATIC, DYNAMIC = Admission.GREEDY, Admission.RESERVE_STATIC, Admission.RESERVE_DYNAMIC


def memory(
    *, free: int, total: int = 100, running: int = 1, fewest: int = 50, block: int = 16, most: int = 256
) -> DecodeMemory:
    """A decode worker's memory; the blocks have 16 tokens."""
    return DecodeMemory(
        block_size=block,
        total_blocks=total,
        free_blocks=free,
        running=running,
        fewest_remaining=fewest if running else 0,
        max_running=most,
    )


CASES: dict[str, tuple[Admission, DecodeMemory, int, int, Reason, int]] = {
    "greedy: the context and one token fill a block": (GREEDY, memory(free=1), 15, 500, Reason.FITS, 0),
    "greedy: the next token opens a block": (GREEDY, memory(free=1), 16, 500, Reason.NO_ROOM_NOW, 0),
    "zero free blocks": (DYNAMIC, memory(free=0), 1, 1, Reason.NO_ROOM_NOW, 0),
    "more than the whole cache": (GREEDY, memory(free=100), 1600, 1, Reason.NEVER_FITS, 0),
    "as much as the whole cache": (GREEDY, memory(free=100, running=0), 1599, 1, Reason.FITS, 0),
    "never fits, though the batch is full": (STATIC, memory(free=0, most=1), 1600, 1, Reason.NEVER_FITS, 0),
    "the batch is full": (GREEDY, memory(free=100, running=4, most=4), 1, 1, Reason.BATCH_FULL, 0),
    "static: exactly": (STATIC, memory(free=10), 100, 60, Reason.FITS, 0),
    "static: one token more": (STATIC, memory(free=10), 100, 61, Reason.NO_ROOM_LATER, 0),
    "static: nothing runs": (STATIC, memory(free=10, running=0), 100, 5000, Reason.NOTHING_RUNNING, 0),
    "static: nothing runs and it fits": (STATIC, memory(free=10, running=0), 100, 60, Reason.FITS, 0),
    "dynamic: 7 blocks and 2 requests of 4 blocks": (DYNAMIC, memory(free=15), 100, 500, Reason.FITS, 0),
    "dynamic: one block short, until r is down to 48": (DYNAMIC, memory(free=14), 100, 500, Reason.NO_ROOM_LATER, 2),
    "dynamic: r is capped at its own": (DYNAMIC, memory(free=9), 100, 16, Reason.FITS, 0),
    "dynamic: capped, one short: at r = 0": (DYNAMIC, memory(free=8), 100, 16, Reason.NO_ROOM_LATER, 50),
    "dynamic: the shortest ends now": (DYNAMIC, memory(free=7, fewest=0), 100, 500, Reason.FITS, 0),
    "dynamic: nothing runs": (DYNAMIC, memory(free=100, running=0), 100, 5000, Reason.NOTHING_RUNNING, 0),
    "dynamic: nothing runs and it fits": (DYNAMIC, memory(free=100, running=0), 100, 500, Reason.FITS, 0),
    "dynamic: nothing runs, held by transfers": (DYNAMIC, memory(free=3, running=0), 100, 5, Reason.NO_ROOM_NOW, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict(case: str) -> None:
    policy, view, context, bound, reason, again = CASES[case]
    before = repr(view)
    verdict = admission.decide(policy, view, context, bound)
    assert (verdict.reason, verdict.ask_again_steps) == (reason, again)
    assert verdict.admits == (reason in {Reason.FITS, Reason.NOTHING_RUNNING})
    assert repr(view) == before, "a policy does not change its view"
    said = admission.explain(verdict, view, context, bound)
    assert f"{view.free_blocks} of {view.total_blocks} blocks" in said
    assert ("ask again" in said) == (again > 0)


def test_verdicts_without_a_step_are_shared_and_cannot_change() -> None:
    first = admission.decide(GREEDY, memory(free=10), 1, 1)
    assert admission.decide(STATIC, memory(free=10), 1, 1) is first is admission.FITS
    with pytest.raises(AttributeError):
        first.reason = Reason.BATCH_FULL  # type: ignore[misc]


def literal(policy: Admission, view: DecodeMemory, context: int, bound: int) -> bool | None:
    """T8 word by word. None: it can never fit."""

    def blocks(tokens: int) -> int:
        return math.ceil(tokens / view.block_size)

    if blocks(context + 1) > view.total_blocks:
        return None
    if view.running >= view.max_running or blocks(context + 1) > view.free_blocks:
        return False
    if policy is Admission.GREEDY or view.running == 0:
        return True
    if policy is Admission.RESERVE_STATIC:
        return blocks(context + bound) <= view.free_blocks
    r = min(view.fewest_remaining, bound)
    n = view.running
    return blocks(context + 1) + (n + 1) * math.ceil(r / view.block_size) <= view.free_blocks


def random_memory(source: random.Random) -> tuple[DecodeMemory, int, int]:
    """Any state, at the limits as often as not."""
    total = source.randrange(1, 60)
    running = source.choice((0, 1, source.randrange(12)))
    view = memory(
        total=total,
        free=source.randrange(total + 1),
        running=running,
        fewest=source.randrange(120),
        block=source.choice((1, 16, 16, 32)),
        most=source.choice((1, 8, 256)),
    )
    context = source.choice((source.randrange(60), source.randrange(800)))
    return view, context, source.choice((0, 1, source.randrange(400)))


@pytest.mark.thorough
@pytest.mark.parametrize("policy", Admission)
def test_it_decides_as_the_literal_rule(policy: Admission) -> None:
    """100,000 states, shared among the policies."""
    source = random.Random(policy.value)
    for _ in range(34_000):
        view, context, bound = random_memory(source)
        verdict = admission.decide(policy, view, context, bound)
        expected = literal(policy, view, context, bound)
        assert verdict.admits == bool(expected), (view, context, bound)
        assert (verdict.reason is Reason.NEVER_FITS) == (expected is None)


@pytest.mark.thorough
def test_asking_again_when_told_misses_no_step() -> None:
    """Step by step: every running request has a token fewer to go, and free blocks may fall but not rise."""
    source = random.Random(7)
    waited = 0
    for _ in range(40_000):
        view, context, bound = random_memory(source)
        verdict = admission.decide(DYNAMIC, view, context, bound)
        if verdict.admits or verdict.reason is Reason.NEVER_FITS:
            continue
        steady = source.random() < 0.5
        again = verdict.ask_again_steps
        assert (again > 0) == (verdict.reason is Reason.NO_ROOM_LATER)
        assert again <= view.fewest_remaining, "at the latest when the shortest ends, and the batch changes"
        for step in range(1, view.fewest_remaining + 1):
            view.fewest_remaining -= 1
            if not steady and source.random() < 0.1:
                view.free_blocks = max(0, view.free_blocks - 1)
            admits = literal(DYNAMIC, view, context, bound)
            assert not admits or (again > 0 and step >= again)
            if steady and step == again:
                assert admits, "and not a step too early"
                waited += 1
                break
    assert waited > 500
