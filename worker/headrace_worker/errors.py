"""The exceptions of the worker.

WorkerError
├── SettingsError     the environment describes no worker that can run
├── StartError        the engine started, and does not answer as it should
├── EngineEndedError  the engine's process has ended by itself
├── TornCellError     the engine's process died while it wrote its state
├── RequestError      a request ends with an error answer, before anything of the answer is out
└── ClientGone        nobody is there to read an answer
"""

from __future__ import annotations

from http import HTTPStatus

from headrace_core.api.wire import ErrorCode


class WorkerError(Exception):
    """Base of all."""


class SettingsError(WorkerError):
    """The environment does not describe a worker that can run. The message names the variable and the remedy."""


class StartError(WorkerError):
    """The engine is up, but its first forward pass failed. The message says how."""


class EngineEndedError(WorkerError):
    """The engine's process is gone. Nothing but a new worker helps."""


class TornCellError(WorkerError):
    """A record of the cell stayed half-written: the process that writes it died at that moment, or never wrote."""


class RequestError(WorkerError):
    """A request is refused: HTTP status, message, and the code and field where there are."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        code: ErrorCode | None = None,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers


class ClientGone(WorkerError):
    """The client closed its connection while it was still sending."""
