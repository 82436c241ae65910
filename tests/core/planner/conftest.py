"""Runs that are short enough for a test: what is tested is the search, and not how well a long run settles."""

from __future__ import annotations

import pytest

from headrace_core.planner import goodput, trial


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SCREEN_REQUESTS", 600)
    monkeypatch.setattr(trial, "MOST_REQUESTS", 2400)
    monkeypatch.setattr(goodput, "REPLICATION_FACTOR", 2)
