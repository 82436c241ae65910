"""Reads request bodies off ASGI: bounded, whole or line by line, and checked against a message of the protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from starlette.types import Message as Event
from starlette.types import Receive, Scope

from headrace_core.api.wire import ErrorCode, Message
from headrace_worker.errors import ClientGone, RequestError

M = TypeVar("M", bound=Message)

DISCARD: Final = 4
"""How many times the bound of a body is read and thrown away. Who still sends when the connection closes sees it
reset, and never the answer that says why."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of the first header of a name in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The whole body.

    Raises RequestError (413) when it is longer than `most_bytes`, or ClientGone.
    """
    announced = header(scope, b"content-length")
    size = 0
    is_too_large = announced is not None and announced.isdigit() and int(announced) > most_bytes
    chunks: list[bytes] = []
    async for chunk in _chunks(receive):
        size += len(chunk)
        is_too_large = is_too_large or size > most_bytes
        if not is_too_large:
            chunks.append(chunk)
        elif size > DISCARD * most_bytes:
            break
    if is_too_large:
        raise _too_large(most_bytes)
    return b"".join(chunks)


async def lines(receive: Receive, most_bytes: int) -> AsyncIterator[bytes]:
    """The lines of a body without end, as they arrive. `most_bytes` bounds one line.

    Raises RequestError (413) or ClientGone.
    """
    rest = b""
    async for chunk in _chunks(receive):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > most_bytes:
            raise _too_large(most_bytes)
        for line in whole:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


def parse(kind: type[M], body: bytes | str, *, status: HTTPStatus, prefix: str = "") -> M:
    """A message of the protocol. Raises RequestError with `status` that names the first bad field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _bad_field(error, status, prefix) from error


def parse_field(kind: type[M], value: Any, *, status: HTTPStatus, prefix: str) -> M:
    """As `parse`, for a value out of a body that is JSON already."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _bad_field(error, status, prefix) from error


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestError (400)."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RequestError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    return parsed


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read before, and then what the connection still says: that it closed."""
    given = False

    async def again() -> Event:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        if chunk := event.get("body", b""):
            yield chunk
        if not event.get("more_body", False):
            return


def _too_large(most_bytes: int) -> RequestError:
    return RequestError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is longer than {most_bytes} bytes: send less",
        ErrorCode.BODY_TOO_LARGE,
        # Some of it may be unread: the connection cannot be used again.
        headers={"Connection": "close"},
    )


def _bad_field(error: ValidationError, status: HTTPStatus, prefix: str) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join([*([prefix] if prefix else []), *map(str, first["loc"])])
    where = f"{param}: " if param else ""
    return RequestError(status, f"{where}{first['msg']}", param=param or None)
