"""The worker's HTTP side: what may be called, by whom, and what goes on to vLLM.

Only the calls in `ROUTES` exist. Those that generate pass the door; the rest are short, and answered at any time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_core.api.wire import (
    PATH_LOAD,
    PATH_PEERS,
    PATH_RELEASE,
    PATH_ROLE,
    ErrorCode,
    Peers,
    Release,
    RoleRequest,
)
from headrace_worker import answers, handoff
from headrace_worker.bodies import header, lines, parse, read, replay
from headrace_worker.changer import RoleChanger
from headrace_worker.dispatcher import Dispatcher
from headrace_worker.door import Door
from headrace_worker.engine.interface import Engine
from headrace_worker.errors import ClientGone, RequestError
from headrace_worker.handoff import PATH_CHAT, Answer, FirstWords, Work
from headrace_worker.metrics import CONTENT_TYPE, Metrics
from headrace_worker.peers import PeerTable
from headrace_worker.report import Reporter
from headrace_worker.tokens import Tokens

PATH_TEXT: Final = "/v1/completions"
PATH_MODELS: Final = "/v1/models"
PATH_LIVE: Final = "/livez"
PATH_READY: Final = "/readyz"
PATH_METRICS: Final = "/metrics"
OPEN_PATHS: Final = frozenset({PATH_LIVE, PATH_READY, PATH_METRICS})
"""Called by the kubelet and by Prometheus, which have no token."""

PUBLISH_WAIT_S: Final = 0.02
"""After this long the engine has published what made a request fail: twice its slowest pace."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the server calls."""

    engine: Engine
    door: Door
    changer: RoleChanger
    reporter: Reporter
    peers: PeerTable
    dispatcher: Dispatcher
    metrics: Metrics
    tokens: Tokens
    clock: Callable[[], float]


class Server:
    """The ASGI application that stands in front of vLLM's."""

    def __init__(self, vllm: ASGIApp, parts: Parts, *, max_body_bytes: int) -> None:
        self._vllm = vllm
        self._parts = parts
        self._max_body_bytes = max_body_bytes
        self._streams = itertools.count()
        self._closing = False
        self._routes: dict[str, dict[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
            PATH_TEXT: {"POST": self._work},
            PATH_CHAT: {"POST": self._work},
            PATH_MODELS: {"GET": vllm},
            PATH_ROLE: {"GET": _answered(self._get_role), "POST": _answered(self._post_role)},
            PATH_LOAD: {"GET": self._load},
            PATH_PEERS: {"PUT": _answered(self._put_peers)},
            PATH_RELEASE: {"POST": _answered(self._release)},
            PATH_LIVE: {"GET": _answered(self._live)},
            PATH_READY: {"GET": _answered(self._ready)},
            PATH_METRICS: {"GET": _answered(self._metrics)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; vLLM's application gets the events of start and end too."""
        if scope["type"] != "http":
            await self._vllm(scope, receive, send)
            return
        try:
            await self._route(scope)(scope, receive, send)
        except RequestError as error:
            refusal = answers.error(error.status, error.message, error.code, param=error.param, headers=error.headers)
            await refusal(scope, receive, send)
        except ClientGone:
            return

    def close(self) -> None:
        """End the streams that have no end of their own."""
        self._closing = True
        self._parts.reporter.close()

    def _route(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        path, method = scope["path"], scope["method"]
        if path not in OPEN_PATHS and not self._parts.tokens.accepts(header(scope, b"authorization")):
            raise RequestError(
                HTTPStatus.UNAUTHORIZED,
                "a bearer token of this cluster is needed: send Authorization: Bearer TOKEN",
                ErrorCode.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )
        methods = self._routes.get(path)
        if methods is None:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no {path} here")
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            text = f"{path} takes {allowed}, not {method}"
            raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, text, headers={"Allow": allowed})
        return methods[method]

    # --- work for vLLM ---------------------------------------------------------------------------------------------

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = handoff.take_off(await read(scope, receive, self._max_body_bytes))
        door = self._parts.door
        if reason := door.enter(work.handoff):
            self._parts.metrics.refused.labels(reason).inc()
            standing = door.standing
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"not taken ({reason}): this worker is {standing.role} at epoch {standing.epoch}",
                ErrorCode.TRY_ANOTHER,
            )
        try:
            await self._hand_over(work, _with_length(scope, len(work.body)), replay(work.body, receive), send)
        finally:
            door.leave()

    async def _hand_over(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        if handoff.is_prefill(work) and work.handoff is not None:
            answer = Answer()
            await self._vllm(scope, receive, answer.collect)
            if answer.status == HTTPStatus.OK:
                answer.body = handoff.put_on(answer.body, work.handoff, self._parts.dispatcher)
            await answer.send(send)
        elif handoff.is_kv_decode(work):
            failures_before = self._parts.engine.state().kv_receive_failures

            async def kv_has_failed() -> bool:
                await asyncio.sleep(PUBLISH_WAIT_S)
                return self._parts.engine.state().kv_receive_failures > failures_before

            await self._vllm(scope, receive, FirstWords(scope, receive, send, kv_has_failed).send)
        else:
            await self._vllm(scope, receive, send)

    # --- role, load, peers, release --------------------------------------------------------------------------------

    async def _get_role(self, _scope: Scope, _receive: Receive) -> Response:
        return answers.answer(self._parts.changer.describe())

    async def _post_role(self, scope: Scope, receive: Receive) -> Response:
        body = await read(scope, receive, self._max_body_bytes)
        request = parse(RoleRequest, body, status=HTTPStatus.UNPROCESSABLE_ENTITY)
        if refusal := self._parts.changer.ask(request):
            raise RequestError(HTTPStatus.CONFLICT, refusal.message, refusal.code)
        return answers.answer(self._parts.changer.describe(), HTTPStatus.ACCEPTED)

    async def _load(self, _scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_closed(receive))
        reports = self._parts.reporter.reports()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        try:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
            async for report in reports:
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": b"data: " + report + b"\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            await reports.aclose()

    async def _put_peers(self, _scope: Scope, receive: Receive) -> Response:
        stream = next(self._streams)
        async for line in lines(receive, self._max_body_bytes):
            heard = parse(Peers, line, status=HTTPStatus.UNPROCESSABLE_ENTITY)
            self._parts.peers.hear(stream, heard.decode, self._parts.clock())
            if self._closing:
                break
        return Response(b"{}", media_type=answers.JSON)

    async def _release(self, scope: Scope, receive: Receive) -> Response:
        body = await read(scope, receive, self._max_body_bytes)
        params = parse(Release, body, status=HTTPStatus.BAD_REQUEST).kv_transfer_params
        request_id = params.get("remote_request_id")
        if not isinstance(request_id, str) or not request_id:
            param = "kv_transfer_params.remote_request_id"
            text = f"{param} is missing: send the kv_transfer_params of the prefill answer"
            raise RequestError(HTTPStatus.BAD_REQUEST, text, param=param)
        released = await self._parts.engine.release(request_id)
        return Response(b'{"released":%d}' % released, media_type=answers.JSON)

    # --- probes and metrics ----------------------------------------------------------------------------------------

    async def _live(self, _scope: Scope, _receive: Receive) -> Response:
        if not await self._parts.engine.is_alive():
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine does not answer", ErrorCode.INTERNAL)
        return Response(b"ok\n", media_type="text/plain")

    async def _ready(self, _scope: Scope, _receive: Receive) -> Response:
        # Nothing listens before the first forward pass is done, so who gets an answer gets this one.
        return Response(b"ok\n", media_type="text/plain")

    async def _metrics(self, _scope: Scope, _receive: Receive) -> Response:
        engines = await call(self._vllm, "GET", PATH_METRICS)
        if engines.status != HTTPStatus.OK:
            raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, f"vLLM's metrics answer {engines.status}")
        return Response(self._parts.metrics.exposition(engines.body), media_type=CONTENT_TYPE)


async def call(app: ASGIApp, method: str, path: str, body: bytes = b"") -> Answer:
    """Call an application in this process, and collect its answer."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("localhost", 0),
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", answers.JSON.encode())],
        "state": {},
    }
    answer = Answer()
    await app(_with_length(scope, len(body)), replay(body, _never), answer.collect)
    return answer


async def _never() -> dict[str, str]:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _answered(
    handler: Callable[[Scope, Receive], Awaitable[Response]],
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Send what a handler returns; an error that nobody expected is an OpenAI-shaped 500, and goes on to the log."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await handler(scope, receive)
        except (RequestError, ClientGone):
            raise
        except Exception:
            text = "an error inside the worker: its log says which"
            await answers.error(HTTPStatus.INTERNAL_SERVER_ERROR, text, ErrorCode.INTERNAL)(scope, receive, send)
            raise
        await response(scope, receive, send)

    return serve
