"""Small workers that speak the worker protocol over real HTTP as a test has scripted, and a gateway before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport, Peers
from headrace_gateway.main import Running, running
from headrace_gateway.registry import Standing, WorkerView
from headrace_gateway.settings import Settings

MODEL = "tiny"
REPORT_PERIOD_S = 0.02

Body = dict[str, Any]
Behaviour = Callable[["FakeWorker", web.Request, Body], Awaitable[web.StreamResponse]]


@dataclass
class FakeWorker:
    """A worker with a role. `prefills` and `decodes` are used up in turn, then the defaults apply."""

    pod: str
    role: Role
    epoch: int = 0
    accepting: bool = True
    queued_prefill_tokens: int = 0
    running_tokens: int = 0
    prefills: list[Behaviour] = field(default_factory=list)
    decodes: list[Behaviour] = field(default_factory=list)
    decode_order: list[str] | None = None
    """Pods to name in a prefill answer; None: those of the peers table that accept, by name."""
    peers: Peers = field(default_factory=Peers)
    seen: list[tuple[str, Body, dict[str, str]]] = field(default_factory=list)
    """Kind (prefill, decode), body and headers of each request."""
    released: list[Body] = field(default_factory=list)
    disconnected: list[str] = field(default_factory=list)
    """Kinds of the requests whose caller left before their end."""
    failing_releases: int = 0
    silent: bool = False
    address: str = ""
    token: str = ""

    def bodies(self, kind: str) -> list[Body]:
        return [body for seen, body, _ in self.seen if seen == kind]

    def report(self, sequence: int) -> LoadReport:
        return LoadReport(
            pod=self.pod,
            address=self.address,
            boot_id=f"boot-{self.pod}",
            sequence=sequence,
            role=self.role,
            epoch=self.epoch,
            accepting=self.accepting,
            queued_prefill_tokens=self.queued_prefill_tokens,
            running_tokens=self.running_tokens,
        )

    async def start(self, stack: AsyncExitStack) -> None:
        app = web.Application(middlewares=[self._check_token])
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/load", self._load)
        app.router.add_put("/v1/peers", self._peers)
        app.router.add_post("/v1/release", self._release)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runner = runner
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"

    async def die(self) -> None:
        """Close the port and every connection."""
        await self._runner.cleanup()

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return error(401, "unauthorized")
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind = body["headrace"]["expected_role"]
        self.seen.append((kind, body, {name.lower(): value for name, value in request.headers.items()}))
        script, default = (self.prefills, prefill_answer()) if kind == Role.PREFILL else (self.decodes, decode_answer())
        behaviour = script.pop(0) if script else default
        try:
            return await behaviour(self, request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected.append(kind)
            raise

    async def _load(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sequence = 0
        while True:
            if not self.silent:
                sequence += 1
                await response.write(b"data: " + self.report(sequence).model_dump_json().encode() + b"\n\n")
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _peers(self, request: web.Request) -> web.StreamResponse:
        async for line in request.content:
            self.peers = Peers.model_validate_json(line)
        return web.Response()

    async def _release(self, request: web.Request) -> web.StreamResponse:
        if self.failing_releases:
            self.failing_releases -= 1
            return error(500, 500)
        self.released.append((await request.json())["kv_transfer_params"])
        return web.json_response({"released": 1})


# --- behaviours ----------------------------------------------------------------------------------------------------


def error(status: int, code: Any, message: str = "no", param: str | None = None) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "error", "param": param, "code": code}}, status=status
    )


def refuse() -> Behaviour:
    return answer_error(503, "try_another")


def answer_error(status: int, code: Any, **more: Any) -> Behaviour:
    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        return error(status, code, **more)

    return behave


def break_off(after: bytes = b"") -> Behaviour:
    """Close the connection: at once, or in the middle of a stream after some bytes."""

    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if after:
            await response.prepare(request)
            await response.write(after)
            await asyncio.sleep(0.02)
        assert request.transport
        request.transport.abort()
        return response

    return behave


def hang() -> Behaviour:
    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError("nobody hung up")

    return behave


def after(seconds: float, behaviour: Behaviour) -> Behaviour:
    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await behaviour(worker, request, body)

    return behave


def before(action: Callable[[], object], behaviour: Behaviour) -> Behaviour:
    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        action()
        return await behaviour(worker, request, body)

    return behave


def prefill_answer(**changes: Any) -> Behaviour:
    """vLLM's answer with the hand-off; `changes` replace its fields."""

    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        known = {report.pod: report for report in worker.peers.decode}
        names = worker.decode_order
        if names is None:
            names = sorted(pod for pod, report in known.items() if report.accepting)
        workers = [
            {"pod": pod, "address": known[pod].address, "epoch": known[pod].epoch} for pod in names if pod in known
        ]
        answer = {
            "id": "x",
            "choices": [{"text": "!"}],
            "kv_transfer_params": {"remote_engine_id": worker.pod, "remote_request": len(worker.seen)},
            "headrace": {"decode_workers": workers, "prompt_tokens": 3},
            **changes,
        }
        return web.json_response(answer)

    return behave


def stream_bytes(text: str = "abc", usage: bool = True) -> bytes:
    events = [
        json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": letter, "finish_reason": None}]})
        for letter in text
    ]
    if usage:
        events.append(json.dumps({"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": len(text)}}))
    return b"".join(b"data: " + event.encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def decode_answer(text: str = "abc", *, gap_s: float = 0.0, cut: int = 0) -> Behaviour:
    """A whole answer, or a stream when asked for one: event by event with gaps, or cut every so many bytes."""

    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response(
                {
                    "id": "cmpl-1",
                    "choices": [{"index": 0, "text": text}],
                    "usage": {"prompt_tokens": 3, "completion_tokens": len(text), "total_tokens": 3 + len(text)},
                    "kv_transfer_params": None,
                    "ec_transfer_params": None,
                    "headrace": {"secret": True},
                }
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        data = stream_bytes(text)
        if cut:
            pieces = [data[at : at + cut] for at in range(0, len(data), cut)]
        else:
            pieces = [event + b"\n\n" for event in data.split(b"\n\n") if event]
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(gap_s)
        await response.write_eof()
        return response

    return behave


def stream_error(code: Any) -> Behaviour:
    """An error as the first event of a stream, after a status of 200: vLLM's way when the engine refuses late."""

    async def behave(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        event = json.dumps({"error": {"message": "late", "type": "error", "param": None, "code": code}})
        return web.Response(
            body=f"data: {event}\n\ndata: [DONE]\n\n".encode(), headers={"Content-Type": "text/event-stream"}
        )

    return behave


# --- a gateway before them -----------------------------------------------------------------------------------------


@dataclass
class Stage:
    """A gateway, its workers by pod name, and a client."""

    instance: Running
    workers: dict[str, FakeWorker]
    session: aiohttp.ClientSession
    stop_gateway: Callable[[], Coroutine[Any, Any, None]]

    def __getitem__(self, pod: str) -> FakeWorker:
        return self.workers[pod]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.instance.port}"

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
        options.setdefault("headers", {})
        if isinstance(body, dict):
            options["json"] = body
        else:
            options["data"] = body
        return self.session.post(self.url + path, **options)

    async def complete(self, **fields: Any) -> tuple[int, Any, Any]:
        """Status, JSON body and headers of a text completion."""
        async with self.post({"model": MODEL, "prompt": "abc", **fields}) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def stream(self, **fields: Any) -> tuple[int, bytes]:
        async with self.post({"model": MODEL, "prompt": "abc", "stream": True, **fields}) as response:
            return response.status, await response.read()

    async def metric(self, name: str, **labels: str) -> float:
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        for line in text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.split("{")[0] == name and all(f'{key}="{label}"' in sample for key, label in labels.items()):
                return float(value)
        return 0.0

    def standing(self, pod: str) -> Standing:
        return next(view.standing for view in self.views() if view.address == self.workers[pod].address)

    def views(self) -> Iterator[WorkerView]:
        return self.instance.registry.views(self.instance.gateway.pipeline.clock())

    def is_ready(self) -> bool:
        heard = all(view.standing is not Standing.OUT for view in self.views())
        decode = {pod for pod, worker in self.workers.items() if worker.role is Role.DECODE and not worker.silent}
        told = all(
            {report.pod for report in worker.peers.decode} == decode
            for worker in self.workers.values()
            if worker.role is Role.PREFILL
        )
        return heard and told


async def eventually(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def stage(*workers: FakeWorker, settle: bool = True, **settings: Any) -> AsyncIterator[Stage]:
    """Start workers (by default p0, p1, d0, d1) and a gateway, and wait until they know each other."""
    workers = workers or (prefill("p0"), prefill("p1"), decoder("d0"), decoder("d1"))
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start(stack)
        defaults: dict[str, Any] = {
            "served_name": MODEL,
            "host": "127.0.0.1",
            "port": 0,
            "workers": ",".join(worker.address for worker in workers),
            "worker_wait_s": 0.4,
            "shutdown_timeout_s": 1.0,
            "lame_duck_s": 0.0,
        }
        session = await stack.enter_async_context(aiohttp.ClientSession())
        gateway = await stack.enter_async_context(AsyncExitStack())
        instance = await gateway.enter_async_context(running(Settings(**{**defaults, **settings})))
        it = Stage(instance, {worker.pod: worker for worker in workers}, session, gateway.aclose)
        if settle:
            await eventually(it.is_ready)
        yield it


def prefill(pod: str, *behaviours: Behaviour, **more: Any) -> FakeWorker:
    return FakeWorker(pod, Role.PREFILL, prefills=list(behaviours), **more)


def decoder(pod: str, *behaviours: Behaviour, **more: Any) -> FakeWorker:
    return FakeWorker(pod, Role.DECODE, decodes=list(behaviours), **more)
