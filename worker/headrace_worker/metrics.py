"""The worker's own metrics, and how they join vLLM's in one exposition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_core.api import names
from headrace_core.api.names import Role
from headrace_worker.engine.interface import EngineState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

SWITCH_BUCKETS_S: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
"""Fine around the 5 to 7 ms that TetriInfer's flip takes (arXiv 2401.11181, section 3.5)."""
DRAIN_BUCKETS_S: Final = (
    0.0005,
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)

PROCESS_START: Final = b"process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the metrics say at one scrape."""

    role: Role
    epoch: int
    busy_s: float
    engine: EngineState


class Metrics:
    """A registry of the worker's own. `snapshot` is called once a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.switch_seconds = Histogram(
            names.Metric.WORKER_SWITCH_SECONDS,
            "From the last word of a drain until the engine's scheduler has read the new epoch.",
            buckets=SWITCH_BUCKETS_S,
            registry=self._registry,
        )
        self.drain_seconds = Histogram(
            names.Metric.WORKER_DRAIN_SECONDS,
            "From the request for a role change until the worker was drained, or rolled back.",
            buckets=DRAIN_BUCKETS_S,
            registry=self._registry,
        )
        self.refused = Counter(
            names.Metric.WORKER_REFUSED, "Requests sent elsewhere.", ["reason"], registry=self._registry
        )

    def watch(self, snapshot: Callable[[], Snapshot]) -> None:
        """Export what `snapshot` returns, read anew at each scrape."""
        self._registry.register(_Gauges(snapshot))

    def exposition(self, engines: bytes) -> bytes:
        """vLLM's exposition in the text format with the worker's own behind it.

        vLLM exports the process's metrics as well, unless it counts over several processes.
        """
        parts = [engines if not engines or engines.endswith(b"\n") else engines + b"\n"]
        if PROCESS_START not in engines:
            parts.append(generate_latest(self._process))
        parts.append(generate_latest(self._registry))
        return b"".join(parts)


class _Gauges(Collector):
    """Reads the worker's state at the moment of a scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry would ask for a snapshot before there is an engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        now = self._snapshot()
        yield _roles(now.role)
        gauges = (
            (names.Metric.WORKER_EPOCH, "Role changes since the process started.", now.epoch),
            (names.Metric.WORKER_HELD_KV_BLOCKS, "KV blocks kept for decode workers.", now.engine.held_kv_blocks),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counters = (
            (names.Metric.WORKER_BUSY_SECONDS, "Seconds with at least one request inside.", now.busy_s),
            (names.Metric.WORKER_KV_SENT_BYTES, "KV fetched from here.", now.engine.kv_sent_bytes),
            (names.Metric.WORKER_KV_RECEIVED_BYTES, "KV fetched from others.", now.engine.kv_received_bytes),
            (names.Metric.WORKER_KV_RECEIVES, "Requests whose KV was fetched from others.", now.engine.kv_receives),
            (
                names.Metric.WORKER_KV_RECEIVE_FAILURES,
                "Requests whose KV could not be fetched.",
                now.engine.kv_receive_failures,
            ),
            (names.Metric.WORKER_PREFILLED_TOKENS, "Prompt tokens computed here.", now.engine.prefilled_tokens),
        )
        for name, text, number in counters:
            yield CounterMetricFamily(name, text, value=number)


def _roles(role: Role) -> Metric:
    family = GaugeMetricFamily(names.Metric.WORKER_ROLE, "1 for the role that the worker has.", labels=["role"])
    for one in Role:
        family.add_metric([one.value], float(one is role))
    return family
