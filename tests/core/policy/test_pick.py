"""The six dispatch policies against their rules, spelled out, and at the edges."""

from __future__ import annotations

import copy
import math
import random
from fractions import Fraction

import pytest

from headrace_core.policy import dispatch
from headrace_core.policy.dispatch import DecodeLoad, Dispatching, Reason, Request
from tests.core.decode_workers import HEAVY, LIGHT, worker


class Draws:
    """A random source that gives what it was told to, and fails when asked for more or for something else."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def randrange(self, stop: int, /) -> int:
        drawn = self.answers.pop(0)
        assert 0 <= drawn < stop
        return drawn


CASES: dict[str, tuple[Dispatching, list[DecodeLoad], Request, Draws, int, Reason]] = {
    "nobody there": (Dispatching.DEFAULT, [], LIGHT, Draws(), -1, Reason.NO_WORKER),
    "nobody accepts": (Dispatching.RANDOM, [worker("a", accepting=False)], LIGHT, Draws(), -1, Reason.NO_WORKER),
    "zero free blocks everywhere: the least loaded": (
        Dispatching.DEFAULT,
        [worker("a", free=0, residents=2), worker("b", free=0, residents=1)],
        LIGHT,
        Draws(),
        1,
        Reason.OVERCOMMITTED,
    ),
    "one with room needs no draw, whatever the policy": (
        Dispatching.RANDOM,
        [worker("a", free=9), worker("b", free=10)],
        LIGHT,
        Draws(),
        1,
        Reason.ONLY_ONE_FITS,
    ),
    "equal loads: the name, not the position": (
        Dispatching.DEFAULT,
        [worker("b"), worker("a")],
        LIGHT,
        Draws(0, 0),
        1,
        Reason.BETTER_OF_TWO,
    ),
    "a drawn worker is counted among those with room": (
        Dispatching.DEFAULT,
        [
            worker("a", free=0),
            worker("b", residents=9),
            worker("c", accepting=False),
            worker("d"),
            worker("e", block=0),
        ],
        LIGHT,
        Draws(0, 0),
        3,
        Reason.BETTER_OF_TWO,
    ),
    "block sizes may differ": (
        Dispatching.DEFAULT,
        [worker("a", block=32, free=5), worker("b", block=16, free=9), worker("c", block=32, free=4)],
        LIGHT,
        Draws(),
        0,
        Reason.ONLY_ONE_FITS,
    ),
    "paper: 1:1 beats 1:0 for a heavy request": (
        Dispatching.PAPER_RATIO,
        [worker("a", residents=0), worker("b", residents=50)],
        HEAVY,
        Draws(0, 0),
        1,
        Reason.BETTER_OF_TWO,
    ),
    "paper: 0:0 is 0, less than 1:9": (
        Dispatching.PAPER_RATIO,
        [worker("a", heavy=1, residents=9), worker("b", heavy=0, residents=0)],
        LIGHT,
        Draws(0, 0),
        1,
        Reason.BETTER_OF_TWO,
    ),
    "paper: two infinite ratios: more free KV": (
        Dispatching.PAPER_RATIO,
        [worker("a", heavy=1, residents=1, free=90), worker("b", heavy=5, residents=5, free=91)],
        HEAVY,
        Draws(0, 0),
        1,
        Reason.BETTER_OF_TWO,
    ),
    "paper: equal ratios: more free KV": (
        Dispatching.PAPER_RATIO,
        [worker("a", heavy=1, residents=2, free=90), worker("b", heavy=2, residents=5, free=91)],
        LIGHT,  # 1:2 and 2:4
        Draws(0, 0),
        1,
        Reason.BETTER_OF_TWO,
    ),
    "random": (Dispatching.RANDOM, [worker("a", free=0), worker("b"), worker("c")], LIGHT, Draws(1), 2, Reason.DRAWN),
    "least loaded": (
        Dispatching.LEAST_LOADED,
        [worker("a", residents=2), worker("b", residents=1), worker("c", residents=0, free=0)],
        HEAVY,
        Draws(),
        1,
        Reason.FEWEST_RESIDENTS,
    ),
    "imbalance: a heavy request to the heavy ones": (
        Dispatching.IMBALANCE,
        [worker("b", heavy=3, free=50), worker("a", heavy=3, free=44), worker("c", heavy=2)],
        HEAVY,
        Draws(),
        1,
        Reason.MOST_HEAVY,
    ),
    "imbalance: a light request to the fewest residents": (
        Dispatching.IMBALANCE,
        [worker("a", residents=3), worker("b", heavy=2, residents=2)],
        LIGHT,
        Draws(),
        1,
        Reason.FEWEST_RESIDENTS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_choice(case: str) -> None:
    policy, workers, request, draws, index, reason = CASES[case]
    choice = dispatch.pick(workers, request, policy, copy.deepcopy(draws))
    assert (choice.index, choice.reason) == (index, reason)
    assert dispatch.explain_choice(workers[index] if index >= 0 else None, reason, request)


def test_round_robin_passes_over_those_without_room_and_begins_again() -> None:
    workers = [worker("a"), worker("b", free=0), worker("c"), worker("d", accepting=False)]
    choices = [dispatch.pick(workers, LIGHT, Dispatching.ROUND_ROBIN, Draws(), turn) for turn in range(6)]
    assert [one.index for one in choices] == [0, 2, 2, 0, 0, 2]
    assert all(one.reason is Reason.IN_TURN for one in choices)


def test_round_robin_asks_for_its_turn() -> None:
    with pytest.raises(ValueError, match="turn is missing"):
        dispatch.pick([worker("a"), worker("b")], LIGHT, Dispatching.ROUND_ROBIN, Draws())


def literal(
    policy: Dispatching, workers: list[DecodeLoad], request: Request, randomness: random.Random, turn: int
) -> int:
    """T6 and its alternatives word by word: the position of the chosen worker."""
    need = request.prompt_tokens + request.bound_tokens
    beta = [one for one in workers if one.accepting]
    alpha = [one for one in beta if one.block_size and math.ceil(need / one.block_size) <= one.free_kv_blocks]

    def free(one: DecodeLoad) -> int:
        return one.free_kv_blocks * one.block_size

    def ratio(one: DecodeLoad) -> Fraction | float:
        heavy = one.heavy + (1 if request.heavy else 0)
        light = one.residents - one.heavy + (0 if request.heavy else 1)
        if light == 0:
            return math.inf if heavy else 0
        return Fraction(heavy, light)

    if not beta:
        return -1
    if not alpha:
        return workers.index(min(beta, key=lambda one: (one.residents, -free(one), one.pod)))
    if len(alpha) == 1:
        return workers.index(alpha[0])
    if policy in (Dispatching.DEFAULT, Dispatching.PAPER_RATIO):
        first = alpha[randomness.randrange(len(alpha))]
        second = [one for one in alpha if one is not first][randomness.randrange(len(alpha) - 1)]
        if policy is Dispatching.PAPER_RATIO:
            return workers.index(min(first, second, key=lambda one: (ratio(one), -free(one), one.pod)))
        crowd = "heavy" if request.heavy else "residents"
        return workers.index(min(first, second, key=lambda one: (getattr(one, crowd), -free(one), one.pod)))
    if policy is Dispatching.RANDOM:
        return workers.index(alpha[randomness.randrange(len(alpha))])
    if policy is Dispatching.ROUND_ROBIN:
        due = turn % len(workers)
        return workers.index(next(one for one in workers[due:] + workers[:due] if one in alpha))
    if policy is Dispatching.IMBALANCE and request.heavy:
        return workers.index(min(alpha, key=lambda one: (-one.heavy, one.pod)))
    return workers.index(min(alpha, key=lambda one: (one.residents, -free(one), one.pod)))


def random_workers(source: random.Random) -> list[DecodeLoad]:
    """Up to eight workers, with ties and without room as often as not."""
    names = source.sample("abcdefghij", source.randrange(9))
    loads = []
    for name in names:
        heavy = source.randrange(3)
        loads.append(
            worker(
                name,
                free=source.randrange(-3, 14),
                heavy=heavy,
                residents=heavy + source.randrange(3),
                block=source.choice((0, 16, 16, 32)),
                accepting=source.random() < 0.85,
            )
        )
    return loads


@pytest.mark.thorough
@pytest.mark.parametrize("policy", Dispatching)
def test_it_picks_as_the_literal_rule(policy: Dispatching) -> None:
    """100,000 states, shared among the policies."""
    source = random.Random(policy.value)
    for seed in range(17_000):
        workers = random_workers(source)
        request = Request(
            prompt_tokens=source.randrange(1, 150), bound_tokens=source.randrange(80), heavy=source.random() < 0.5
        )
        before = repr(workers) if seed % 100 == 0 else ""
        choice = dispatch.pick(workers, request, policy, random.Random(seed), seed)
        assert choice.index == literal(policy, workers, request, random.Random(seed), seed), (workers, request, seed)
        assert not before or repr(workers) == before, "a policy does not change its view"


@pytest.mark.parametrize("heavy", [True, False])
def test_the_ranking_begins_with_the_default_s_choice(heavy: bool) -> None:
    source = random.Random(5)
    for seed in range(1000):
        workers = random_workers(source)
        request = Request(prompt_tokens=source.randrange(1, 150), bound_tokens=20, heavy=heavy)
        choice = dispatch.pick(workers, request, Dispatching.DEFAULT, random.Random(seed))
        ranking = dispatch.choose(workers, request, random.Random(seed)).ranking
        assert ranking[0] is workers[choice.index] if choice.index >= 0 else not ranking
