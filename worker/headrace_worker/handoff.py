"""Takes the field `headrace` off a request, puts it on a prefill answer, and tells a failed KV transfer from the rest.

Only two kinds of answers are looked at: that of a prefill hand-off, which is one small JSON body, and the first words
of a decode hand-off. Every other byte goes through as vLLM sends it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from headrace_core.api.names import Role
from headrace_core.api.wire import ErrorCode, Handoff
from headrace_worker import answers
from headrace_worker.bodies import parse_field, parse_object
from headrace_worker.dispatcher import Dispatcher
from headrace_worker.errors import RequestError

FIELD: Final = "headrace"
TRANSFER: Final = "kv_transfer_params"
HANDLE: Final[dict[str, type]] = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "remote_block_ids": list,
}
"""What a handle of KV on another worker must have."""

PATH_CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Work:
    """A request for vLLM, and what the gateway says of it."""

    body: bytes
    """Without the field `headrace`."""
    handoff: Handoff | None = None
    """None: not from a gateway. It runs whole on this worker, whatever its role."""
    fetches_kv: bool = False
    """Its KV lies on a prefill worker."""


def take_off(raw: bytes) -> Work:
    """Split a body. Raises RequestError (400) when it is no JSON object, or its hand-off or its handle is malformed."""
    if not any(f'"{field}"'.encode() in raw for field in (FIELD, TRANSFER)):
        return Work(raw)
    parsed = parse_object(raw)
    transfer = parsed.get(TRANSFER)
    fetches_kv = False
    if isinstance(transfer, dict) and transfer.get("do_remote_prefill"):
        _check_handle(transfer)
        fetches_kv = True
    if FIELD not in parsed:
        return Work(raw)
    value = parsed.pop(FIELD)
    handoff = parse_field(Handoff, value, status=HTTPStatus.BAD_REQUEST, prefix=FIELD)
    return Work(json.dumps(parsed, separators=(",", ":")).encode(), handoff, fetches_kv)


def _check_handle(handle: dict[str, Any]) -> None:
    """vLLM looks at a handle inside the engine, which an incomplete one ends."""
    for field, kind in HANDLE.items():
        if type(handle.get(field)) is not kind:
            param = f"{TRANSFER}.{field}"
            text = f"{param} is missing or malformed: send the {TRANSFER} of the prefill answer"
            raise RequestError(HTTPStatus.BAD_REQUEST, text, param=param)
    for group in handle["remote_block_ids"]:
        if not isinstance(group, list) or not all(type(block) is int and block >= 0 for block in group):
            param = f"{TRANSFER}.remote_block_ids"
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{param} must be lists of block numbers", param=param)


def put_on(body: bytes, handoff: Handoff, dispatcher: Dispatcher) -> bytes:
    """A prefill answer with the decode workers in it; as it is, where the prefill was aborted.

    vLLM counts no tokens then: the caller has left, and its request needs no decode worker.
    """
    parsed: dict[str, Any] = json.loads(body)
    if not parsed.get("usage"):
        return body
    prompt_tokens = int(parsed["usage"]["prompt_tokens"])
    answer = dispatcher.dispatch(prompt_tokens=prompt_tokens, max_tokens=handoff.max_tokens)
    parsed[FIELD] = answer.model_dump(mode="json")
    return json.dumps(parsed, separators=(",", ":"), ensure_ascii=False).encode()


def is_prefill(work: Work) -> bool:
    """Whether the answer is one that names decode workers."""
    return work.handoff is not None and work.handoff.expected_role is Role.PREFILL


def is_kv_decode(work: Work) -> bool:
    """Whether the answer may be that the KV could not be fetched."""
    return work.handoff is not None and work.fetches_kv


@dataclass(slots=True)
class Answer:
    """A whole answer, collected from ASGI's events."""

    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    async def collect(self, event: Event) -> None:
        """An ASGI `send` that keeps everything."""
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], tuple(event["headers"])
        elif event["type"] == "http.response.body":
            self.body += event.get("body", b"")

    async def send(self, send: Send) -> None:
        """Pass it on, with the length that it has by now."""
        headers = [pair for pair in self.headers if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class FirstWords:
    """An ASGI `send` that holds an answer back until its first words are there, and lets it run from then on.

    vLLM sends the status 200 of a stream before the KV is fetched, and an error as an event. A chat stream opens with
    the role, written together with what follows it: so there the second event is the first that means something.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, kv_has_failed: Callable[[], Awaitable[bool]]
    ) -> None:
        self._client = scope, receive, send
        self._send = send
        self._kv_has_failed = kv_has_failed
        self._held: list[Event] = []
        self._events_to_hold = 1 if scope["path"] == PATH_CHAT else 0
        self._open = False
        self._replaced = False

    async def send(self, event: Event) -> None:
        """Hold, replace or pass on an event."""
        if self._open:
            await self._send(event)
        elif not self._replaced:
            self._held.append(event)
            if event["type"] == "http.response.body":
                await self._judge(event)

    async def _judge(self, event: Event) -> None:
        start, *words = self._held
        more = event.get("more_body", False)
        if start["status"] < HTTPStatus.BAD_REQUEST and more:
            if is_error_event(event.get("body", b"")):
                await self._replace_or_open()
            elif len(words) > self._events_to_hold:
                await self._let_go()
        elif start["status"] < HTTPStatus.INTERNAL_SERVER_ERROR:
            await self._let_go()
        elif not more:
            await self._replace_or_open()

    async def _replace_or_open(self) -> None:
        if not await self._kv_has_failed():
            await self._let_go()
            return
        self._replaced = True
        refusal = answers.error(
            HTTPStatus.BAD_GATEWAY,
            "the KV could not be fetched from the prefill worker: prefill again",
            ErrorCode.KV_TRANSFER_FAILED,
        )
        await refusal(*self._client)

    async def _let_go(self) -> None:
        self._open = True
        for event in self._held:
            await self._send(event)
        self._held.clear()


def is_error_event(chunk: bytes) -> bool:
    """Whether a server-sent event is an error, as vLLM writes one in a stream."""
    return chunk.partition(b"data:")[2].lstrip().startswith(b'{"error"')
