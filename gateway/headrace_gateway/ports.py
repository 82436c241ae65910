"""What the pipeline asks of its two sides, the workers' connections and the client's, free of any HTTP library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

JSON = "application/json"
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: HTTP status, content type, body."""

    status: int
    body: bytes
    content_type: str = JSON


class WorkerStream(Protocol):
    """A worker's answer as it arrives. Reading raises WorkerLost when the connection breaks or is abandoned."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def content_type(self) -> str:
        """Media type, without parameters."""

    async def read(self) -> bytes:
        """The rest of the body."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive."""


class Workers(Protocol):
    """Requests to workers. Raises ConnectFailed or WorkerLost; leaving the context closes what is unread."""

    def post(self, address: str, path: str, body: bytes, request_id: str) -> AbstractAsyncContextManager[WorkerStream]:
        """POST a JSON body to `address` (`host:port`)."""


class Client(Protocol):
    """The client's side of one streamed answer. Raises ClientGone once its connection is closed."""

    async def begin(self) -> None:
        """Send the status 200 and the headers of an event stream."""

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body, waiting while the client's buffer is full."""
