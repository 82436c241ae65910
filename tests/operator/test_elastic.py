"""When the policy runs, what it is told, and how its decision is published: Auto asks, Advise tells, unknown holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from headrace_core.api.names import Reason
from headrace_operator.elastic import Elastic, elasticity_view
from headrace_operator.errors import PrometheusError
from headrace_operator.metrics import Metrics
from headrace_operator.plan.actions import CreateFlip
from headrace_operator.plan.view import Observed
from headrace_operator.prometheus import Load, Prometheus
from tests.operator.builders import NOW, World, draining, entry, flip, pod

PODS = (pod(0), pod(1), pod(2, "decode"))
IDLE_PREFILL = {"chat-w0": 0.0, "chat-w1": 0.5, "chat-w2": 0.9}


@dataclass
class FakePrometheus:
    """Answers with given loads, or not at all."""

    shares: Mapping[str, float] = field(default_factory=lambda: IDLE_PREFILL)
    age_s: float = 3.0
    fails: bool = False
    configured: bool = True

    async def loads(self, *_: object) -> dict[str, Load]:
        if self.fails:
            raise PrometheusError("Prometheus: 503")
        return {name: Load(busy_share=share, age_s=self.age_s) for name, share in self.shares.items()}


@dataclass
class FakeRecorder:
    said: list[tuple[Reason, str]] = field(default_factory=list)

    async def record(self, _: object, reason: Reason, note: str, *, warning: bool = False) -> None:
        self.said.append((reason, note))


def elastic(**prometheus: Any) -> tuple[Elastic, FakeRecorder]:
    recorder = FakeRecorder()
    made = Elastic(FakePrometheus(**prometheus), recorder, Metrics(), 60.0)  # type: ignore[arg-type]
    return made, recorder


def look(at: float = NOW, **rules: Any) -> Observed:
    return World().with_pods(*PODS).with_rules(**rules).at(at).look()


async def test_auto_asks_for_the_flip_with_its_reason() -> None:
    made, _ = elastic()
    action = await made.decide(look())
    assert isinstance(action, CreateFlip)
    assert (action.pod, action.to_pool) == ("chat-w0", "decode")
    assert action.reason.startswith("IdleWorker: chat-w0 was busy 0")


async def test_advise_tells_once_and_asks_for_nothing() -> None:
    made, recorder = elastic()
    for minute in range(3):
        assert await made.decide(look(NOW + 60 * minute, automatic=False, advised=True)) is None
    assert [reason for reason, _ in recorder.said] == [Reason.FLIP_ADVISED]
    assert "chat-w0" in made.advice(look(automatic=False, advised=True)).would


@pytest.mark.parametrize("rules", [{"automatic": False, "advised": False}, {"allowed": False}])
async def test_off_or_forbidden_it_does_not_run(rules: dict[str, bool]) -> None:
    made, _ = elastic()
    assert made.due_in(look(**rules)) is None
    assert await made.decide(look(**rules)) is None


async def test_it_decides_at_its_interval() -> None:
    made, _ = elastic(shares=dict.fromkeys(IDLE_PREFILL, 0.5))
    assert made.due_in(look()) == 0
    await made.decide(look())
    assert made.due_in(look(NOW + 5)) == 10


HOLDS: dict[str, tuple[dict[str, Any], str]] = {
    "no answer": ({"fails": True}, "Prometheus: 503"),
    "not configured": ({"configured": False}, "PROMETHEUS_URL"),
    "stale": ({"age_s": 61.0}, "older than 60 s"),
}


@pytest.mark.parametrize("case", HOLDS)
async def test_unknown_holds_and_says_why(case: str) -> None:
    prometheus, words = HOLDS[case]
    made, recorder = elastic(**prometheus)
    assert await made.decide(look()) is None
    assert words in made.advice(look()).hold
    assert recorder.said[0][0] is Reason.METRICS_UNKNOWN


async def test_a_worker_without_samples_holds_and_is_no_fault_at_first() -> None:
    made, recorder = elastic(shares={"chat-w0": 0.0, "chat-w2": 0.9})
    assert await made.decide(look()) is None
    assert made.advice(look()).hold == ""
    assert await made.decide(look(NOW + 121)) is None
    assert "chat-w1" in made.advice(look(NOW + 121)).hold
    assert recorder.said == [] or recorder.said[0][0] is Reason.METRICS_UNKNOWN


async def test_the_fault_ends_when_the_loads_are_known() -> None:
    made, _ = elastic(fails=True)
    await made.decide(look())
    made.prometheus.fails = False  # type: ignore[attr-defined]
    await made.decide(look(NOW + 60))
    assert made.advice(look(NOW + 60)).hold == ""


def test_the_view_tells_what_is_under_way() -> None:
    observed = (
        World()
        .with_pods(draining(0), pod(1), pod(2, "decode"))
        .with_journal(entry())
        .with_flips(flip("old", 1, outcome="Succeeded", finished=NOW - 10))
        .look()
    )
    view = elasticity_view(observed, {"chat-w1": Load(busy_share=0.2, age_s=1)})
    prefill, decode = view.pools
    assert [(w.pod, w.busy_share, w.flipping, w.cooling) for w in prefill.workers] == [
        ("chat-w0", None, True, False),
        ("chat-w1", 0.2, False, True),
    ]
    assert (decode.arriving, view.flips_under_way) == (1, 1)


def prometheus_with(answers: list[Any]) -> Prometheus:
    asked = Prometheus("http://prometheus", 1)
    replies = iter(answers)

    def reply(_: httpx.Request) -> httpx.Response:
        answer = next(replies)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    asked._http = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    return asked


def vector(**values: float) -> dict[str, Any]:
    result = [{"metric": {"pod": pod.replace("_", "-")}, "value": [0, str(value)]} for pod, value in values.items()]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


async def test_only_workers_known_for_the_whole_window_have_a_load() -> None:
    asked = prometheus_with([vector(a=0.5, b=1.01, new=0.1), vector(a=1, b=2, new=1), vector(a=10, b=9)])
    loads = await asked.loads("llm", "chat", 60)
    assert loads == {"a": Load(busy_share=0.5, age_s=1), "b": Load(busy_share=1.0, age_s=2)}


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503, text="away"),
        {"status": "error", "error": "bad query"},
        {"status": "success", "data": {"result": [{"metric": {"pod": "a"}, "value": ["x"]}]}},
        [],
    ],
)
async def test_a_bad_answer_is_an_error_of_its_own(answer: Any) -> None:
    with pytest.raises(PrometheusError):
        await prometheus_with([answer]).loads("llm", "chat", 60)
