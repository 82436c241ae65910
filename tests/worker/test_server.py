"""The worker's calls: who may, what goes on to vLLM, and what comes back.

What depends on HTTP itself (streams, long bodies, clients that go away) runs over a real server: the fixture `real`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_core.api.names import Role
from headrace_core.api.wire import HandoffAnswer, LoadReport, Peers
from headrace_worker.errors import StartError
from headrace_worker.main import first_pass
from tests.worker.fakes import ERROR, KV, ROLE_EVENT, TEXT_EVENT, FakeVllm, Rig, calling, report, serving, sse, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with calling() as instance:
        yield instance


@pytest.fixture
async def real() -> AsyncIterator[Rig]:
    async with serving() as instance:
        yield instance


def handoff(role: str = "prefill", epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {"request_id": "r", "expected_role": role, "expected_epoch": epoch, **more}


def code(answer: httpx.Response) -> tuple[int, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


# --- who may call, and what ----------------------------------------------------------------------------------------

GUARDED = [
    ("POST", TEXT), ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/pd_role"), ("POST", "/v1/pd_role"),
    ("GET", "/v1/load"), ("PUT", "/v1/peers"), ("POST", "/v1/release"), ("GET", "/docs"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_without_a_token_nothing_is_done(tmp_path: Path, method: str, path: str) -> None:
    file = tmp_path / "token"
    file.write_text("t1\nt2\n")
    async with calling(token_file=str(file)) as rig:
        for headers in ({}, {"Authorization": "Bearer nope"}):
            answer = await rig.http.request(method, path, headers=headers, json={"prompt": "x"})
            assert code(answer) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert rig.vllm.bodies == []


async def test_probes_and_metrics_need_no_token_and_any_line_opens_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t1\nt2\n")
    async with calling(token_file=str(file)) as rig:
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await rig.http.get(path)).status_code == 200
        answer = await rig.http.post(TEXT, json={"prompt": "x"}, headers={"Authorization": "Bearer t2"})
        assert answer.status_code == 200


async def test_what_is_not_offered_is_not_there(rig: Rig) -> None:
    for path in ("/docs", "/v1/responses", "/health", "/metrics/x", "/"):
        assert code(await rig.http.get(path)) == (404, None)


async def test_another_method_is_told_the_right_one(rig: Rig) -> None:
    answer = await rig.http.get(TEXT)
    assert code(answer) == (405, None)
    assert answer.headers["allow"] == "POST"
    assert (await rig.http.delete("/v1/pd_role")).headers["allow"] == "GET, POST"


async def test_a_long_body_is_refused_whether_announced_or_not(real: Rig) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    for path in (TEXT, "/v1/pd_role", "/v1/release"):
        assert code(await real.http.post(path, content=b"x" * 2001)) == (413, "body_too_large")
        assert code(await real.http.post(path, content=pieces())) == (413, "body_too_large")
    assert real.vllm.bodies == []
    assert real.worker.door.in_flight == 0


# --- work ----------------------------------------------------------------------------------------------------------


async def test_without_a_hand_off_the_body_goes_through_to_the_last_byte(real: Rig) -> None:
    raw = b'{ "prompt" : "\\u00e9 x",\n "max_tokens": 3 }'
    answer = await real.http.post(TEXT, content=raw)
    assert real.vllm.raw == [raw]
    assert answer.json() == real.vllm.answer


async def test_vllm_never_sees_the_hand_off(rig: Rig) -> None:
    await rig.http.post(TEXT, json={"prompt": "headrace", "max_tokens": 1, "headrace": handoff()})
    assert rig.vllm.bodies == [{"prompt": "headrace", "max_tokens": 1}]


TRY_ANOTHER = {
    "another role": handoff("decode"),
    "another epoch": handoff(epoch=1),
}


@pytest.mark.parametrize("given", TRY_ANOTHER.values(), ids=TRY_ANOTHER.keys())
async def test_what_is_meant_for_another_is_sent_there(rig: Rig, given: dict[str, Any]) -> None:
    assert code(await rig.http.post(TEXT, json={"prompt": "x", "headrace": given})) == (503, "try_another")
    assert rig.vllm.bodies == []
    assert 'headrace_worker_refused_requests_total{reason="' in (await rig.http.get("/metrics")).text


BAD_BODIES = {
    "no JSON": (b'{"headrace": ', None),
    "no object": (b'["headrace"]', None),
    "no role": (json.dumps({"headrace": {"request_id": "r", "expected_epoch": 0}}).encode(), "headrace.expected_role"),
    "a bad epoch": (json.dumps({"headrace": handoff(epoch=-1)}).encode(), "headrace.expected_epoch"),
    "nothing": (b'{"headrace": null}', "headrace"),
}


@pytest.mark.parametrize(("body", "param"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_malformed_hand_off_is_refused_with_its_field(rig: Rig, body: bytes, param: str | None) -> None:
    answer = await rig.http.post(TEXT, content=body)
    assert code(answer) == (400, None)
    assert answer.json()["error"]["param"] == param
    assert rig.vllm.bodies == []


async def test_a_prefill_answer_names_the_decode_workers(rig: Rig) -> None:
    await rig.http.put("/v1/peers", content=Peers(decode=(report("d0", epoch=2),)).model_dump_json())
    answer = await rig.http.post(TEXT, json={"prompt": "x", "headrace": handoff(max_tokens=5)})
    told = HandoffAnswer.model_validate(answer.json()["headrace"])
    assert [(ref.pod, ref.epoch) for ref in told.decode_workers] == [("d0", 2)]
    assert (told.prompt_tokens, told.overcommitted) == (7, False)
    assert answer.json()["kv_transfer_params"] == KV
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_the_answer_of_an_aborted_prefill_goes_through(rig: Rig) -> None:
    rig.vllm.answer = {"choices": [], "usage": None}
    answer = await rig.http.post(TEXT, json={"prompt": "x", "headrace": handoff()})
    assert (answer.status_code, answer.json()) == (200, rig.vllm.answer)


async def test_the_dispatcher_counts_the_tokens_that_the_client_allows(rig: Rig) -> None:
    # 7 prompt tokens and a block of 16: 9 more fit.
    await rig.http.put("/v1/peers", content=Peers(decode=(report("d0", free_kv_blocks=1),)).model_dump_json())
    for max_tokens, over in ((9, False), (10, True), (None, True)):
        body = {"prompt": "x", "max_tokens": 1, "headrace": handoff(max_tokens=max_tokens)}
        answer = await rig.http.post(TEXT, json=body)
        assert answer.json()["headrace"]["overcommitted"] is over
        await rig.http.put("/v1/peers", content=b'{"decode": []}')
        fresh = Peers(decode=(report("d0", free_kv_blocks=1, boot_id=f"b{max_tokens}"),))
        await rig.http.put("/v1/peers", content=fresh.model_dump_json())


async def test_an_error_of_vllm_in_a_prefill_goes_through(rig: Rig) -> None:
    rig.vllm.status, rig.vllm.answer = 400, {"error": {"message": "too long", "code": 400}}
    answer = await rig.http.post(TEXT, json={"prompt": "x", "headrace": handoff()})
    assert (answer.status_code, answer.json()) == (400, rig.vllm.answer)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("with_kv", [True, False])
async def test_a_stream_goes_through_chunk_by_chunk(path: str, with_kv: bool) -> None:
    async with serving(role=Role.DECODE) as rig:
        rig.vllm.chunks = sse(ROLE_EVENT, TEXT_EVENT, TEXT_EVENT, "[DONE]")
        seen: list[bytes] = []
        arrived = asyncio.Event()

        async def wait_until_seen(number: int) -> None:
            # Each chunk waits until the one before has reached the client; with KV to fetch, chat's first may wait.
            most_held = 1 if path == CHAT and with_kv else 0
            while number > len(seen) + most_held:
                arrived.clear()
                async with asyncio.timeout(10):
                    await arrived.wait()

        rig.vllm.goes_on = wait_until_seen
        body: dict[str, Any] = {"stream": True, "headrace": handoff("decode")}
        if with_kv:
            body["kv_transfer_params"] = KV
        async with rig.http.stream("POST", path, json=body) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            assert rig.worker.door.in_flight == 1
            async for chunk in answer.aiter_raw():
                seen += [part + b"\n\n" for part in chunk.split(b"\n\n") if part]
                arrived.set()
        assert seen == rig.vllm.chunks
        await until(lambda: rig.worker.door.in_flight == 0)


KV_FAILURES = {
    "whole answer": (TEXT, False, None),
    "text stream": (TEXT, True, [ERROR, "[DONE]"]),
    "chat stream, after the role": (CHAT, True, [ROLE_EVENT, ERROR, "[DONE]"]),
    "chat stream, at once": (CHAT, True, [ERROR, "[DONE]"]),
}


@pytest.mark.parametrize(("path", "stream", "events"), KV_FAILURES.values(), ids=KV_FAILURES.keys())
@pytest.mark.parametrize("counted", [True, False], ids=["kv failed", "something else failed"])
async def test_kv_that_could_not_be_fetched_has_a_code_of_its_own(
    path: str, stream: bool, events: list[Any] | None, counted: bool
) -> None:
    async with serving(role=Role.DECODE) as rig:
        rig.vllm.status, rig.vllm.answer = 500, ERROR
        rig.vllm.chunks = sse(*(events or []))
        rig.vllm.may_answer.clear()
        body = {"stream": stream, "kv_transfer_params": KV, "headrace": handoff("decode")}
        asked = asyncio.create_task(rig.http.post(path, json=body))
        await rig.vllm.entered.wait()
        if counted:
            rig.engine.set(kv_receive_failures=1)
        rig.vllm.may_answer.set()
        answer = await asked
        if counted:
            assert code(answer) == (502, "kv_transfer_failed")
        elif stream:
            assert (answer.status_code, answer.content) == (200, b"".join(rig.vllm.chunks))
        else:
            assert (answer.status_code, answer.json()) == (500, ERROR)
        assert rig.worker.door.in_flight == 0


async def test_an_error_after_the_first_token_stays_in_the_stream() -> None:
    async with serving(role=Role.DECODE) as rig:
        rig.vllm.chunks = sse(TEXT_EVENT, ERROR, "[DONE]")
        rig.vllm.may_answer.clear()
        body = {"stream": True, "kv_transfer_params": KV, "headrace": handoff("decode")}
        asked = asyncio.create_task(rig.http.post(TEXT, json=body))
        await rig.vllm.entered.wait()
        rig.engine.set(kv_receive_failures=1)
        rig.vllm.may_answer.set()
        answer = await asked
        assert (answer.status_code, answer.content) == (200, b"".join(rig.vllm.chunks))


async def test_a_client_that_goes_away_ends_its_request(real: Rig) -> None:
    real.vllm.may_answer.clear()
    asked = asyncio.create_task(real.http.post(TEXT, json={"prompt": "x", "headrace": handoff()}))
    await real.vllm.entered.wait()
    assert real.worker.door.in_flight == 1
    asked.cancel()
    await asyncio.wait_for(real.vllm.disconnected.wait(), 2)
    await until(lambda: real.worker.door.in_flight == 0)


# --- the role ------------------------------------------------------------------------------------------------------


async def test_a_flip_over_http(real: Rig) -> None:
    real.vllm.may_answer.clear()
    inside = asyncio.create_task(real.http.post(TEXT, json={"prompt": "x", "headrace": handoff()}))
    await real.vllm.entered.wait()
    begun = await real.flip(pod_uid="uid-0", boot_id=(await real.role())["boot_id"], fence=3)
    assert (begun.status_code, begun.json()["phase"], begun.json()["target_role"]) == (202, "draining", "decode")
    assert begun.json()["draining_requests"] == 1
    # New work is refused whatever it expects, the repeat is not, and the old work goes on.
    for body in ({"prompt": "x"}, {"prompt": "x", "headrace": handoff()}, {"headrace": handoff("decode", 1)}):
        assert code(await real.http.post(TEXT, json=body)) == (503, "try_another")
    assert (await real.flip(fence=3)).status_code == 202
    assert code(await real.flip("prefill", fence=3)) == (409, "role_change_under_way")
    assert real.engine.switches == []
    real.vllm.may_answer.set()
    assert (await inside).status_code == 200
    await until(lambda: real.worker.door.standing.accepts)
    after = await real.role()
    assert (after["role"], after["epoch"], after["phase"]) == ("decode", 1, "ready")
    assert after["last_switch"]["outcome"] == "Succeeded"
    assert (await real.http.post(TEXT, json={"headrace": handoff("decode", 1)})).status_code == 200
    assert code(await real.http.post(TEXT, json={"headrace": handoff("decode", 0)})) == (503, "try_another")


async def test_a_drain_waits_for_kv_that_others_fetch(rig: Rig) -> None:
    rig.engine.held.add("r-1")
    rig.engine.set(held_requests=1, held_kv_blocks=4)
    assert (await rig.flip()).json()["held_kv_blocks"] == 4
    await asyncio.sleep(0.05)
    assert (await rig.role())["phase"] == "draining"
    released = await rig.http.post("/v1/release", json={"kv_transfer_params": KV})
    assert released.json() == {"released": 1}
    await until(lambda: rig.worker.door.standing.epoch == 1)


CONFLICTS = {
    "stale epoch": ({"epoch": 7}, "stale_epoch"),
    "another process": ({"boot_id": "x"}, "stale_boot_id"),
    "another pod": ({"pod_uid": "x"}, "wrong_pod"),
    "the role it has": ({"role": "prefill"}, "already_in_role"),
}


@pytest.mark.parametrize(("asked", "expected"), CONFLICTS.values(), ids=CONFLICTS.keys())
async def test_a_change_that_may_not_be_is_a_409(rig: Rig, asked: dict[str, Any], expected: str) -> None:
    assert code(await rig.flip(**asked)) == (409, expected)
    assert rig.worker.door.standing.accepts


BAD_CHANGES = {
    "another role": ({"role": "both"}, "role"),
    "no epoch": ({"expected_epoch": None}, "expected_epoch"),
    "a drain of no time": ({"drain_timeout": 0}, "drain_timeout"),
    "a drain without end": ({"drain_timeout": 99999}, "drain_timeout"),
    "a negative fence": ({"fence": -1}, "fence"),
}


@pytest.mark.parametrize(("changes", "param"), BAD_CHANGES.values(), ids=BAD_CHANGES.keys())
async def test_a_bad_change_is_a_422_that_names_the_field(rig: Rig, changes: dict[str, Any], param: str) -> None:
    body = {"role": "decode", "expected_epoch": 0, "drain_timeout": 1} | changes
    answer = await rig.http.post("/v1/pd_role", json=body)
    assert code(answer) == (422, None)
    assert answer.json()["error"]["param"] == param
    assert (await rig.http.post("/v1/pd_role", content=b"{")).status_code == 422
    assert rig.worker.door.standing.accepts


# --- load, peers, release ------------------------------------------------------------------------------------------


async def events(rig: Rig) -> AsyncGenerator[LoadReport, None]:
    async with rig.http.stream("GET", "/v1/load") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                assert line.startswith("data: ")
                yield LoadReport.model_validate_json(line[6:])


async def test_a_closed_door_is_reported_at_once() -> None:
    async with serving(load_interval_s=60.0) as rig, asyncio.timeout(5):
        reports = events(rig)
        assert (await anext(reports)).accepting  # a new listener does not wait for the interval
        await rig.flip()
        assert not (await anext(reports)).accepting
        await reports.aclose()


async def test_load_is_reported_in_order(real: Rig) -> None:
    real.engine.set(queued_requests=2, receiving_requests=1, running_requests=4, heavy_requests=3, light_requests=5)
    real.engine.set(held_requests=1, free_kv_blocks=60)
    seen: list[LoadReport] = []
    async for one in events(real):
        seen.append(one)
        if len(seen) == 4:
            break
    first = seen[0]
    assert (first.pod, first.address, first.role, first.epoch) == ("w0", f"127.0.0.1:{real.address[1]}", "prefill", 0)
    assert first.boot_id == (await real.role())["boot_id"]
    assert (first.queued_requests, first.running_requests, first.free_kv_blocks) == (3, 4, 60)
    assert (first.heavy_requests, first.light_requests) == (3, 5)
    numbers = [one.sequence for one in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(seen)))


async def test_two_listeners_hear_the_same_sequence(real: Rig) -> None:
    async def take(count: int) -> dict[int, str]:
        seen: dict[int, str] = {}
        async for one in events(real):
            seen[one.sequence] = one.model_dump_json()
            if len(seen) == count:
                break
        return seen

    left, right = await asyncio.gather(take(8), take(8))
    both = left.keys() & right.keys()
    assert len(both) >= 5
    assert all(left[number] == right[number] for number in both)


async def test_a_listener_that_goes_away_is_forgotten(real: Rig) -> None:
    async for _ in events(real):
        break
    await until(lambda: real.worker.reporter.listeners == 0)


async def test_peers_are_heard_line_by_line_while_the_stream_is_open(real: Rig) -> None:
    more, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        line = Peers(decode=(report("d0"),)).model_dump_json().encode()
        yield line[:20]
        yield line[20:] + b"\n" + Peers(decode=(report("d1"),)).model_dump_json().encode()[:9]
        more.set()
        await go_on.wait()

    telling = asyncio.create_task(real.http.put("/v1/peers", content=body()))
    await more.wait()

    async def chosen() -> list[str]:
        answer = await real.http.post(TEXT, json={"prompt": "x", "headrace": handoff(max_tokens=1)})
        return [ref["pod"] for ref in answer.json()["headrace"]["decode_workers"]]

    async with asyncio.timeout(10):
        while await chosen() != ["d0"]:
            await asyncio.sleep(0.01)
    go_on.set()
    # What came last is half a line: the stream is refused, and what was heard before it stays.
    assert (await telling).status_code == 422
    assert await chosen() == ["d0"]


async def test_a_release_of_nothing_frees_nothing(rig: Rig) -> None:
    assert (await rig.http.post("/v1/release", json={"kv_transfer_params": KV})).json() == {"released": 0}


@pytest.mark.parametrize("params", [{}, {"remote_request_id": None}, {"remote_request_id": 3}])
async def test_a_release_that_names_no_request_is_refused(rig: Rig, params: dict[str, Any]) -> None:
    answer = await rig.http.post("/v1/release", json={"kv_transfer_params": params})
    assert answer.json()["error"]["param"] == "kv_transfer_params.remote_request_id"
    assert answer.status_code == 400
    answer = await rig.http.post("/v1/release", json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


# --- probes and metrics --------------------------------------------------------------------------------------------


async def test_live_is_the_engine_and_ready_does_not_depend_on_the_role(rig: Rig) -> None:
    rig.engine.set(running_requests=1)
    await rig.flip()
    assert (await rig.role())["phase"] == "draining"
    assert (await rig.http.get("/readyz")).status_code == 200
    assert (await rig.http.get("/livez")).status_code == 200
    rig.engine.alive = False
    assert code(await rig.http.get("/livez")) == (503, "internal_error")


def samples(text: str) -> dict[str, float]:
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


async def test_metrics_are_vllms_and_the_workers_own(rig: Rig) -> None:
    rig.engine.set(held_kv_blocks=4, kv_sent_bytes=10, kv_received_bytes=20, kv_receives=2, kv_receive_failures=1)
    rig.engine.set(prefilled_tokens=30)
    answer = await rig.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    got = samples(answer.text)
    assert got["vllm:n"] == 3.0
    assert got["process_start_time_seconds"] > 0
    assert got['headrace_worker_role{role="prefill"}'] == 1.0
    assert got['headrace_worker_role{role="decode"}'] == 0.0
    assert got["headrace_worker_epoch"] == 0.0
    assert got["headrace_worker_busy_seconds_total"] == 0.0
    assert got["headrace_worker_held_kv_blocks"] == 4.0
    assert got["headrace_worker_kv_sent_bytes_total"] == 10.0
    assert got["headrace_worker_kv_received_bytes_total"] == 20.0
    assert got["headrace_worker_kv_receives_total"] == 2.0
    assert got["headrace_worker_kv_receive_failures_total"] == 1.0
    assert got["headrace_worker_prefilled_tokens_total"] == 30.0
    rig.engine.set(running_requests=1)
    await asyncio.sleep(0.1)
    rig.engine.set(running_requests=0)
    await rig.flip()
    await until(lambda: rig.worker.door.standing.epoch == 1)
    got = samples((await rig.http.get("/metrics")).text)
    assert got['headrace_worker_role{role="decode"}'] == 1.0
    assert got["headrace_worker_epoch"] == 1.0
    assert got["headrace_worker_switch_seconds_count"] == 1.0
    assert got['headrace_worker_switch_seconds_bucket{le="0.0005"}'] <= 1.0
    assert got["headrace_worker_busy_seconds_total"] > 0.05


async def test_the_start_of_the_process_is_exported_once(rig: Rig) -> None:
    rig.vllm.metrics = b"process_start_time_seconds 5.0\n"
    text = (await rig.http.get("/metrics")).text
    assert text.count("\nprocess_start_time_seconds ") + text.startswith("process_start_time_seconds ") == 1


async def test_an_error_inside_is_a_500_in_the_same_shape(rig: Rig) -> None:
    rig.engine.release = None  # type: ignore[method-assign,assignment]
    assert code(await rig.http.post("/v1/release", json={"kv_transfer_params": KV})) == (500, "internal_error")


# --- the first forward pass ----------------------------------------------------------------------------------------


async def test_the_first_pass_is_a_real_request() -> None:
    vllm = FakeVllm()
    assert await first_pass(vllm, "tiny") == 2048
    assert [(body["model"], body["max_tokens"]) for body in vllm.bodies] == [("tiny", 1)]


async def test_a_model_that_does_not_answer_does_not_start() -> None:
    vllm = FakeVllm()
    vllm.status, vllm.answer = 500, ERROR
    with pytest.raises(StartError, match=r"500.*Internal server error"):
        await first_pass(vllm, "tiny")


@pytest.mark.parametrize("with_handoff", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_engine_id", None),
        ("remote_engine_id", 5),
        ("remote_request_id", None),
        ("remote_host", None),
        ("remote_port", "5600"),
        ("remote_block_ids", None),
        ("remote_block_ids", "abc"),
        ("remote_block_ids", [5]),
        ("remote_block_ids", [[-5]]),
        ("remote_block_ids", [["a"]]),
    ],
)
async def test_a_handle_that_would_end_the_engine_is_refused(
    rig: Rig, field: str, value: object, with_handoff: bool
) -> None:
    body = {"prompt": "x", "kv_transfer_params": KV | {field: value}}
    if with_handoff:
        body["headrace"] = handoff("decode")
    answer = await rig.http.post(TEXT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"kv_transfer_params.{field}"
    assert not rig.vllm.bodies
