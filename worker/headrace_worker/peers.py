"""Knows the decode workers from what the gateways' monitors tell, and forgets those that are silent.

Each gateway sends the whole list over a stream of its own. A worker is known while some gateway still lists it; of
several reports the newest counts, and one that no gateway has news of any more is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport


@final
@dataclass(slots=True)
class _Source:
    heard_s: float
    reports: dict[str, LoadReport] = field(default_factory=dict)


@final
@dataclass(slots=True)
class _Progress:
    sequence: int
    news_s: float
    """When a report with a higher sequence was last heard."""


@final
class PeerTable:
    """Reports of decode workers by source. Times are seconds of a monotonic clock."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._sources: dict[int, _Source] = {}
        self._progress: dict[tuple[str, str], _Progress] = {}
        """By pod and boot id: a frozen worker is still listed, but its sequence stands still."""

    def hear(self, source: int, reports: Iterable[LoadReport], now_s: float) -> None:
        """Take over one source's list, in place of its last one."""
        listed = {report.pod: report for report in reports if report.role is Role.DECODE}
        for report in listed.values():
            key = (report.pod, report.boot_id)
            known = self._progress.get(key)
            if known is None:
                self._progress[key] = _Progress(report.sequence, now_s)
            elif report.sequence > known.sequence:
                known.sequence, known.news_s = report.sequence, now_s
        self._sources[source] = _Source(now_s, listed)

    def newest(self, now_s: float) -> list[LoadReport]:
        """The newest report of each worker that is known, by name."""
        self._forget(now_s)
        best: dict[str, LoadReport] = {}
        for source in self._sources.values():
            for pod, report in source.reports.items():
                if (pod, report.boot_id) not in self._progress:
                    continue
                other = best.get(pod)
                if other is None or self._age_key(report) > self._age_key(other):
                    best[pod] = report
        return [best[pod] for pod in sorted(best)]

    def _age_key(self, report: LoadReport) -> tuple[float, int]:
        # Of two processes of one pod the one that still reports is the newer.
        return self._progress[report.pod, report.boot_id].news_s, report.sequence

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - self._max_age_s
        self._sources = {key: one for key, one in self._sources.items() if one.heard_s > oldest_s}
        self._progress = {key: one for key, one in self._progress.items() if one.news_s > oldest_s}
