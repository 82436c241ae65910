"""The gateway's exceptions: what ends a request with an answer, and what sends it to another worker.

GatewayError
├── Final            the request ends with this error answer
│   ├── BadRequest, ModelNotFound, NotFound, MethodNotAllowed, BodyTimeout, BodyTooLarge, Unauthorized
│   ├── Overloaded   the gateway has as many requests as it may
│   ├── NoWorkers    nobody of a needed role accepted within the wait
│   └── WorkersFailed  every attempt failed
├── Retryable        this attempt failed and nothing has reached the client: another one may succeed
│   ├── WorkerRefused  the worker takes no such work now
│   ├── WorkerLost     the worker broke off, fell silent, or failed
│   │   └── ConnectFailed  the worker could not be reached
│   ├── KvUnavailable  the KV cannot be used: transfer failed, too old, or never held
│   ├── NobodyAccepts  no worker of a needed role accepts now
│   └── NoDecodeWorker the prefill worker's dispatcher named nobody, or all it named refused
├── StreamBroken     a stream ended early after its first byte, and is not taken up again
├── ClientGone       the client has closed its connection
└── SettingsError    a setting is missing or malformed
"""

from __future__ import annotations

from http import HTTPStatus

from headrace_core.api.wire import ErrorAnswer, ErrorBody, ErrorCode

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
AUTHENTICATION = "authentication_error"


class GatewayError(Exception):
    """Base of all."""


class SettingsError(GatewayError):
    """A setting is missing or malformed. The message names it and the remedy."""


class Final(GatewayError):
    """The request ends with an error answer in the OpenAI API's shape.

    Attributes: `status` (HTTP), `kind` (`error.type`), `code`, `param` (the field at fault), `retry_after_s`.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    kind = SERVER_ERROR
    code: str | None = ErrorCode.INTERNAL
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> bytes:
        """The whole JSON body of the answer."""
        return error_body(str(self), kind=self.kind, param=self.param, code=self.code)


class BadRequest(Final):
    """400: a field is missing, malformed or not supported; `param` names it."""

    status = HTTPStatus.BAD_REQUEST
    kind = INVALID_REQUEST
    code: str | None = None


class ModelNotFound(BadRequest):
    """404: the model asked for is not the one served here."""

    status = HTTPStatus.NOT_FOUND
    code = "model_not_found"


class NotFound(BadRequest):
    """404: no such path."""

    status = HTTPStatus.NOT_FOUND
    code = "not_found"


class MethodNotAllowed(BadRequest):
    """405: the path has no such method."""

    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"


class BodyTimeout(BadRequest):
    """408: the body did not arrive in time."""

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "body_timeout"


class BodyTooLarge(BadRequest):
    """413: the body is over the limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = ErrorCode.BODY_TOO_LARGE


class Unauthorized(Final):
    """401: no or a wrong bearer token."""

    status = HTTPStatus.UNAUTHORIZED
    kind = AUTHENTICATION
    code = ErrorCode.UNAUTHORIZED


class Overloaded(Final):
    """429: the gateway has as many requests in flight as it may."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = RATE_LIMIT
    code = "too_many_requests"
    retry_after_s = 1


class NoWorkers(Final):
    """503: nobody of a needed role accepted within the wait."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = ErrorCode.NO_WORKERS
    retry_after_s = 2


class WorkersFailed(Final):
    """502: as many attempts as allowed have failed."""

    status = HTTPStatus.BAD_GATEWAY


class Retryable(GatewayError):
    """This attempt failed before the client got a byte.

    Attributes: `reason` (a metric's label), `address` of the worker at fault (empty: none), `counts` (whether it
    uses up one of the attempts: a refusal costs nothing but time, so time alone bounds it).
    """

    reason = ""
    counts = True

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class WorkerRefused(Retryable):
    """503 `try_another`: draining, another role or another epoch than expected."""

    reason = "refused"
    counts = False


class WorkerLost(Retryable):
    """No connection, a connection that broke, silence, or a 5xx."""

    reason = "worker_lost"


class ConnectFailed(WorkerLost):
    """No connection: the worker has seen nothing of the request, so its KV handle is still good."""

    reason = "connect_failed"


class KvUnavailable(Retryable):
    """The decode side cannot have the KV: prefill again."""

    reason = "kv_unavailable"


class NobodyAccepts(Retryable):
    """No worker of a needed role accepts requests now."""

    reason = "nobody_accepts"
    counts = False


class NoDecodeWorker(Retryable):
    """Nobody to decode: the dispatcher named nobody, or all whom it named refused."""

    reason = "no_decode_worker"
    counts = False


class StreamBroken(GatewayError):
    """A stream ended early after its first byte was sent."""


class ClientGone(GatewayError):
    """The client has closed its connection: nobody is there to answer."""


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error body in the OpenAI API's shape."""
    error = ErrorBody(message=message, type=kind, param=param, code=code)
    return ErrorAnswer(error=error).model_dump_json().encode()
