"""Real workers and the chart's operator while things fail: a worker dies, the API server restarts, Prometheus stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e import traffic
from e2e.cluster.api import Ability
from e2e.deployed import Deployed, Worker, until
from e2e.tests.facts import role_and_epoch
from headrace_core.api import names

RESTART_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def expected(chat: Deployed) -> dict[traffic.Prompt, str]:
    wanted = traffic.prompts(seed=11, count=6, characters=range(10, 200), max_tokens=8)
    worker = chat.workers()[0]
    return asyncio.run(traffic.references(chat.worker_url(worker), chat.served_name, wanted, chat.token()))


def ask_some(chat: Deployed, gateway_url: str, expected: dict[traffic.Prompt, str]) -> list[str]:
    """A few requests, one after the other; what went wrong with any of them."""

    async def ask() -> list[str]:
        wrong = []
        async with traffic.client() as http:
            for prompt, text in expected.items():
                try:
                    answer = await traffic.ask(http, gateway_url, chat.served_name, prompt)
                except traffic.LostError as lost:
                    wrong.append(f"lost: {lost}")
                else:
                    wrong += [] if answer == text else [f"changed: {answer!r} is not {text!r}"]
        return wrong

    return asyncio.run(ask())


def patch_spec(chat: Deployed, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    chat.cluster.kubectl("patch", names.Plural.CLUSTER, chat.name, "-n", chat.namespace, "--type=merge", "-p", patch)


def restarts(chat: Deployed, worker: Worker) -> int:
    pod = chat.cluster.get("pod", worker.name, namespace=chat.namespace)
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


@pytest.fixture
def watching_policy(chat: Deployed) -> Iterator[None]:
    """The policy runs, with windows short enough for a test."""
    patch_spec(chat, elasticity={"mode": "Auto", "interval": "2s", "flips": {"idleFor": "10s"}})
    yield
    patch_spec(chat, elasticity={"mode": "Off"})


@pytest.mark.needs(Ability.STOP_PROMETHEUS)
@pytest.mark.usefixtures("watching_policy")
def test_prometheus_stops_and_the_policy_holds(chat: Deployed) -> None:
    def degraded() -> dict[str, Any]:
        return chat.condition(names.Condition.DEGRADED)

    generation = chat.cluster.get(names.Plural.CLUSTER, chat.name, namespace=chat.namespace)["metadata"]["generation"]

    def knows() -> bool:
        now = degraded()
        return bool(now["observedGeneration"] == generation and now["status"] == "False")

    until("the policy to know", knows, timeout_s=90, seen=lambda: str(degraded()))
    flips = len(chat.ledger())
    with chat.cluster.held("prometheus"):  # type: ignore[attr-defined]
        until(
            "the operator to say that it holds",
            lambda: degraded()["reason"] == "MetricsUnknown" and "holds" in degraded()["message"],
            timeout_s=60,
            seen=lambda: str(degraded()),
        )
        assert chat.is_ready(), "workers do not depend on Prometheus"
    until("it to know again", knows, timeout_s=120, seen=lambda: str(degraded()))
    assert len(chat.ledger()) == flips, "a flip was begun on unknown metrics"


@pytest.mark.needs(Ability.RESTART_API_SERVER)
def test_the_api_server_restarts_and_nobody_notices(chat: Deployed, expected: dict[traffic.Prompt, str]) -> None:
    pods = {worker.uid for worker in chat.workers()}
    gateway_url = chat.gateway_url
    with chat.cluster.held("kube-apiserver"):  # type: ignore[attr-defined]
        wrong = ask_some(chat, gateway_url, expected)
    chat.cluster.wait_for_apiserver()  # type: ignore[attr-defined]
    assert not wrong
    worker = next(one for one in chat.workers() if one.role == "prefill")
    chat.ask_for_flip("after-restart", worker.name, "decode")
    until("a flip", lambda: finished(chat, "after-restart"), timeout_s=90, seen=chat.in_words)
    chat.ask_for_flip("after-restart-back", worker.name, "prefill")
    until("its return", lambda: finished(chat, "after-restart-back"), timeout_s=90, seen=chat.in_words)
    assert {one.uid for one in chat.workers()} == pods


def finished(chat: Deployed, name: str) -> bool:
    return [flip.outcome for flip in chat.finished_flips() if flip.name == name] == ["Succeeded"]


@pytest.mark.needs(Ability.NODE_FAULTS)
def test_a_worker_dies_and_comes_back(chat: Deployed, expected: dict[traffic.Prompt, str]) -> None:
    worker = next(one for one in chat.workers() if one.role == "prefill")
    before = restarts(chat, worker)
    chat.cluster.faults.kill_container(chat.namespace, worker.name, names.CONTAINER_WORKER)  # type: ignore[attr-defined]

    assert not ask_some(chat, chat.gateway_url, expected)

    def is_back() -> bool:
        return restarts(chat, worker) == before + 1 and chat.is_ready()

    until("the worker to be back", is_back, timeout_s=RESTART_TIMEOUT_S, seen=chat.in_words)
    after = next(one for one in chat.workers() if one.name == worker.name)
    assert after.uid == worker.uid
    assert role_and_epoch(chat, after) == (after.role, after.epoch), "the labels are not what the worker is"
    assert not ask_some(chat, chat.gateway_url, expected)
