"""A flip asked for by hand under load: both directions, in place, with no request lost or changed."""

from __future__ import annotations

import asyncio

import pytest

from e2e import traffic
from e2e.deployed import Deployed, Flip, Worker, until
from headrace_core.api import names

FLIP_TIMEOUT_S = 90.0


def one_of(deployed: Deployed, role: names.Role) -> Worker:
    return [worker for worker in deployed.workers() if worker.role == role][-1]


def flipped(deployed: Deployed, name: str, worker: Worker, pool: str) -> Flip:
    deployed.ask_for_flip(name, worker.name, pool)

    def finished() -> list[Flip]:
        return [flip for flip in deployed.finished_flips() if flip.name == name]

    return until(f"flip {name}", finished, timeout_s=FLIP_TIMEOUT_S, seen=deployed.in_words)[0]


@pytest.fixture(scope="module")
def expected(chat: Deployed) -> dict[traffic.Prompt, str]:
    wanted = traffic.prompts(seed=3, count=12, characters=range(10, 600), max_tokens=32)
    worker = chat.workers()[0]
    return asyncio.run(traffic.references(chat.worker_url(worker), chat.served_name, wanted, chat.token()))


def test_flips_under_load_lose_and_change_nothing(chat: Deployed, expected: dict[traffic.Prompt, str]) -> None:
    worker = one_of(chat, names.Role.PREFILL)
    boot = chat.worker_metric(worker, "process_start_time_seconds")

    async def flip_there_and_back() -> tuple[Flip, Worker, Flip, Worker, traffic.Tally]:
        async with traffic.Traffic(chat.gateway_url, chat.served_name, expected, concurrency=6) as load:
            await asyncio.sleep(2)
            there = await asyncio.to_thread(flipped, chat, "there", worker, "decode")
            as_decode = {w.name: w for w in chat.workers()}[worker.name]
            await asyncio.sleep(3)
            back = await asyncio.to_thread(flipped, chat, "back", worker, "prefill")
            as_prefill = {w.name: w for w in chat.workers()}[worker.name]
            await asyncio.sleep(2)
        return there, as_decode, back, as_prefill, load.tally

    there, as_decode, back, as_prefill, tally = asyncio.run(flip_there_and_back())

    assert (there.outcome, back.outcome) == ("Succeeded", "Succeeded")
    assert (as_decode.role, as_decode.pool, as_decode.epoch) == ("decode", "decode", worker.epoch + 1)
    assert (as_prefill.role, as_prefill.pool, as_prefill.epoch) == ("prefill", "prefill", worker.epoch + 2)
    assert as_prefill.uid == worker.uid, "the pod was replaced"
    assert chat.worker_metric(worker, "process_start_time_seconds") == boot, "the worker was restarted"
    assert there.switch_ms is not None
    assert there.switch_ms > 0
    assert (tally.lost, tally.changed) == (0, 0), tally.reasons
    assert tally.sent >= 10


def test_a_flip_below_the_minimum_is_refused(chat: Deployed) -> None:
    worker = one_of(chat, names.Role.DECODE)
    refused = flipped(chat, "too-few", worker, "prefill")
    assert refused.outcome == "Refused"
    assert one_of(chat, names.Role.DECODE).epoch == worker.epoch
