"""The operator's own metrics, in a registry of their own, and the HTTP server that shows them."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace_core.api.names import Metric

SWITCH_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
DRAIN_BUCKETS_S = (0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """All of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_cluster = ("namespace", "cluster")
        self.flips = Counter(
            Metric.OPERATOR_FLIPS, "Flips by outcome.", (*of_cluster, "outcome", "reason"), registry=self.registry
        )
        self.drain_s = Histogram(
            Metric.OPERATOR_DRAIN_SECONDS,
            "From the first word of a drain to its end, as workers measured it.",
            of_cluster,
            buckets=DRAIN_BUCKETS_S,
            registry=self.registry,
        )
        self.switch_s = Histogram(
            Metric.OPERATOR_SWITCH_SECONDS,
            "From the end of a drain to the new role, as workers measured it.",
            of_cluster,
            buckets=SWITCH_BUCKETS_S,
            registry=self.registry,
        )
        self.pods = Gauge(
            Metric.OPERATOR_PODS,
            "Worker pods by role label and state.",
            (*of_cluster, "role", "state"),
            registry=self.registry,
        )
        self.reconcile_s = Histogram(
            Metric.OPERATOR_RECONCILE_SECONDS, "Duration of a reconcile.", ("outcome",), registry=self.registry
        )
        self.prometheus_age_s = Gauge(
            Metric.OPERATOR_PROMETHEUS_AGE_SECONDS,
            "Age of the oldest sample that the last decision was made from; +Inf while there is none.",
            of_cluster,
            registry=self.registry,
        )
        self.decisions = Counter(
            Metric.OPERATOR_DECISIONS,
            "Decisions by lever and reason.",
            (*of_cluster, "lever", "reason"),
            registry=self.registry,
        )
        self.leader = Gauge(Metric.OPERATOR_LEADER, "1 while this process leads.", registry=self.registry)
        self.api_requests = Counter(
            Metric.OPERATOR_API_REQUESTS, "Requests to the API server by method.", ("method",), registry=self.registry
        )

    def forget(self, namespace: str, cluster: str) -> None:
        """Drop the gauges of a cluster that is gone; its counters stay, as totals do."""
        for gauge in (self.pods, self.prometheus_age_s):
            gauge.remove_by_labels({"namespace": namespace, "cluster": cluster})


async def serve(metrics: Metrics, host: str, port: int) -> web.AppRunner:
    """Serve /metrics until the runner is cleaned up."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
