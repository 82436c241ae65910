"""Knows the bearer tokens of the cluster's Secret, and reads them anew when their file changes."""

from __future__ import annotations

import hmac
from pathlib import Path


class Tokens:
    """The lines of a token file, any of which opens the door: so a token can be replaced without a gap."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._version: tuple[int, int, int] | None = None
        self._tokens: tuple[bytes, ...] = ()

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether the value of an `Authorization` header holds a token. Without a file everything does."""
        if self._path is None:
            return True
        scheme, _, given = (authorization or b"").partition(b" ")
        self._refresh(self._path)
        # Each is compared in full: the time taken tells nothing of any.
        matches = [hmac.compare_digest(given.strip(), token) for token in self._tokens]
        return scheme.lower() == b"bearer" and any(matches)

    def _refresh(self, path: Path) -> None:
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_ino, status.st_size)
            if version != self._version:
                lines = path.read_bytes().splitlines()
                self._tokens = tuple(line.strip() for line in lines if line.strip())
                self._version = version
        except FileNotFoundError:
            # The kubelet swaps a mounted Secret by renaming a link; without a file what was read last still holds.
            return
