"""A deployed InferenceCluster answers like one worker alone, and its decode workers compute no prompts."""

from __future__ import annotations

import asyncio

import pytest

from e2e import traffic
from e2e.deployed import Deployed, Worker
from headrace_core.api import names

PROMPTS = traffic.prompts(seed=7, count=20, characters=range(1, 1460), max_tokens=24)
"""Text prompts of 1 to 1,459 tokens, chat prompts some twenty tokens longer (the template)."""

RECOMPUTED_TOKENS = 1
"""A decode worker computes the last prompt token again, to sample the first token from it."""


def of_role(deployed: Deployed, role: names.Role) -> list[Worker]:
    return [worker for worker in deployed.workers() if worker.role == role]


def counters(deployed: Deployed, role: names.Role, metric: str) -> float:
    return sum(deployed.worker_metric(worker, f"{metric}_total") for worker in of_role(deployed, role))


@pytest.fixture(scope="module")
def alone(chat: Deployed) -> dict[traffic.Prompt, str]:
    worker = of_role(chat, names.Role.DECODE)[0]
    return asyncio.run(traffic.references(chat.worker_url(worker), chat.served_name, PROMPTS, chat.token()))


def test_the_model_answers_differently_to_different_prompts(alone: dict[traffic.Prompt, str]) -> None:
    assert len(set(alone.values())) >= len(PROMPTS) - 2, "a model that says the same to all proves nothing"


def test_same_text_as_one_worker_alone(chat: Deployed, alone: dict[traffic.Prompt, str]) -> None:
    decoded = counters(chat, names.Role.DECODE, names.Metric.WORKER_PREFILLED_TOKENS)
    received = counters(chat, names.Role.DECODE, names.Metric.WORKER_KV_RECEIVES)

    async def ask_all() -> dict[traffic.Prompt, str]:
        async with traffic.client() as http:
            return {p: await traffic.ask(http, chat.gateway_url, chat.served_name, p) for p in PROMPTS}

    through_both = asyncio.run(ask_all())

    assert through_both == alone
    prefilled = counters(chat, names.Role.DECODE, names.Metric.WORKER_PREFILLED_TOKENS) - decoded
    assert prefilled <= RECOMPUTED_TOKENS * len(PROMPTS), "the decode worker computed prompts itself"
    pulls = counters(chat, names.Role.DECODE, names.Metric.WORKER_KV_RECEIVES) - received
    assert pulls >= sum(len(prompt.text) > 1 for prompt in PROMPTS), "KV did not come from the prefill worker"


def test_many_at_once_are_answered_alike(chat: Deployed, alone: dict[traffic.Prompt, str]) -> None:
    async def ask_at_once() -> traffic.Tally:
        async with traffic.Traffic(chat.gateway_url, chat.served_name, alone, concurrency=8) as load:
            await asyncio.sleep(5)
        return load.tally

    tally = asyncio.run(ask_at_once())
    assert tally.sent >= 8
    assert (tally.lost, tally.changed) == (0, 0), tally.reasons
