"""Order and chunking against their rules, spelled out token by token, and the bound on overtaking."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.policy.chunking import Batching, Piece, cut, take
from headrace_core.policy.prefill_order import Order, PrefillJob, PrefillQueue


class Job(PrefillJob):
    """A job as a worker might pass it, with a name of its own."""

    __slots__ = ("name",)

    def __init__(self, name: str, prompt_tokens: int, arrival_number: int) -> None:
        super().__init__(prompt_tokens, arrival_number)
        self.name = name


def queue(order: Order, prompts: list[int], sched_batch: int = 16) -> PrefillQueue:
    """A queue into which prompts of these lengths came in this order."""
    made = PrefillQueue(order, sched_batch)
    for number, tokens in enumerate(prompts):
        made.add(Job(f"r{number}", tokens, number))
    return made


def shape(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    """Pieces as (arrival number, offset, tokens)."""
    return [(piece.job.arrival_number, piece.offset, piece.tokens) for piece in pieces]


ORDERS: dict[str, tuple[Order, list[int], int, list[int]]] = {
    "nothing waits": (Order.SJF, [], 16, []),
    "by arrival": (Order.FCFS, [5, 3, 4], 16, [0, 1, 2]),
    "the shortest first": (Order.SJF, [5, 3, 4], 16, [1, 2, 0]),
    "the longest first": (Order.LJF, [5, 3, 4], 16, [0, 2, 1]),
    "ties by arrival, the shortest first": (Order.SJF, [4, 4, 3, 4], 16, [2, 0, 1, 3]),
    "ties by arrival, the longest first": (Order.LJF, [4, 4, 5, 4], 16, [2, 0, 1, 3]),
    "sorted inside batches only": (Order.SJF, [5, 3, 2, 1, 4], 2, [1, 0, 3, 2, 4]),
    "batches of one keep the order": (Order.LJF, [1, 2, 3], 1, [0, 1, 2]),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order(case: str) -> None:
    order, prompts, sched_batch, expected = ORDERS[case]
    made = queue(order, prompts, sched_batch)
    made.seal_until(10**9)
    assert [job.arrival_number for job in made.scheduled] == expected
    assert (len(made), made.queued_tokens) == (len(prompts), sum(prompts))


def test_a_batch_is_sealed_as_late_as_can_be() -> None:
    made = queue(Order.SJF, [10, 9, 8, 7], sched_batch=2)
    made.seal_until(19)
    assert [job.arrival_number for job in made.scheduled] == [1, 0]
    made.add(Job("late", 1, 4))
    made.seal_until(20)
    assert [job.arrival_number for job in made.scheduled] == [1, 0, 3, 2]
    made.seal_until(35)
    assert [job.arrival_number for job in made.scheduled] == [1, 0, 3, 2, 4]


def test_a_cancelled_request_leaves_wherever_it_waits() -> None:
    made = queue(Order.FCFS, [10, 20, 30], sched_batch=1)
    take(made, cut(made, Batching.CHUNKED, 4))
    half_done, raw = made.scheduled[0], made.raw[-1]
    made.remove(raw)
    assert (len(made), made.queued_tokens) == (2, 26)
    made.remove(half_done)
    assert (len(made), made.queued_tokens) == (1, 20)
    assert shape(cut(made, Batching.CHUNKED, 100)) == [(1, 0, 20)]
    with pytest.raises(ValueError, match=r"not in deque|x not in"):
        made.remove(raw)


PASSES: dict[str, tuple[Batching, int, list[int], list[list[tuple[int, int, int]]]]] = {
    "nothing waits": (Batching.CHUNKED, 8, [], []),
    "a prompt over the chunk": (Batching.CHUNKED, 8, [20], [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)]]),
    "a prompt of exactly the chunk": (Batching.CHUNKED, 8, [8, 1], [[(0, 0, 8)], [(1, 0, 1)]]),
    "tail and head share a chunk, and only the last is partial": (
        Batching.CHUNKED,
        8,
        [5, 7, 6],
        [[(0, 0, 5), (1, 0, 3)], [(1, 3, 4), (2, 0, 4)], [(2, 4, 2)]],
    ),
    "whole prompts up to L_m": (
        Batching.LM_BATCH,
        10,
        [4, 6, 1, 9, 2],
        [[(0, 0, 4), (1, 0, 6)], [(2, 0, 1), (3, 0, 9)], [(4, 0, 2)]],
    ),
    "a prompt over L_m runs alone": (Batching.LM_BATCH, 10, [3, 25, 3], [[(0, 0, 3)], [(1, 0, 25)], [(2, 0, 3)]]),
    "a prompt of L_m runs alone": (Batching.LM_BATCH, 10, [10, 1], [[(0, 0, 10)], [(1, 0, 1)]]),
    "the whole queue up to its cap": (
        Batching.WHOLE_QUEUE,
        100,
        [40, 50, 11],
        [[(0, 0, 40), (1, 0, 50)], [(2, 0, 11)]],
    ),
    "a prompt over the cap does not wait for ever": (Batching.WHOLE_QUEUE, 10, [11], [[(0, 0, 11)]]),
}


@pytest.mark.parametrize("case", PASSES)
def test_the_passes(case: str) -> None:
    batching, limit, prompts, expected = PASSES[case]
    made = queue(Order.FCFS, prompts)
    passes = []
    while pieces := cut(made, batching, limit):
        passes.append(shape(pieces))
        take(made, pieces)
    assert passes == expected
    assert (len(made), made.queued_tokens) == (0, 0)


def test_chunks_cross_sealed_batches() -> None:
    made = queue(Order.SJF, [5, 3, 4, 2], sched_batch=2)
    assert shape(cut(made, Batching.CHUNKED, 9)) == [(1, 0, 3), (0, 0, 5), (3, 0, 1)]


def test_cutting_takes_nothing() -> None:
    made = queue(Order.FCFS, [5, 7])
    assert shape(cut(made, Batching.CHUNKED, 8)) == shape(cut(made, Batching.CHUNKED, 8))
    assert made.queued_tokens == 12


def test_a_stale_plan_is_refused() -> None:
    made = queue(Order.FCFS, [5, 7])
    pieces = cut(made, Batching.CHUNKED, 8)
    take(made, pieces)
    with pytest.raises(ValueError, match="cut again"):
        take(made, pieces)


def test_bad_arguments_name_the_field() -> None:
    made = queue(Order.FCFS, [])
    with pytest.raises(ValueError, match="sched_batch is 0"):
        PrefillQueue(Order.FCFS, 0)
    with pytest.raises(ValueError, match="limit_tokens is 0"):
        cut(made, Batching.CHUNKED, 0)
    with pytest.raises(ValueError, match="prompt_tokens is 0"):
        made.add(Job("empty", 0, 0))


class Literal:
    """T3, T5 and D6 word by word, over lists of single tokens (job, position)."""

    def __init__(self, order: Order, sched_batch: int) -> None:
        self.order, self.sched_batch = order, sched_batch
        self.raw: list[Job] = []
        self.stream: list[tuple[Job, int]] = []

    def seal(self, tokens: int) -> None:
        """Seal batches while the stream cannot fill a chunk."""
        while self.raw and len(self.stream) < tokens:
            batch, self.raw = self.raw[: self.sched_batch], self.raw[self.sched_batch :]
            batch.sort(key=lambda job: job.arrival_number)
            if self.order is not Order.FCFS:
                batch.sort(key=lambda job: job.prompt_tokens, reverse=self.order is Order.LJF)
            self.stream += [(job, position) for job in batch for position in range(job.prompt_tokens)]

    def next_pass(self, batching: Batching, limit: int) -> list[tuple[Job, int]]:
        """The tokens of the next pass; they leave the stream."""
        self.seal(limit)
        tokens = self.stream[:limit]
        if batching is not Batching.CHUNKED and tokens:
            while tokens and tokens[-1][1] != tokens[-1][0].prompt_tokens - 1:
                tokens.pop()
            if not tokens:
                tokens = self.stream[: self.stream[0][0].prompt_tokens]
        self.stream = self.stream[len(tokens) :]
        return tokens


@pytest.mark.thorough
@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("order", Order)
def test_it_orders_and_cuts_as_the_literal_rules(order: Order, batching: Batching) -> None:
    """100,000 passes in all, each in another state of the queue."""
    source = random.Random(f"{order}{batching}")
    passes = 0
    while passes < 11_200:
        sched_batch = source.choice((1, 2, 3, 16))
        made, literal = PrefillQueue(order, sched_batch), Literal(order, sched_batch)
        for number in range(60):
            if source.random() < 0.6:
                job = Job("", source.choice((1, 2, source.randrange(1, 30))), number)
                made.add(job)
                literal.raw.append(job)
            waiting = [*made.scheduled, *made.raw]
            if waiting and source.random() < 0.1:
                cancelled = source.choice(waiting)
                made.remove(cancelled)
                literal.raw = [job for job in literal.raw if job is not cancelled]
                literal.stream = [token for token in literal.stream if token[0] is not cancelled]
            if source.random() < 0.4 or number > 50:
                limit = source.choice((1, 8, 17))
                pieces = cut(made, batching, limit)
                expected = literal.next_pass(batching, limit)
                tokens = [(piece.job, piece.offset + i) for piece in pieces for i in range(piece.tokens)]
                assert tokens == expected
                take(made, pieces)
                passes += 1
            assert made.queued_tokens == len(literal.stream) + sum(job.prompt_tokens for job in literal.raw)
            assert made.scheduled_tokens == len(literal.stream)


@given(
    st.sampled_from(Order),
    st.integers(1, 6),
    st.lists(st.one_of(st.integers(1, 30), st.sampled_from(["pass"])), min_size=1, max_size=120),
)
def test_no_more_than_a_batch_overtakes(order: Order, sched_batch: int, events: list[int | str]) -> None:
    """At most `sched_batch - 1` requests that arrived later begin before a request does, however it goes on."""
    made = PrefillQueue(order, sched_batch)
    begun: list[int] = []
    arrived = 0
    for event in [*events, *["pass"] * 400]:
        if isinstance(event, int):
            made.add(Job("", event, arrived))
            arrived += 1
        else:
            pieces = cut(made, Batching.CHUNKED, 8)
            take(made, pieces)
            begun += [piece.job.arrival_number for piece in pieces if piece.offset == 0]
    assert sorted(begun) == list(range(arrived)), "each request begins once"
    for place, number in enumerate(begun):
        assert sum(other > number for other in begun[:place]) <= sched_batch - 1
        assert order is not Order.FCFS or place == number


def test_the_queues_are_deques() -> None:
    """The head leaves in constant time, however long the queue is."""
    made = queue(Order.FCFS, [1])
    assert isinstance(made.raw, deque)
    assert isinstance(made.scheduled, deque)
