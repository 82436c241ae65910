"""The dispatcher, by hand-picked cases and against a literal transcription of its rule."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport
from headrace_core.policy import dispatch
from headrace_core.policy.dispatch import DecodeLoad, DecodeTable, Reason, Request
from tests.core.decode_workers import HEAVY, LIGHT, worker


@dataclass
class Draws:
    """A random source that gives what it was told to, and fails when asked for more or for something else."""

    answers: list[int]

    def randrange(self, stop: int, /) -> int:
        drawn = self.answers.pop(0)
        assert 0 <= drawn < stop
        return drawn


CASES: dict[str, tuple[list[DecodeLoad], Request, list[int], list[str], Reason]] = {
    "nobody there": ([], LIGHT, [], [], Reason.NO_WORKER),
    "nobody accepts": ([worker("a", accepting=False)], LIGHT, [], [], Reason.NO_WORKER),
    "one with room needs no draw": ([worker("a")], LIGHT, [], ["a"], Reason.ONLY_ONE_FITS),
    "exactly enough room": ([worker("a", free=10), worker("b", free=9)], LIGHT, [], ["a", "b"], Reason.ONLY_ONE_FITS),
    "room counts the whole answer": (
        [worker("a", free=43), worker("b", free=44)],
        HEAVY,
        [],
        ["b", "a"],
        Reason.ONLY_ONE_FITS,
    ),
    "a light request: fewer residents": (
        [worker("a", heavy=0, residents=5), worker("b", heavy=3, residents=4)],
        LIGHT,
        [0, 0],
        ["b", "a"],
        Reason.BETTER_OF_TWO,
    ),
    "a heavy request: fewer heavy residents": (
        [worker("a", heavy=0, residents=5), worker("b", heavy=3, residents=4)],
        HEAVY,
        [0, 0],
        ["a", "b"],
        Reason.BETTER_OF_TWO,
    ),
    "then more free KV": (
        [worker("a", free=50), worker("b", free=60)],
        LIGHT,
        [0, 0],
        ["b", "a"],
        Reason.BETTER_OF_TWO,
    ),
    "free KV is compared in tokens": (
        [worker("a", free=50, block=32), worker("b", free=60, block=16)],
        LIGHT,
        [0, 0],
        ["a", "b"],
        Reason.BETTER_OF_TWO,
    ),
    "then the name": ([worker("b"), worker("a")], LIGHT, [0, 0], ["a", "b"], Reason.BETTER_OF_TWO),
    "the better of the two drawn, not of all": (
        [worker("a", residents=0), worker("b", residents=2), worker("c", residents=1)],
        LIGHT,
        [1, 1],  # b, then the second of the others: c
        ["c", "a", "b"],
        Reason.BETTER_OF_TWO,
    ),
    "those without room come last, least loaded first": (
        [worker("a", free=1, residents=9), worker("b", free=1, residents=1), worker("c", residents=99)],
        LIGHT,
        [],
        ["c", "b", "a"],
        Reason.ONLY_ONE_FITS,
    ),
    "no room anywhere": (
        [worker("a", free=1, residents=2), worker("b", free=5, residents=2), worker("c", free=0, residents=3)],
        LIGHT,
        [],
        ["b", "a", "c"],
        Reason.OVERCOMMITTED,
    ),
    "an unknown block size is no room": (
        [worker("a", block=0, free=1000), worker("b", residents=50)],
        LIGHT,
        [],
        ["b", "a"],
        Reason.ONLY_ONE_FITS,
    ),
    "who does not accept is not in the ranking": (
        [worker("a", accepting=False), worker("b"), worker("c", free=0)],
        LIGHT,
        [],
        ["b", "c"],
        Reason.ONLY_ONE_FITS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_ranking(case: str) -> None:
    workers, request, draws, ranking, reason = CASES[case]
    source = Draws(list(draws))
    decision = dispatch.choose(workers, request, source)
    assert [one.pod for one in decision.ranking] == ranking
    assert decision.reason is reason
    assert decision.overcommitted == (reason is Reason.OVERCOMMITTED)
    assert source.answers == []


def literal(workers: Sequence[DecodeLoad], request: Request, randomness: random.Random) -> tuple[str, bool] | None:
    """T6 word by word: the chosen pod, and whether it is overcommitted."""
    need = request.prompt_tokens + request.bound_tokens
    beta = [one for one in workers if one.accepting]
    alpha = [one for one in beta if one.block_size and math.ceil(need / one.block_size) <= one.free_kv_blocks]
    if not beta:
        return None
    if not alpha:
        beta = sorted(beta, key=lambda one: one.pod)
        beta = sorted(beta, key=lambda one: one.free_kv_blocks * one.block_size, reverse=True)
        return sorted(beta, key=lambda one: one.residents)[0].pod, True
    if len(alpha) == 1:
        return alpha[0].pod, False
    i = randomness.randrange(len(alpha))
    others = alpha[:i] + alpha[i + 1 :]
    a, b = alpha[i], others[randomness.randrange(len(others))]
    crowd_a, crowd_b = (a.heavy, b.heavy) if request.heavy else (a.residents, b.residents)
    if crowd_a != crowd_b:
        return (a if crowd_a < crowd_b else b).pod, False
    free_a, free_b = a.free_kv_blocks * a.block_size, b.free_kv_blocks * b.block_size
    if free_a != free_b:
        return (a if free_a > free_b else b).pod, False
    return min(a.pod, b.pod), False


loads = st.builds(
    DecodeLoad,
    pod=st.sampled_from([f"w{n}" for n in range(40)]),
    address=st.just("x"),
    epoch=st.just(0),
    accepting=st.sampled_from([True, True, True, False]),
    block_size=st.sampled_from([0, 16, 16, 32]),
    free_kv_blocks=st.integers(-5, 12),
    heavy=st.integers(0, 2),
    residents=st.integers(0, 3),
)
requests = st.builds(Request, prompt_tokens=st.integers(1, 150), bound_tokens=st.integers(0, 200), heavy=st.booleans())


@given(st.lists(loads, max_size=8, unique_by=lambda one: one.pod), requests, st.integers(0, 2**32))
def test_it_decides_as_the_literal_rule(workers: list[DecodeLoad], request: Request, seed: int) -> None:
    before = copy.deepcopy(workers)
    decision = dispatch.choose(workers, request, random.Random(seed))
    expected = literal(workers, request, random.Random(seed))
    assert (decision.ranking[0].pod, decision.overcommitted) == expected if expected else not decision.ranking
    assert sorted(one.pod for one in decision.ranking) == sorted(one.pod for one in workers if one.accepting)
    assert workers == before, "a policy does not change its view"
    assert dispatch.explain(decision, request)


def test_both_of_two_are_drawn_whatever_the_source_says() -> None:
    workers = [worker("a", residents=1), worker("b", residents=0)]
    for first in range(2):
        assert dispatch.choose(workers, LIGHT, Draws([first, 0])).ranking[0].pod == "b"


def test_every_pair_can_be_drawn_and_is_drawn_evenly() -> None:
    """With the third worker the worst it wins no pair; the other two share the rest as 2:1."""
    workers = [worker("a", residents=0), worker("b", residents=1), worker("c", residents=2)]
    source = random.Random(1)
    wins = [dispatch.choose(workers, LIGHT, source).ranking[0].pod for _ in range(3000)]
    assert "c" not in wins
    assert 0.62 < wins.count("a") / 3000 < 0.71


EXPLAINED = {
    "nobody there": "no decode worker accepts",
    "one with room needs no draw": "a, the only one with room",
    "a heavy request: fewer heavy residents": "a, the better of two for a heavy request",
    "no room anywhere": "b, the least loaded, since none has room",
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_the_decision_in_words(case: str) -> None:
    workers, request, draws, _, _ = CASES[case]
    decision = dispatch.choose(workers, request, Draws(list(draws)))
    assert EXPLAINED[case] in dispatch.explain(decision, request)


def report(pod: str, sequence: int = 1, boot: str = "b", epoch: int = 0, free: int = 100) -> LoadReport:
    """A report of an empty decode worker."""
    return LoadReport(
        pod=pod,
        address=f"{pod}:8000",
        boot_id=boot,
        sequence=sequence,
        role=Role.DECODE,
        epoch=epoch,
        accepting=True,
        free_kv_blocks=free,
        total_kv_blocks=100,
        block_size=16,
        light_requests=1,
    )


def load_of(table: DecodeTable, pod: str) -> DecodeLoad:
    """A worker of a table."""
    return next(one for one in table.loads() if one.pod == pod)


def test_a_placement_counts_until_reports_show_it() -> None:
    table = DecodeTable()
    table.hear([report("a", sequence=7), report("b")])
    table.place("a", HEAVY)
    for sequence in (7, 8, 9):
        table.hear([report("a", sequence=sequence), report("b")])
        seen = load_of(table, "a")
        assert (seen.free_kv_blocks, seen.heavy, seen.residents) == (56, 1, 2), sequence
    table.hear([report("a", sequence=10), report("b")])
    seen = load_of(table, "a")
    assert (seen.free_kv_blocks, seen.heavy, seen.residents) == (100, 0, 1)
    assert load_of(table, "b").residents == 1


@pytest.mark.parametrize("other", [{"boot": "c"}, {"epoch": 1}])
def test_a_worker_that_began_anew_holds_no_placement(other: dict[str, str]) -> None:
    table = DecodeTable()
    table.hear([report("a")])
    table.place("a", LIGHT)
    table.hear([report("a", **other)])  # type: ignore[arg-type]
    assert load_of(table, "a").residents == 1


def test_an_old_report_does_not_win() -> None:
    table = DecodeTable()
    table.hear([report("a", sequence=5, free=10)])
    table.hear([report("a", sequence=4, free=90)])
    assert load_of(table, "a").free_kv_blocks == 10


def test_who_is_not_in_the_aggregate_is_out() -> None:
    table = DecodeTable()
    table.hear([report("a"), report("b")])
    table.hear([report("b", sequence=2)])
    assert [one.pod for one in table.loads()] == ["b"]
    table.place("a", LIGHT)


def test_placements_between_two_reports_spread() -> None:
    """All see the same reports; without the table's own counts all but ties would go to one worker."""
    table = DecodeTable()
    table.hear([report("a"), report("b", free=99)])
    source = random.Random(3)
    for _ in range(10):
        chosen = dispatch.choose(table.loads(), LIGHT, source).ranking[0]
        table.place(chosen.pod, LIGHT)
    assert [load_of(table, pod).residents for pod in "ab"] == [6, 6]


def test_a_worker_that_says_it_takes_nothing() -> None:
    table = DecodeTable()
    table.hear([report("a").model_copy(update={"accepting": False})])
    assert dispatch.choose(table.loads(), LIGHT, Draws([])).reason is Reason.NO_WORKER
