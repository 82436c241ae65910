"""Reads the bearer tokens that the cluster's Secret mounts, and reads them anew when the file changes."""

from __future__ import annotations

import hmac
from pathlib import Path


class Tokens:
    """The lines of a token file: any of them is accepted, the first is sent. No file: nothing is asked or sent."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._stamp: tuple[int, int, int] | None = None
        self._lines: tuple[str, ...] = ()

    def header(self) -> dict[str, str]:
        """The `Authorization` header to send to a worker; empty without a token."""
        lines = self._current()
        return {"Authorization": f"Bearer {lines[0]}"} if lines else {}

    def accepts(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header's value holds one of the tokens. True where no file is set."""
        if self._path is None:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode()
        # All are compared, in constant time each, so that the time taken tells nothing of a token.
        matches = [hmac.compare_digest(given, line.encode()) for line in self._current()]
        return scheme.lower() == "bearer" and any(matches)

    def _current(self) -> tuple[str, ...]:
        if self._path is None:
            return ()
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                # What no header can carry is no token: a Secret with garbage in it must not stop the streams.
                lines = (line.strip() for line in self._path.read_text("ascii", "replace").splitlines())
                self._lines = tuple(line for line in lines if line and line.isascii() and line.isprintable())
                self._stamp = stamp
        except FileNotFoundError:
            # A mounted Secret is swapped by renaming a link: for a moment the old lines are all there is.
            pass
        return self._lines
