"""The table of requests in flight: who asked when, how far each has come, and on which workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from headrace_gateway.openai import ClientRequest


class RequestPhase(StrEnum):
    """How far a request has come."""

    ROUTE = "route"
    PREFILL = "prefill"
    DECODE = "decode"
    """Sent to a decode worker: it waits there, or its KV is being received."""
    STREAM = "stream"


@dataclass(slots=True)
class Entry:
    """One request in flight. It holds nothing of the prompt, so that the table may be shown."""

    request_id: str
    endpoint: str
    stream: bool
    arrived_at_s: float
    phase: RequestPhase = RequestPhase.ROUTE
    prefill_worker: str = ""
    decode_worker: str = ""
    failed_attempts: int = 0


class RequestTable:
    """All requests in flight. Times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._next = 0

    @contextmanager
    def entered(self, request: ClientRequest, now_s: float) -> Iterator[Entry]:
        """Hold an entry for a request while the context lasts. Two requests may bear the same id."""
        self._next += 1
        key = self._next
        entry = Entry(request.request_id, request.endpoint, request.stream, now_s)
        self._entries[key] = entry
        try:
            yield entry
        finally:
            del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def snapshot(self, now_s: float) -> list[dict[str, object]]:
        """The table as `GET /debug/requests` shows it, oldest first."""
        return [
            {
                "id": entry.request_id,
                "endpoint": entry.endpoint,
                "stream": entry.stream,
                "phase": entry.phase,
                "age_s": round(now_s - entry.arrived_at_s, 3),
                "prefill_worker": entry.prefill_worker,
                "decode_worker": entry.decode_worker,
                "failed_attempts": entry.failed_attempts,
            }
            for entry in self._entries.values()
        ]
