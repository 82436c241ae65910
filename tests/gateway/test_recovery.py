"""What becomes of a request when a worker refuses, dies, falls silent or loses its KV, and of the KV nobody fetches."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from headrace_core.api.names import Role
from headrace_gateway.registry import Standing
from tests.gateway.fakes import (
    Behaviour,
    FakeWorker,
    after,
    answer_error,
    before,
    break_off,
    decode_answer,
    decoder,
    eventually,
    hang,
    prefill,
    prefill_answer,
    refuse,
    stage,
    stream_bytes,
    stream_error,
)

RETRIED = "headrace_gateway_retried_requests_total"
LOST = "headrace_gateway_lost_requests_total"


@dataclass
class Case:
    """Scripts by pod (used up, then all is well), and how often each pod must have been asked."""

    name: str
    scripts: dict[str, list[Behaviour]]
    asked: dict[str, int]
    released: int = 0
    """Hand-offs given up at p0."""
    retried: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=lambda: ["d0", "d1"])


MENDED = [
    Case("prefill refuses", {"p0": [refuse()]}, {"p0": 1, "p1": 1, "d0": 1}, retried={"refused": 1}),
    Case("both refuse once", {"p0": [refuse()], "p1": [refuse()]}, {"d0": 1}, retried={"refused": 2}),
    Case("prefill breaks off", {"p0": [break_off()]}, {"p0": 1, "p1": 1}, retried={"worker_lost": 1}),
    Case("prefill fails", {"p0": [answer_error(500, 500)]}, {"p0": 1, "p1": 1}, retried={"worker_lost": 1}),
    Case("prefill is starting", {"p0": [answer_error(503, "starting")]}, {"p0": 1, "p1": 1}),
    Case("prefill wants another token", {"p0": [answer_error(401, "unauthorized")]}, {"p0": 1, "p1": 1}),
    Case("prefill holds no KV", {"p0": [prefill_answer(kv_transfer_params=None)]}, {"p0": 1, "p1": 1}),
    Case("prefill answers without hand-off", {"p0": [prefill_answer(headrace=None)]}, {"p0": 1, "p1": 1}),
    Case(
        "dispatcher knows nobody",
        {"p0": [prefill_answer(headrace={"decode_workers": []})]},
        {"d0": 1},
        released=1,
        retried={"no_decode_worker": 1},
    ),
    Case("decode refuses: the next has the same KV", {"d0": [refuse()]}, {"p0": 1, "p1": 0, "d0": 1, "d1": 1}),
    Case(
        "all decode workers refuse",
        {"d0": [refuse()], "d1": [refuse()]},
        {"d0": 2, "d1": 1},
        released=1,
        retried={"no_decode_worker": 1},
    ),
    Case(
        "KV transfer fails: prefill again, elsewhere",
        {"d0": [answer_error(502, "kv_transfer_failed")]},
        {"p0": 1, "p1": 1, "d0": 2},
        released=1,
        retried={"kv_unavailable": 1},
    ),
    Case("decode breaks off", {"d0": [break_off()]}, {"p0": 2}, released=1, retried={"worker_lost": 1}),
    Case("decode fails", {"d0": [answer_error(500, 500)]}, {"p0": 2}, released=1, retried={"worker_lost": 1}),
]

MENDED_STREAMS = [
    Case("stream breaks off before an event", {"d0": [break_off(b"data: {")]}, {"p0": 2}, released=1),
    Case("error 500 as first event", {"d0": [stream_error(500)]}, {"p0": 2}, released=1),
    Case("KV lost as first event", {"d0": [stream_error("kv_transfer_failed")]}, {"p0": 1, "p1": 1}, released=1),
    Case("refusal as first event", {"d0": [stream_error("try_another")]}, {"p0": 1, "d0": 1, "d1": 1}),
]


def _workers(case: Case) -> list[FakeWorker]:
    return [
        *(prefill(pod, *case.scripts.get(pod, []), decode_order=case.order) for pod in ("p0", "p1")),
        *(decoder(pod, *case.scripts.get(pod, [])) for pod in ("d0", "d1")),
    ]


@pytest.mark.parametrize("case", [*MENDED, *MENDED_STREAMS], ids=lambda case: case.name)
async def test_client_sees_nothing_of_it(case: Case) -> None:
    stream = case in MENDED_STREAMS
    async with stage(*_workers(case)) as it:
        if stream:
            assert await it.stream() == (200, stream_bytes())
        else:
            status, body, _ = await it.complete()
            assert (status, body.get("choices", body)) == (200, [{"index": 0, "text": "abc"}])
        await it.instance.gateway.pipeline.releases.drain(1.0)
        assert {pod: len(it[pod].seen) for pod in case.asked} == case.asked
        assert len(it["p0"].released) == case.released
        for released in it["p0"].released:
            assert released["remote_engine_id"] == "p0"
        for reason, count in case.retried.items():
            assert await it.metric(RETRIED, reason=reason) == count
        assert await it.metric(LOST) == 0


PASSED = [
    ("prefill", "p0", answer_error(400, 400, param="max_tokens"), 400, 0),
    ("prefill too long", "p0", answer_error(422, 422), 422, 0),
    ("decode", "d0", answer_error(400, 400, param="stop"), 400, 1),
    ("decode, first event", "d0", stream_error(400), 400, 1),
]


@pytest.mark.parametrize(("name", "pod", "behaviour", "status", "released"), PASSED, ids=[case[0] for case in PASSED])
async def test_client_s_own_fault_passes_through(
    name: str, pod: str, behaviour: Behaviour, status: int, released: int
) -> None:
    async with stage(*_workers(Case(name, {pod: [behaviour]}, {}))) as it:
        got, body = await it.stream()
        assert got == status
        assert json.loads(body)["error"]["code"] == status
        await it.instance.gateway.pipeline.releases.drain(1.0)
        assert len(it["p0"].released) == released
        assert await it.metric(LOST) == 0
        assert await it.metric(RETRIED) == 0


async def test_dead_prefill_worker_is_passed_over() -> None:
    async with stage() as it:
        await it["p0"].die()
        for _ in range(3):
            assert (await it.complete())[0] == 200
        assert len(it["p1"].seen) == 3


async def test_dead_decode_worker_is_passed_over_with_the_same_kv() -> None:
    async with stage() as it:
        await it["d0"].die()
        assert (await it.complete())[0] == 200
        assert len(it["p0"].bodies("prefill")) == 1
        assert not it["p0"].released


async def test_request_waits_out_a_moment_in_which_nobody_accepts() -> None:
    async with stage(prefill("p0"), decoder("d0"), worker_wait_s=3.0) as it:
        it["p0"].accepting = False
        await eventually(lambda: it.standing("p0") is Standing.DRAINING)
        task = asyncio.create_task(it.complete())
        await asyncio.sleep(0.6)
        assert not task.done()
        it["p0"].accepting = True
        status, _, _ = await task
        assert status == 200
        assert await it.metric(LOST) == 0


async def test_flip_under_load_loses_nothing() -> None:
    """Each refuses at once and tells so in its next report only: the race of every drain."""
    async with stage(worker_wait_s=3.0) as it:

        def drain_and_flip(worker: FakeWorker) -> None:
            worker.prefills[:] = [refuse()] * 100
            worker.decodes[:] = [refuse()] * 100
            asyncio.get_running_loop().call_later(0.03, setattr, worker, "accepting", False)
            asyncio.get_running_loop().call_later(0.3, finish, worker)

        def finish(worker: FakeWorker) -> None:
            worker.role = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
            worker.prefills, worker.decodes, worker.epoch, worker.accepting = [], [], worker.epoch + 1, True

        async def load() -> list[int]:
            return [(await it.complete())[0] for _ in range(25)]

        tasks = [asyncio.create_task(load()) for _ in range(8)]
        await asyncio.sleep(0.1)
        drain_and_flip(it["p1"])
        await asyncio.sleep(0.5)
        drain_and_flip(it["d0"])
        statuses = [status for each in await asyncio.gather(*tasks) for status in each]
        assert statuses == [200] * 200
        assert await it.metric(RETRIED) > 0


@pytest.mark.parametrize(("role", "word"), [(Role.PREFILL, "prefill"), (Role.DECODE, "decode")])
async def test_no_worker_of_a_role_gives_503_after_the_wait(role: Role, word: str) -> None:
    async with stage(prefill("p0"), decoder("d0"), worker_wait_s=0.3) as it:
        pod = "p0" if role is Role.PREFILL else "d0"
        it[pod].accepting = False
        await eventually(lambda: it.standing(pod) is Standing.DRAINING)
        begun = asyncio.get_running_loop().time()
        status, body, headers = await it.complete()
        waited = asyncio.get_running_loop().time() - begun
        assert (status, body["error"]["code"]) == (503, "no_workers")
        assert word in body["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        assert 0.3 <= waited < 1.5
        assert not it["p0"].seen, "prefill for nothing"
        assert await it.metric(LOST, reason="out_of_patience") == 1


async def test_failures_end_with_502_after_so_many_attempts() -> None:
    workers = [prefill("p0", *[answer_error(500, 500)] * 9), decoder("d0")]
    async with stage(*workers, max_attempts=3, worker_wait_s=5.0) as it:
        status, body, _ = await it.complete()
        assert (status, body["error"]["code"]) == (502, "internal_error")
        assert len(it["p0"].seen) == 3
        assert await it.metric(LOST, reason="out_of_attempts") == 1


async def test_old_kv_is_not_handed_off() -> None:
    """The first decode worker takes its time to refuse: by then the KV is too old for the second."""
    workers = [
        prefill("p0", decode_order=["d0", "d1"]),
        decoder("d0", after(0.3, refuse())),
        decoder("d1"),
    ]
    async with stage(*workers, handoff_max_age_s=0.2) as it:
        assert (await it.complete())[0] == 200
        await it.instance.gateway.pipeline.releases.drain(1.0)
        assert len(it["p0"].seen) == 2
        assert it["p0"].released == [{"remote_engine_id": "p0", "remote_request": 1}]
        assert not [b for b in it["d1"].bodies("decode") if b["kv_transfer_params"]["remote_request"] == 1]
        assert await it.metric(RETRIED, reason="kv_unavailable") == 1


@pytest.mark.parametrize("frozen", ["p0", "d0"])
async def test_frozen_worker_is_suspect_then_out_and_its_requests_go_elsewhere(frozen: str) -> None:
    workers = [
        *(prefill(pod, *([hang()] if pod == frozen else [])) for pod in ("p0", "p1")),
        *(decoder(pod, *([hang()] if pod == frozen else [])) for pod in ("d0", "d1")),
    ]
    bounds: dict[str, Any] = {"suspect_after_s": 0.3, "out_after_s": 0.6, "abandon_after_s": 0.9}
    async with stage(*workers, worker_wait_s=3.0, **bounds) as it:
        task = asyncio.create_task(it.complete())
        await eventually(lambda: it[frozen].seen)
        it[frozen].silent = True
        await eventually(lambda: it.standing(frozen) is Standing.SUSPECT)
        await eventually(lambda: frozen not in {r.pod for r in it["p0"].peers.decode if r.accepting})
        assert (await it.complete())[0] == 200
        assert len(it[frozen].seen) == 1, "chosen although suspect"
        await eventually(lambda: it.standing(frozen) is Standing.OUT)
        assert not task.done()
        assert (await task)[0] == 200
        assert await it.metric(RETRIED, reason="worker_lost") == 1


async def test_stream_that_breaks_later_ends_with_an_error_event_and_counts_as_lost() -> None:
    whole, part = b'data: {"choices":[]}\n\n', b'data: {"cho'
    async with stage(prefill("p0"), decoder("d0", break_off(whole + part))) as it:
        status, body = await it.stream()
        assert status == 200
        events = body.split(b"\n\n")
        assert events[0] == whole.strip()
        assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "stream_broken"
        assert events[2:] == [b"data: [DONE]", b""]
        assert await it.metric(LOST, reason="stream_broken") == 1


async def test_worker_s_own_error_event_is_passed_once_and_counts_as_lost() -> None:
    data = b'data: {"choices":[]}\n\ndata: {"error":{"message":"engine","code":500}}\n\ndata: [DONE]\n\n'

    async def behave(worker: FakeWorker, request: Any, body: Any) -> Any:
        return web.Response(body=data, headers={"Content-Type": "text/event-stream"})

    async with stage(prefill("p0"), decoder("d0", behave)) as it:
        assert await it.stream() == (200, data)
        assert await it.metric(LOST, reason="stream_broken") == 1


async def test_stream_that_just_ends_counts_as_lost() -> None:
    async def behave(worker: FakeWorker, request: Any, body: Any) -> Any:
        return web.Response(body=b'data: {"choices":[]}\n\n', headers={"Content-Type": "text/event-stream"})

    async with stage(prefill("p0"), decoder("d0", behave)) as it:
        status, body = await it.stream()
        assert status == 200
        assert b"stream_broken" in body
        assert await it.metric(LOST, reason="stream_broken") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_while_decode_waits_cancels_it_and_frees_the_kv(stream: bool) -> None:
    async with stage(prefill("p0"), decoder("d0", hang())) as it:
        task = asyncio.create_task(it.complete(stream=stream))
        await eventually(lambda: it["d0"].seen)
        task.cancel()
        await eventually(lambda: it["d0"].disconnected, 1.0)
        await eventually(lambda: it["p0"].released == [{"remote_engine_id": "p0", "remote_request": 1}], 1.0)
        await eventually(lambda: it.instance.gateway.admission.in_flight == 0)
        total = "headrace_gateway_requests_total"
        assert await it.metric(total, endpoint="/v1/completions", code="499") == 1
        assert await it.metric(LOST) == 0


async def test_client_that_leaves_during_prefill_cancels_it() -> None:
    async with stage(prefill("p0", hang()), decoder("d0")) as it:
        task = asyncio.create_task(it.complete())
        await eventually(lambda: it["p0"].seen)
        task.cancel()
        await eventually(lambda: it["p0"].disconnected, 1.0)
        assert not it["d0"].seen


async def test_client_that_leaves_mid_stream_cancels_it_and_releases_nothing() -> None:
    async with stage(prefill("p0"), decoder("d0", decode_answer("a" * 500, gap_s=0.01))) as it:
        async with it.post({"prompt": "abc", "stream": True}) as response:
            await response.content.readline()
        await eventually(lambda: it["d0"].disconnected, 1.0)
        await eventually(lambda: it.instance.gateway.admission.in_flight == 0)
        assert not it["p0"].released
        assert await it.metric(LOST) == 0


async def test_release_is_tried_again() -> None:
    async with stage(prefill("p0", failing_releases=1), decoder("d0", answer_error(400, 400))) as it:
        await it.complete()
        await eventually(lambda: it["p0"].released, 2.0)
        assert it["p0"].failing_releases == 0


async def test_worker_that_failed_a_request_comes_last_for_it_although_it_reports_on() -> None:
    workers = [prefill("p0", answer_error(500, 500)), prefill("p1", after(0.15, answer_error(500, 500))), prefill("p2")]
    async with stage(*workers, decoder("d0")) as it:
        assert (await it.complete())[0] == 200
        assert [len(it[pod].seen) for pod in ("p0", "p1", "p2")] == [1, 1, 1]


async def test_draining_worker_finishes_what_it_has() -> None:
    async with stage(prefill("p0", before(lambda: None, after(0.3, prefill_answer()))), decoder("d0")) as it:
        task = asyncio.create_task(it.complete())
        await eventually(lambda: it["p0"].seen)
        it["p0"].accepting = False
        assert (await task)[0] == 200
