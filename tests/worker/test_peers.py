"""Which decode workers are known, from several gateways that do not hear the same; and who is dispatched to."""

from __future__ import annotations

import random

import pytest

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport
from headrace_worker.dispatcher import Dispatcher
from headrace_worker.peers import PeerTable
from tests.worker.fakes import report

Heard = list[tuple[float, int, list[LoadReport]]]

TABLES: dict[str, tuple[Heard, float, dict[str, tuple[str, int]]]] = {
    "one line": ([(0.0, 1, [report("a"), report("b")])], 0.1, {"a": ("b", 1), "b": ("b", 1)}),
    "a later line counts": (
        [(0.0, 1, [report("a")]), (0.1, 1, [report("a", sequence=2)])], 0.2, {"a": ("b", 2)},
    ),
    "a line is the whole list": ([(0.0, 1, [report("a"), report("b")]), (0.1, 1, [report("b", sequence=2)])], 0.2,
        {"b": ("b", 2)}),
    "the newer of two gateways": (
        [(0.0, 1, [report("a", sequence=5)]), (0.1, 2, [report("a", sequence=4)])], 0.2, {"a": ("b", 5)},
    ),
    "only one gateway knows it": ([(0.0, 1, [report("a")]), (0.1, 2, [report("c")])], 0.2,
        {"a": ("b", 1), "c": ("b", 1)}),
    "a new process, though its sequence is lower": (
        [(0.0, 1, [report("a", sequence=90)]), (0.1, 1, [report("a", boot_id="b2", sequence=1)])],
        0.2,
        {"a": ("b2", 1)},
    ),
    "a gateway still tells of the dead process": (
        [
            (0.0, 1, [report("a", sequence=90)]),
            (0.0, 2, [report("a", sequence=90)]),
            (0.1, 1, [report("a", boot_id="b2", sequence=1)]),
            (0.2, 2, [report("a", sequence=90)]),
        ],
        0.3,
        {"a": ("b2", 1)},
    ),
    "silence of the gateway": ([(0.0, 1, [report("a")])], 3.1, {}),
    "just before": ([(0.0, 1, [report("a")])], 2.9, {"a": ("b", 1)}),
    "a frozen worker that is still listed": (
        [(0.0, 1, [report("a", sequence=5)]), (2.0, 1, [report("a", sequence=5)])], 3.1, {},
    ),
    "one that goes on": (
        [(0.0, 1, [report("a", sequence=5)]), (2.0, 1, [report("a", sequence=6)])], 3.1, {"a": ("b", 6)},
    ),
    "a prefill worker is none": ([(0.0, 1, [report("a", role=Role.PREFILL)])], 0.1, {}),
}  # fmt: skip


@pytest.mark.parametrize(("heard", "now_s", "expected"), TABLES.values(), ids=TABLES.keys())
def test_what_is_known(heard: Heard, now_s: float, expected: dict[str, tuple[str, int]]) -> None:
    table = PeerTable(max_age_s=3.0)
    for at_s, source, reports in heard:
        table.hear(source, reports, at_s)
    newest = table.newest(now_s)
    assert {one.pod: (one.boot_id, one.sequence) for one in newest} == expected
    assert [one.pod for one in newest] == sorted(expected)


def test_what_is_forgotten_is_heard_anew() -> None:
    table = PeerTable(max_age_s=3.0)
    table.hear(1, [report("a", sequence=5)], 0.0)
    assert table.newest(10.0) == []
    table.hear(2, [report("a", sequence=6)], 11.0)
    assert [one.sequence for one in table.newest(11.0)] == [6]


def test_streams_that_ended_leave_nothing_behind() -> None:
    table = PeerTable(max_age_s=3.0)
    for source in range(100):
        table.hear(source, [report("a", sequence=source, boot_id=f"b{source}")], float(source))
        table.newest(float(source))
    assert len(table._sources) == len(table._progress) == 3


def dispatcher(reports: list[LoadReport], *, max_model_len: int = 2048) -> Dispatcher:
    peers = PeerTable(max_age_s=3.0)
    peers.hear(1, reports, 0.0)
    return Dispatcher(peers, random.Random(1), lambda: 0.1, max_model_len=max_model_len)


def test_the_answer_names_all_that_accept_best_first() -> None:
    one = dispatcher([report("busy", light_requests=9), report("closed", accepting=False), report("free", epoch=3)])
    answer = one.dispatch(prompt_tokens=10, max_tokens=20)
    assert [(ref.pod, ref.address, ref.epoch) for ref in answer.decode_workers] == [
        ("free", "free:8000", 3),
        ("busy", "busy:8000", 0),
    ]
    assert (answer.overcommitted, answer.prompt_tokens) == (False, 10)


def test_nobody_known_is_an_empty_answer() -> None:
    assert dispatcher([]).dispatch(prompt_tokens=1, max_tokens=1).decode_workers == ()


# A block holds 16 tokens; the prompt has 16.
BOUNDS = {
    "fits": (2, 16, 2048, False),
    "one token too many": (2, 17, 2048, True),
    "no bound: all that the context holds": (2, None, 33, True),
    "no bound, and the context is short": (2, None, 32, False),
    "the context bounds what is asked for": (2, 5000, 32, False),
}


@pytest.mark.parametrize(("free", "max_tokens", "context", "over"), BOUNDS.values(), ids=BOUNDS.keys())
def test_room_is_for_the_prompt_and_the_whole_answer(
    free: int, max_tokens: int | None, context: int, over: bool
) -> None:
    one = dispatcher([report("a", free_kv_blocks=free)], max_model_len=context)
    assert one.dispatch(prompt_tokens=16, max_tokens=max_tokens).overcommitted is over


def test_what_was_just_placed_counts_before_any_report_shows_it() -> None:
    one = dispatcher([report("a", free_kv_blocks=8), report("b", free_kv_blocks=8)])
    chosen = [one.dispatch(prompt_tokens=16, max_tokens=16).decode_workers[0].pod for _ in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4
    assert one.dispatch(prompt_tokens=16, max_tokens=16).overcommitted
