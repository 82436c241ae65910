"""A small engine and a small application in the place of vLLM's, for the tests of what stands in front of them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport
from headrace_worker.engine.interface import EngineState
from headrace_worker.main import Worker, assemble, serve
from headrace_worker.settings import Settings

IDLE = EngineState(
    epoch=0,
    queued_requests=0,
    running_requests=0,
    receiving_requests=0,
    held_requests=0,
    held_kv_blocks=0,
    free_kv_blocks=100,
    total_kv_blocks=100,
    block_size=16,
    queued_prefill_tokens=0,
    running_tokens=0,
    heavy_requests=0,
    light_requests=0,
    prefilled_tokens=0,
    kv_received_bytes=0,
    kv_receives=0,
    kv_sent_bytes=0,
    kv_receive_failures=0,
)

KV = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2]],
}


@dataclass
class FakeEngine:
    """An engine whose state is set from outside."""

    now: EngineState = IDLE
    switches: list[tuple[Role, int]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    alive: bool = True
    reads: int | None = None
    """The epoch that it claims to have read, if not the one it was told."""
    stuck: asyncio.Event | None = None
    """A switch waits for this."""
    broken: Exception | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def state(self) -> EngineState:
        if self.broken:
            raise self.broken
        return self.now

    def set(self, **changes: Any) -> None:
        self.now = replace(self.now, **changes)

    async def switch(self, role: Role, epoch: int) -> int:
        self.switches.append((role, epoch))
        if self.stuck:
            await self.stuck.wait()
        self.set(epoch=epoch)
        return epoch if self.reads is None else self.reads

    async def release(self, request_id: str) -> bool:
        known = request_id in self.held
        self.held.discard(request_id)
        self.set(held_requests=len(self.held))
        return known

    async def ended(self) -> None:
        await self.gone.wait()

    async def is_alive(self) -> bool:
        return self.alive


def sse(*events: dict[str, Any] | str) -> list[bytes]:
    """Events as vLLM writes them."""
    return [b"data: " + (one if isinstance(one, str) else json.dumps(one)).encode() + b"\n\n" for one in events]


ROLE_EVENT = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
TEXT_EVENT = {"choices": [{"delta": {"content": "a"}}]}
ERROR = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


class FakeVllm:
    """An ASGI application with the routes that the worker passes on."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.chunks = sse(TEXT_EVENT, TEXT_EVENT, "[DONE]")
        self.status = 200
        self.answer: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 7}, "kv_transfer_params": KV}
        self.goes_on: Callable[[int], Any] | None = None
        """Awaited before each chunk of a stream."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.entered = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.metrics = b"# TYPE vllm:n gauge\nvllm:n 3.0\n"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"] == "/v1/models":
            await _send(send, 200, json.dumps({"data": [{"id": "tiny", "max_model_len": 2048}]}).encode())
        elif scope["path"] == "/metrics":
            await _send(send, 200, self.metrics, b"text/plain")
        else:
            await self._generate(scope, receive, send)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        raw = (await receive())["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(raw)).encode()
        self.raw.append(raw)
        body = json.loads(raw)
        self.bodies.append(body)
        self.entered.set()
        if not self.may_answer.is_set():
            waits = asyncio.create_task(self.may_answer.wait())
            gone = asyncio.create_task(receive())
            await asyncio.wait({waits, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                assert (await gone)["type"] == "http.disconnect"
                self.disconnected.set()
                waits.cancel()
                return
            gone.cancel()
        if not body.get("stream"):
            await _send(send, self.status, json.dumps(self.answer).encode())
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, chunk in enumerate(self.chunks):
            if self.goes_on:
                await self.goes_on(number)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Any, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def report(pod: str, **changes: Any) -> LoadReport:
    """A decode worker with room."""
    values: dict[str, Any] = {
        "pod": pod,
        "address": f"{pod}:8000",
        "boot_id": "b",
        "sequence": 1,
        "role": Role.DECODE,
        "epoch": 0,
        "accepting": True,
        "free_kv_blocks": 100,
        "total_kv_blocks": 100,
        "block_size": 16,
    }
    return LoadReport(**values | changes)


@dataclass
class Rig:
    """A worker, and a client of it."""

    worker: Worker
    engine: FakeEngine
    vllm: FakeVllm
    http: httpx.AsyncClient
    stop: asyncio.Event
    serving: asyncio.Task[None]
    address: tuple[str, int]
    """Of the server, where there is one."""

    async def role(self) -> dict[str, Any]:
        return (await self.http.get("/v1/pd_role")).json()  # type: ignore[no-any-return]

    async def flip(self, role: str = "decode", epoch: int = 0, timeout_s: float = 5.0, **more: Any) -> httpx.Response:
        body = {"role": role, "expected_epoch": epoch, "drain_timeout": timeout_s, **more}
        return await self.http.post("/v1/pd_role", json=body)


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": "file:///models/tiny",
        "role": Role.PREFILL,
        "pod_ip": "127.0.0.1",
        "pod_name": "w0",
        "pod_uid": "uid-0",
        "load_interval_s": 0.02,
        "max_body_bytes": 2000,
    }
    return Settings(**values | changes)


@asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[Rig]:
    """A worker over the fakes, behind real uvicorn."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    chosen = settings(port=address[1], **changes)
    engine, vllm, stop = FakeEngine(), FakeVllm(), asyncio.Event()
    worker = assemble(chosen, engine, vllm, max_model_len=2048, clock=loop.time)
    task = asyncio.create_task(serve(worker, listener, stop, chosen))
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", trust_env=False, timeout=5) as http:
        try:
            yield Rig(worker, engine, vllm, http, stop, task, address)
        finally:
            vllm.may_answer.set()
            engine.now = IDLE
            stop.set()
            if not task.done():
                await asyncio.wait({task}, timeout=10)
            listener.close()


@asynccontextmanager
async def calling(**changes: Any) -> AsyncIterator[Rig]:
    """A worker over the fakes that is called in this process: quick, but answers come whole and nobody goes away."""
    engine, vllm = FakeEngine(), FakeVllm()
    worker = assemble(settings(**changes), engine, vllm, max_model_len=2048, clock=asyncio.get_running_loop().time)
    task = asyncio.create_task(_background(worker))
    transport = httpx.ASGITransport(worker.server, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
        try:
            yield Rig(worker, engine, vllm, http, asyncio.Event(), task, ("127.0.0.1", 8000))
        finally:
            task.cancel()


async def _background(worker: Worker) -> None:
    await asyncio.gather(worker.changer.run(), worker.reporter.run())


async def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
