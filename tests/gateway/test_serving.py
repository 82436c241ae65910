"""What a client gets from the gateway when all goes well, and what the workers are sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.gateway.fakes import (
    MODEL,
    after,
    decode_answer,
    decoder,
    eventually,
    hang,
    prefill,
    prefill_answer,
    stage,
    stream_bytes,
)


async def test_whole_answer_comes_from_the_decode_worker_without_internal_fields() -> None:
    async with stage() as it:
        status, body, headers = await it.complete()
        assert status == 200
        assert body["choices"][0]["text"] == "abc"
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert body.keys() == {"id", "choices", "usage"}
        assert headers["Content-Type"].startswith("application/json")
        assert len(it["p0"].bodies("prefill")) == 1
        assert len(it["d0"].bodies("decode")) == 1
        assert not it["p0"].released


async def test_prefill_gets_one_token_and_decode_the_client_s_own_body() -> None:
    async with stage() as it:
        it["p0"].epoch, it["d0"].epoch = 4, 7
        await eventually(lambda: all(r.epoch == 7 for r in it["p0"].peers.decode if r.pod == "d0"))
        await eventually(lambda: any(view.epoch == 4 for view in it.views()))
        asked = {
            "temperature": 0,
            "max_tokens": 9,
            "stop": ["x"],
            "stop_token_ids": [1],
            "min_tokens": 4,
            "logprobs": 2,
            "stream_options": {"include_usage": True},
        }
        assert (await it.stream(**asked))[0] == 200
        sent = it["p0"].bodies("prefill")[0]
        handoff = sent.pop("headrace")
        assert {key: handoff[key] for key in ("expected_role", "expected_epoch")} == {
            "expected_role": "prefill",
            "expected_epoch": 4,
        }
        kv = sent.pop("kv_transfer_params")
        assert (kv["do_remote_decode"], kv["do_remote_prefill"]) == (True, False)
        assert sent == {
            "model": MODEL,
            "prompt": "abc",
            "temperature": 0,
            "max_tokens": 1,
            "stream": False,
            "ignore_eos": True,
        }
        decoded = it["d0"].bodies("decode")[0]
        assert decoded.pop("headrace")["expected_epoch"] == 7
        assert decoded.pop("kv_transfer_params") == {"remote_engine_id": "p0", "remote_request": 1}
        assert decoded == {"model": MODEL, "prompt": "abc", "stream": True, **asked}


async def test_chat_limits_both_names_of_the_token_limit() -> None:
    async with stage() as it:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 50}
        async with it.post(body, "/v1/chat/completions") as response:
            assert response.status == 200
        sent = it["p0"].bodies("prefill")[0]
        assert (sent["max_tokens"], sent["max_completion_tokens"]) == (1, 1)
        assert it["d0"].bodies("decode")[0]["max_completion_tokens"] == 50


@pytest.mark.parametrize("cut", [0, 1, 7, 10_000])
async def test_stream_bytes_are_the_decode_worker_s(cut: int) -> None:
    async with stage(prefill("p0"), decoder("d0", decode_answer("héllo ☃", cut=cut))) as it:
        status, received = await it.stream()
        assert (status, received) == (200, stream_bytes("héllo ☃"))


async def test_stream_is_not_held_back() -> None:
    async with (
        stage(prefill("p0"), decoder("d0", decode_answer("abcdefgh", gap_s=0.05))) as it,
        it.post({"prompt": "abc", "stream": True}) as response,
    ):
        first = await response.content.readline()
        assert b'"a"' in first
        arrived = asyncio.get_running_loop().time()
        await response.content.read()
        assert asyncio.get_running_loop().time() - arrived > 0.25
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1.2:3", True), ("", False), ("has space", False), ("x" * 129, False), ("semi;colon", False)],
)
async def test_request_id_is_echoed_where_it_is_fit_or_made(sent: str, echoed: bool) -> None:
    async with stage(prefill("p0"), decoder("d0")) as it:
        async with it.post({"prompt": "abc"}, headers={"X-Request-Id": sent}) as response:
            given = response.headers["X-Request-Id"]
        assert (given == sent) is echoed
        assert given
        for pod, kind in (("p0", "prefill"), ("d0", "decode")):
            _, body, headers = it[pod].seen[0]
            assert body["headrace"]["request_id"] == given
            assert headers["x-request-id"] == given, kind


async def test_models_tell_the_served_one() -> None:
    async with stage(max_model_len=2048) as it, it.session.get(it.url + "/v1/models") as response:
        body = await response.json()
        assert body["object"] == "list"
        assert [(m["id"], m["object"], m["max_model_len"]) for m in body["data"]] == [(MODEL, "model", 2048)]
        assert response.headers["X-Request-Id"]


async def test_least_loaded_prefill_worker_gets_the_request() -> None:
    async with stage(prefill("p0", queued_prefill_tokens=500), prefill("p1"), decoder("d0")) as it:
        await it.complete()
        assert (len(it["p0"].seen), len(it["p1"].seen)) == (0, 1)


async def test_a_burst_spreads_before_the_next_report() -> None:
    async with stage() as it:
        for pod in ("p0", "p1"):
            it[pod].silent = True
        await asyncio.sleep(0.05)
        for pod in ("p0", "p1"):
            it[pod].prefills = [after(0.2, prefill_answer()) for _ in range(4)]
        await asyncio.gather(*(it.complete(prompt="x" * 400) for _ in range(4)))
        assert (len(it["p0"].seen), len(it["p1"].seen)) == (2, 2)


async def test_monitor_tells_prefill_workers_of_decode_workers_and_follows_a_flip() -> None:
    async with stage() as it:
        assert {r.pod for r in it["p0"].peers.decode} == {"d0", "d1"}
        assert not it["d0"].peers.decode
        it["d1"].role, it["d1"].epoch = it["p0"].role, 1
        await eventually(lambda: {r.pod for r in it["d1"].peers.decode} == {"d0"})
        await eventually(lambda: {r.pod for r in it["p0"].peers.decode} == {"d0"})


async def test_token_is_sent_to_the_workers(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("new\nold\n")
    async with stage(prefill("p0", token="new"), decoder("d0", token="new"), token_file=str(file)) as it:
        assert (await it.complete())[0] == 200
        # Rotated: the file changes, the workers ask for the new one.
        file.write_text("newest\nnew\n")
        it["p0"].token = it["d0"].token = "newest"
        assert (await it.complete())[0] == 200


async def test_debug_table_wants_the_token_and_shows_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\nsecond\n")
    workers = (prefill("p0", token="first"), decoder("d0", hang(), token="first"))
    async with stage(*workers, token_file=str(file)) as it:
        async with it.session.get(it.url + "/debug/requests") as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "unauthorized"
        task = asyncio.create_task(it.complete(prompt="sesame"))
        await eventually(lambda: it["d0"].seen)
        headers = {"Authorization": "Bearer second"}
        async with it.session.get(it.url + "/debug/requests", headers=headers) as response:
            text = await response.text()
        (entry,) = json.loads(text)["requests"]
        assert (entry["phase"], entry["prefill_worker"], entry["decode_worker"]) == ("decode", "p0", "d0")
        assert entry["age_s"] > 0
        assert "sesame" not in text
        task.cancel()


async def test_metrics_count_what_happened() -> None:
    async with stage(prefill("p0"), decoder("d0")) as it:
        await it.stream()
        await it.complete()
        await it.complete(n=3)
        total = "headrace_gateway_requests_total"
        assert await it.metric(total, endpoint="/v1/completions", code="200") == 2
        assert await it.metric(total, endpoint="/v1/completions", code="400") == 1
        assert await it.metric("headrace_gateway_ttft_seconds_count") == 1
        assert await it.metric("headrace_gateway_tpot_seconds_count") == 1
        for stage_name in ("route", "prefill", "decode_first_byte"):
            assert await it.metric("headrace_gateway_stage_seconds_count", stage=stage_name) == 2, stage_name
        assert await it.metric("headrace_gateway_workers", role="prefill", state="ready") == 1
        assert await it.metric("headrace_gateway_workers", role="decode", state="out") == 0
        assert await it.metric("headrace_gateway_lost_requests_total") == 0
