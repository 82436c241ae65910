"""The answers that the worker gives itself: errors in the OpenAI API's shape, and small JSON bodies."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from pydantic import BaseModel
from starlette.responses import Response

from headrace_core.api.wire import ErrorAnswer, ErrorBody, ErrorCode

JSON: Final = "application/json"

_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.CONFLICT: "conflict_error",
}


def answer(body: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """A message of the protocol."""
    return Response(body.model_dump_json(), status, media_type=JSON)


def error(
    status: HTTPStatus,
    message: str,
    code: ErrorCode | None = None,
    *,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error: `type` says whose fault it is, `code` what a caller may do, `param` which field is meant."""
    fault = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    body = ErrorBody(message=message, type=_TYPES.get(status, fault), param=param, code=code)
    return Response(ErrorAnswer(error=body).model_dump_json(), status, headers, media_type=JSON)
