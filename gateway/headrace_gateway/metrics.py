"""The gateway's metrics, on a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from headrace_core.api.names import Metric, Role
from headrace_gateway.registry import Standing, WorkerView

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """All that `GET /metrics` shows."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            Metric.GATEWAY_REQUESTS,
            "Requests answered, by endpoint and HTTP status (499: the client went away).",
            ["endpoint", "code"],
            registry=registry,
        )
        self.retried = Counter(
            Metric.GATEWAY_RETRIED, "Attempts followed by another one, by reason.", ["reason"], registry=registry
        )
        self.lost = Counter(
            Metric.GATEWAY_LOST,
            "Admitted requests that ended without their whole answer, by reason; clients that left not counted.",
            ["reason"],
            registry=registry,
        )
        self.ttft = Histogram(
            Metric.GATEWAY_TTFT_SECONDS,
            "Streamed requests: from arrival to the first event sent.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.tpot = Histogram(
            Metric.GATEWAY_TPOT_SECONDS,
            "Streamed requests: mean time between two events (one token each, unless the worker joins some).",
            registry=registry,
            buckets=_SECONDS,
        )
        self.stage = Histogram(
            Metric.GATEWAY_STAGE_SECONDS,
            "Time spent in a stage of a request: admit, route, prefill, decode_first_byte.",
            ["stage"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._workers = Gauge(
            Metric.GATEWAY_WORKERS, "Workers by role and standing.", ["role", "state"], registry=registry
        )

    def render(self, workers: Iterable[WorkerView]) -> bytes:
        """The text that a scrape gets, with the workers as they stand now."""
        tally = Tally((worker.role, worker.standing) for worker in workers)
        for role in (*Role, None):
            for standing in Standing:
                gauge = self._workers.labels(role=role or "unknown", state=standing)
                gauge.set(tally[role, standing])
        return generate_latest(self._registry)
