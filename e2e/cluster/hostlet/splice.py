"""Touches one proxied TCP connection: passes bytes both ways, ends of one way, and broken connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

Backend = tuple[str, int]

_CONNECT_S = 5.0
# SO_LINGER on with no time: closing resets the connection, so that the other side sees a break and not an end.
_RESET = struct.pack("ii", 1, 0)


class Splice(asyncio.Protocol):
    """One side of a connection; what it receives is written to `peer`.

    A side that ends its sending ends only that way; when both ways have ended, or one side breaks, all is closed.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: Splice | None = None
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is up; nothing is read before the other side is."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self.peer is None:
            transport.pause_reading()

    def join(self, peer: Splice) -> None:
        """Begin to pass bytes between the two."""
        self.peer, peer.peer = peer, self
        for side in (self, peer):
            if side.transport and not side.transport.is_closing():
                side.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        if self.peer and self.peer.transport:
            self.peer.transport.write(data)

    def eof_received(self) -> bool:
        """This side sends no more; the other way stays open."""
        self._ended = True
        if self.peer and self.peer.transport and not self.peer.transport.is_closing():
            if self.peer._ended:
                self.peer.transport.close()
                return False
            self.peer.transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other side too, in the same manner."""
        if self.peer and self.peer.transport and not self.peer.transport.is_closing():
            if error or not self._ended:
                self.peer.reset()
            else:
                self.peer.transport.close()

    def pause_writing(self) -> None:
        """The receiver of this side is slow: read no more from the other."""
        if self.peer and self.peer.transport and not self.peer.transport.is_closing():
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        """The receiver of this side has caught up."""
        if self.peer and self.peer.transport and not self.peer.transport.is_closing():
            self.peer.transport.resume_reading()

    def reset(self) -> None:
        """Break the connection at once."""
        if self.transport:
            sock = self.transport.get_extra_info("socket")
            if sock is not None and not self.transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()


class Frontside(Splice):
    """The client's side: picks a backend when the client has connected; None breaks the connection."""

    def __init__(self, pick: Callable[[], Backend | None]) -> None:
        super().__init__()
        self._pick = pick
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there."""
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone, perhaps before there was a backend."""
        if self._connecting:
            self._connecting.cancel()
        super().connection_lost(error)

    async def _connect(self) -> None:
        backend = self._pick()
        if backend is None:
            self.reset()
            return
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, peer = await asyncio.get_running_loop().create_connection(Splice, *backend)
        except (OSError, TimeoutError):
            self.reset()
            return
        self._connecting = None
        self.join(peer)
