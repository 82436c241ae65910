"""The operator ends after each step of a flip of real workers, under load; the next one finishes it, none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import traffic
from e2e.cluster.api import OPERATOR_NAMESPACE
from e2e.deployed import Deployed, Flip, Worker, until
from e2e.operator.installed import LEASE, lent_kubeconfig, stood_down
from e2e.operator.process import CRASH_POINTS, Operator
from e2e.tests.facts import role_and_epoch

OTHER = {"prefill": "decode", "decode": "prefill"}
FLIP_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def rights(chat: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The installed operator's rights, while it stands down."""
    folder = tmp_path_factory.mktemp("operators")
    kubeconfig = lent_kubeconfig(chat.cluster, folder)
    with stood_down(chat.cluster):
        yield kubeconfig


@pytest.fixture(scope="module")
def expected(chat: Deployed) -> dict[traffic.Prompt, str]:
    wanted = traffic.prompts(seed=5, count=8, characters=range(10, 300), max_tokens=16)
    worker = chat.workers()[0]
    return asyncio.run(traffic.references(chat.worker_url(worker), chat.served_name, wanted, chat.token()))


def operator_named(rights: Path, name: str) -> Operator:
    return Operator(rights, rights.parent, name, POD_NAMESPACE=OPERATOR_NAMESPACE, LEASE_NAME=LEASE)


def is_closed(chat: Deployed) -> bool:
    return not chat.status().get("activeFlips") and chat.is_ready()


def worker_of(chat: Deployed, name: str) -> Worker:
    return next(worker for worker in chat.workers() if worker.name == name)


def crash_and_go_on(chat: Deployed, rights: Path, step: str, worker: Worker) -> Flip:
    """One flip whose operator ends after `step`; another one takes over."""
    name = f"crash-{step.lower()}"
    with operator_named(rights, f"{step}-a") as first, operator_named(rights, f"{step}-b") as second:
        first.start(crash_after=step)
        until("the first to lead", first.leads, timeout_s=30, seen=first.log_tail)
        chat.ask_for_flip(name, worker.name, OTHER[worker.role])
        first.wait_crashed(FLIP_TIMEOUT_S)
        second.start()

        def finished() -> list[Flip]:
            return [flip for flip in chat.finished_flips() if flip.name == name]

        (flip,) = until(f"the end of {name}", finished, timeout_s=FLIP_TIMEOUT_S, seen=second.log_tail)
        until("the journal to be closed", lambda: is_closed(chat), timeout_s=30, seen=second.log_tail)
        assert second.stop() == 0, second.log_tail()
    return flip


@pytest.mark.parametrize("step", CRASH_POINTS)
def test_the_next_operator_finishes_the_flip(
    chat: Deployed, rights: Path, expected: dict[traffic.Prompt, str], step: str
) -> None:
    # The steps take turns with one worker: there and back again, so that the cluster ends as it began.
    before = worker_of(chat, chat.workers()[0].name)

    async def under_load() -> tuple[Flip, traffic.Tally]:
        async with traffic.Traffic(chat.gateway_url, chat.served_name, expected, concurrency=2) as load:
            flip = await asyncio.to_thread(crash_and_go_on, chat, rights, step, before)
        return flip, load.tally

    flip, tally = asyncio.run(under_load())

    after = worker_of(chat, before.name)
    assert flip.outcome == "Succeeded"
    assert (after.uid, after.role, after.epoch) == (before.uid, OTHER[before.role], before.epoch + 1)
    assert role_and_epoch(chat, after) == (after.role, after.epoch), "the labels are not what the worker is"
    assert len(chat.workers()) == 3
    assert (tally.lost, tally.changed) == (0, 0), tally.reasons
    assert tally.sent > 0
