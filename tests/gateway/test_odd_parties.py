"""Clients that do not read, bodies that are not what they say, workers that answer garbage, tokens that are none."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from aiohttp import web

from headrace_core.api.names import Role
from headrace_core.api.wire import Peers
from tests.gateway.fakes import MODEL, Behaviour, Body, FakeWorker, decoder, eventually, prefill, stage

STREAM_REQUEST = json.dumps({"model": MODEL, "prompt": "abc", "stream": True}).encode()
DEEP = b"[" * 200_000


def answers(body: bytes, status: int = 200) -> Behaviour:
    async def behave(worker: FakeWorker, request: web.Request, _: Body) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type="application/json")

    return behave


def streams_without_end() -> Behaviour:
    async def behave(worker: FakeWorker, request: web.Request, _: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b'data: {"choices": []}' + b" " * 4096 + b"\n\n")

    return behave


async def test_a_client_that_takes_nothing_is_let_go() -> None:
    """Its decode worker must hear of it, or it could never be drained."""
    async with stage(prefill("p0"), decoder("d0", streams_without_end()), client_stall_s=0.5) as it:
        with socket.create_connection(("127.0.0.1", it.instance.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(STREAM_REQUEST)}\r\n\r\n"
            client.sendall(head.encode() + STREAM_REQUEST)
            await eventually(lambda: it.instance.gateway.admission.in_flight == 1)
            await eventually(lambda: it.instance.gateway.admission.in_flight == 0)
            await eventually(lambda: it["d0"].disconnected == ["decode"])


async def test_a_body_that_is_not_encoded_as_it_says_is_the_client_s_fault() -> None:
    async with stage() as it, it.post(STREAM_REQUEST, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"<html>", b"", b"null", b'["headrace"]', DEEP], ids=lambda body: str(body[:12]))
async def test_garbage_from_a_worker_sends_the_request_on(body: bytes) -> None:
    async with stage(prefill("p0", answers(body)), prefill("p1"), decoder("d0", answers(body)), decoder("d1")) as it:
        for _ in range(2):
            status, answer, _ = await it.complete()
            assert (status, answer["choices"][0]["text"]) == (200, "abc")
        assert it["d0"].seen


async def test_an_error_that_cannot_be_read_is_still_an_error() -> None:
    async with stage(prefill("p0", answers(DEEP, 500)), prefill("p1"), decoder("d0")) as it:
        assert (await it.complete())[0] == 200


async def test_the_streams_outlive_a_token_file_with_garbage(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"good\n")
    workers = (prefill("p0", token="good"), prefill("p1", token="good"), decoder("d0", token="good"))
    async with stage(*workers, token_file=str(file)) as it:
        it["p0"].role = Role.DECODE
        await eventually(lambda: len(it["p1"].peers.decode) == 2)
        it["p0"].peers = Peers()
        file.write_bytes(b"\xff\xfe\n")
        it["p0"].role = Role.PREFILL
        await asyncio.sleep(0.5)
        assert not it["p0"].peers.decode
        file.write_bytes(b"good\n")
        await eventually(it.is_ready)
        assert (await it.complete())[0] == 200
