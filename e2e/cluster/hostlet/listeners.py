"""Touches the kernel's socket tables: which TCP sockets listen on all addresses of this machine."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

# linux/sock_diag.h, linux/netlink.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_LISTEN_STATE = 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_MESSAGE = struct.Struct("=4x2s2x16s28xIIIII")
_RECEIVE_BYTES = 1 << 17

_WILDCARDS = {
    bytes(4): "0.0.0.0",  # noqa: S104 - the addresses that are looked for
    bytes(16): "::",
    bytes(10) + b"\xff\xff" + bytes(4): "::ffff:0.0.0.0",
}
_ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}


def wildcard_listeners() -> dict[int, tuple[str, int]]:
    """Socket inode -> (address, port) of every such socket.

    Asks netlink for listening sockets only; where it is forbidden, reads the tables of all sockets in /proc.
    """
    try:
        return dict(_from_netlink())
    except OSError:
        return dict(from_proc())


def _from_netlink() -> Iterator[tuple[int, tuple[str, int]]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        for family in _ADDRESS_BYTES:
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _LISTEN_STATE)
            header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
            netlink.send(header + request)
            for message in _dump(netlink):
                port, address, *_, inode = _MESSAGE.unpack_from(message)
                if name := _WILDCARDS.get(address[: _ADDRESS_BYTES[family]]):
                    yield inode, (name, int.from_bytes(port))


def _dump(netlink: socket.socket) -> Iterator[bytes]:
    while True:
        data = netlink.recv(_RECEIVE_BYTES)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise OSError("netlink refuses to list sockets")
            yield data[_HEADER.size : length]
            data = data[(length + 3) & ~3 :]


def from_proc() -> Iterator[tuple[int, tuple[str, int]]]:
    """The same, from /proc/net/tcp and /proc/net/tcp6."""
    for table in ("tcp", "tcp6"):
        # There is no tcp6 on a machine without IPv6.
        with contextlib.suppress(FileNotFoundError):
            for row in (Path("/proc/net") / table).read_text().splitlines()[1:]:
                fields = row.split()
                host, _, port = fields[1].partition(":")
                # Each group of four bytes is written in this machine's order.
                groups = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                name = _WILDCARDS.get(b"".join(groups))
                if name and int(fields[3], 16) == _LISTEN_STATE:
                    yield int(fields[9]), (name, int(port, 16))
