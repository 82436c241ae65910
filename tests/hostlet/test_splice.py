"""The proxy's two ends of a connection: bytes, half-closes, breaks and slow receivers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from e2e.cluster.hostlet.splice import Backend, Frontside

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def proxied(handler: Handler | None) -> AsyncIterator[Backend]:
    """The address of a proxy in front of `handler`; None is a backend that refuses."""
    backend = await asyncio.start_server(handler or _hang_up, "127.0.0.1", 0)
    address = backend.sockets[0].getsockname()
    if handler is None:
        backend.close()
    server = await asyncio.get_running_loop().create_server(lambda: Frontside(lambda: address), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        backend.close()


async def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_an_end_is_passed_on_and_the_answer_comes_back() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % len(await reader.read()))
        writer.close()

    async with proxied(count) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x" * 3_000_000)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b"3000000"
        writer.close()


async def test_a_backend_that_ends_first_can_still_be_written_to() -> None:
    heard = asyncio.get_running_loop().create_future()

    async def speak_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.write_eof()
        heard.set_result(await reader.read())
        writer.close()

    async with proxied(speak_first) as address:
        reader, writer = await asyncio.open_connection(*address)
        assert await asyncio.wait_for(reader.read(), 5) == b"hello"
        writer.write(b"late")
        writer.write_eof()
        assert await asyncio.wait_for(heard, 5) == b"late"
        writer.close()


async def test_a_break_is_passed_on_as_a_break() -> None:
    broken = asyncio.get_running_loop().create_future()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        except ConnectionResetError as error:
            broken.set_result(error)
        else:
            broken.set_result(None)
        writer.close()

    async with proxied(wait) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"x")
        await asyncio.sleep(0.1)
        writer.transport.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        assert isinstance(await asyncio.wait_for(broken, 5), ConnectionResetError)


async def test_a_backend_that_is_not_there_breaks_the_connection() -> None:
    async with proxied(None) as address:
        reader, writer = await asyncio.open_connection(*address)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_a_slow_receiver_holds_the_sender_back() -> None:
    sent = 0
    go_on = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        while await reader.read(1 << 20):
            pass
        writer.close()

    async with proxied(deaf) as address:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while sent < 64 << 20:
                    writer.write(b"x" * 65536)
                    await writer.drain()
                    sent += 65536
        assert sent < 64 << 20, "the proxy takes in all that is sent"
        go_on.set()
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
