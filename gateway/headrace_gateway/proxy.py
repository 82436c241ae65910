"""Talks HTTP to the workers: pooled connections, no proxy from the environment, and calls that can be abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from headrace_core.api.wire import PATH_LOAD, PATH_PEERS
from headrace_gateway.errors import ConnectFailed, WorkerLost
from headrace_gateway.ports import JSON
from headrace_gateway.tokens import Tokens

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection, so that no request meets one that is closing."""
READ_BYTES = 2**16

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Call:
    """A request to a worker that is under way."""

    address: str
    heard_at_s: float
    """When it was sent, or when its last bytes came."""
    begun: bool = False
    """The first byte of the body is there."""
    waiting: asyncio.Future[Any] | None = None
    abandoned: bool = False

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Await, and raise WorkerLost if the call is abandoned meanwhile."""
        task = asyncio.ensure_future(awaitable)
        self.waiting = task
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.abandoned and current and not current.cancelling():
                raise WorkerLost(f"{self.address} is silent", address=self.address) from None
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ConnectFailed(f"no connection to {self.address}: {error}", address=self.address) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise WorkerLost(
                f"{self.address} broke off: {error or type(error).__name__}", address=self.address
            ) from error
        finally:
            self.waiting = None

    def abandon(self) -> None:
        self.abandoned = True
        if self.waiting:
            self.waiting.cancel()


class _Stream:
    """A worker's answer as it arrives (ports.WorkerStream)."""

    def __init__(self, response: aiohttp.ClientResponse, call: _Call, clock: Callable[[], float]) -> None:
        self._response = response
        self._call = call
        self._clock = clock
        self.status = response.status
        self.content_type = response.content_type

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self._call.wait(self._response.content.readany()):
            self._call.begun = True
            self._call.heard_at_s = self._clock()
            yield chunk


class WorkerClient:
    """Connections to all workers (ports.Workers), and the monitor's two streams. Use it as a context manager."""

    def __init__(self, tokens: Tokens, *, connect_timeout_s: float, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._calls: set[_Call] = set()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> WorkerClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    @asynccontextmanager
    async def post(self, address: str, path: str, body: bytes, request_id: str) -> AsyncIterator[_Stream]:
        """POST a JSON body. Raises ConnectFailed or WorkerLost; leaving the context closes what is unread."""
        call = _Call(address, self._clock())
        headers = {"Content-Type": JSON, "X-Request-Id": request_id, **self._tokens.header()}
        self._calls.add(call)
        try:
            response = await call.wait(self._open().post(_url(address, path), data=body, headers=headers))
            try:
                yield _Stream(response, call, self._clock)
            finally:
                # Closes the connection unless the answer was read to its end: the worker sees that and stops.
                response.close()
        finally:
            self._calls.discard(call)

    def abandon(self, is_given_up: Callable[[str, float, bool], bool]) -> int:
        """Break off the calls for which `is_given_up(address, heard_at_s, begun)`; returns how many there were."""
        given_up = [call for call in self._calls if is_given_up(call.address, call.heard_at_s, call.begun)]
        for call in given_up:
            call.abandon()
        return len(given_up)

    async def load_events(self, address: str, *, silence_s: float) -> AsyncIterator[bytes]:
        """The `data:` lines of a worker's load stream. Raises WorkerLost when it ends or is silent for too long."""
        timeout = aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s, sock_read=silence_s)
        try:
            async with self._open().get(
                _url(address, PATH_LOAD), headers=self._tokens.header(), timeout=timeout
            ) as response:
                _expect_ok(response, address)
                async for line in response.content:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise WorkerLost(f"no load report from {address}: {error or 'silence'}", address=address) from error
        raise WorkerLost(f"{address} ended its load stream", address=address)

    async def put_peers(self, address: str, lines: AsyncIterator[bytes]) -> None:
        """Send NDJSON lines to a worker until it ends the exchange. Raises WorkerLost when it breaks."""
        headers = {"Content-Type": "application/x-ndjson", **self._tokens.header()}
        try:
            async with self._open().put(_url(address, PATH_PEERS), data=lines, headers=headers) as response:
                _expect_ok(response, address)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise WorkerLost(f"peers to {address}: {error or type(error).__name__}", address=address) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use WorkerClient as a context manager")
        return self._session


def _url(address: str, path: str) -> str:
    return f"http://{address}{path}"


def _expect_ok(response: aiohttp.ClientResponse, address: str) -> None:
    if response.status != 200:  # noqa: PLR2004 - HTTP's OK
        raise WorkerLost(f"{address} answered {response.status}", address=address)
