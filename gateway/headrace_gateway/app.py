"""The HTTP face: reads a request, runs it through the pipeline, and writes its answer or an error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from headrace_gateway import metrics as metrics_module
from headrace_gateway.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    Final,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
)
from headrace_gateway.metrics import Metrics
from headrace_gateway.openai import Endpoint, models_body, parse
from headrace_gateway.pipeline import Pipeline
from headrace_gateway.ports import EVENT_STREAM, JSON, Answer
from headrace_gateway.settings import Settings
from headrace_gateway.steps.admit import Admission
from headrace_gateway.tokens import Tokens

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
_GOOD_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
CLIENT_GONE = 499
"""The status under which requests are counted whose client left (nginx's convention)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Readiness:
    """What `/readyz` tells."""

    synced: bool = False
    """The workers' pods have been listed once."""
    stopping: bool = False


@dataclass(slots=True, kw_only=True)
class Gateway:
    """The handlers, and what they share."""

    settings: Settings
    pipeline: Pipeline
    metrics: Metrics
    tokens: Tokens
    readiness: Readiness
    admission: Admission
    started_at: int = field(default_factory=lambda: int(time.time()))

    def application(self) -> web.Application:
        """The routes, for aiohttp's runner (with `handler_cancellation`, so that a client that leaves cancels)."""
        app = web.Application(middlewares=[self._shape_errors], client_max_size=self.settings.max_body_bytes)
        app.router.add_post(Endpoint.CHAT, self._serve)
        app.router.add_post(Endpoint.TEXT, self._serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/debug/requests", self._debug_requests)
        return app

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        endpoint, clock = Endpoint(request.path), self.pipeline.clock
        request_id = request_id_of(request.headers.get(REQUEST_ID))
        code = CLIENT_GONE
        try:
            arrived_at_s = clock()
            with self.admission.slot():
                body = await self._read_body(request)
                parsed = parse(body, endpoint=endpoint, served_name=self.settings.served_name, request_id=request_id)
                self.metrics.stage.labels("admit").observe(clock() - arrived_at_s)
                client = StreamingClient(request, request_id, self.settings.client_stall_s)
                answer = await self.pipeline.serve(parsed, client, arrived_at_s)
                response = await client.end() if answer is None else _respond(answer, request_id)
            code = response.status
        except Final as error:
            code = error.status
            return _refuse(error, request_id)
        except ClientGone:
            # Nobody reads it; aiohttp wants a response all the same.
            return web.Response(status=CLIENT_GONE)
        except Exception:
            code = HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        else:
            return response
        finally:
            self.metrics.requests.labels(endpoint, str(int(code))).inc()

    async def _read_body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {self.settings.body_timeout_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise BodyTooLarge(f"the body is over {self.settings.max_body_bytes} bytes") from None
        except (web.RequestPayloadError, PayloadEncodingError) as error:
            raise BadRequest(f"the body cannot be read: {error}") from error

    async def _models(self, request: web.Request) -> web.StreamResponse:
        body = models_body(
            self.settings.served_name, created=self.started_at, max_model_len=self.settings.max_model_len
        )
        return _respond(Answer(HTTPStatus.OK, body), request_id_of(request.headers.get(REQUEST_ID)))

    async def _livez(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.StreamResponse:
        if self.readiness.stopping:
            return web.Response(text="stopping\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        if not self.readiness.synced:
            return web.Response(
                text="the workers' pods have not been listed yet\n", status=HTTPStatus.SERVICE_UNAVAILABLE
            )
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        views = self.pipeline.registry.views(self.pipeline.clock())
        return web.Response(body=self.metrics.render(views), headers={"Content-Type": metrics_module.CONTENT_TYPE})

    async def _debug_requests(self, request: web.Request) -> web.StreamResponse:
        if not self.tokens.accepts(request.headers.get("Authorization")):
            raise Unauthorized("give the cluster's token: Authorization: Bearer ...")
        table = self.pipeline.table.snapshot(self.pipeline.clock())
        return web.json_response({"requests": table}, dumps=lambda value: json.dumps(value, indent=1))

    @web.middleware
    async def _shape_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        def refuse(error: Final) -> web.Response:
            return _refuse(error, request_id_of(request.headers.get(REQUEST_ID)))

        try:
            response = await handler(request)
        except Final as error:
            response = refuse(error)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            response = refuse(MethodNotAllowed(f"{request.method} is not allowed on {request.path}: use {allowed}"))
            response.headers["Allow"] = allowed
        except web.HTTPNotFound:
            response = refuse(NotFound(f"there is no {request.path} here"))
        except web.HTTPException:
            raise
        except Exception:
            # The last border: the log has the trace, the client learns no more than that it was not its fault.
            log.exception("unexpected error on %s", request.path)
            response = refuse(Final("the gateway has met an unexpected error"))
        if self.readiness.stopping and not response.prepared:
            response.force_close()
        return response


class StreamingClient:
    """The client's side of one streamed answer (ports.Client)."""

    def __init__(self, request: web.Request, request_id: str, stall_s: float) -> None:
        self._request = request
        self._stall_s = stall_s
        self._response = web.StreamResponse(
            headers={
                "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
                "Cache-Control": "no-cache",
                # Asks nginx and its kin not to hold events back.
                "X-Accel-Buffering": "no",
                REQUEST_ID: request_id,
            }
        )

    async def begin(self) -> None:
        """Send the status 200 and the headers of an event stream."""
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body, waiting while the client's buffer is full.

        A client that takes nothing for too long is let go: its decode worker could never be drained.
        """
        try:
            async with asyncio.timeout(self._stall_s):
                await self._response.write(chunk)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from None
        except ConnectionError as error:
            raise ClientGone from error

    async def end(self) -> web.StreamResponse:
        """End the answer in order."""
        try:
            await self._response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return self._response


def request_id_of(header: str | None) -> str:
    """The client's request id where it has a fit one, else a new one: it goes to logs, headers and workers."""
    if header and _GOOD_REQUEST_ID.fullmatch(header):
        return header
    return uuid.uuid4().hex


def _respond(answer: Answer, request_id: str) -> web.Response:
    return web.Response(
        body=answer.body,
        status=answer.status,
        headers={"Content-Type": answer.content_type, REQUEST_ID: request_id},
    )


def _refuse(error: Final, request_id: str) -> web.Response:
    headers = {"Content-Type": JSON, REQUEST_ID: request_id}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(body=error.body(), status=error.status, headers=headers)
