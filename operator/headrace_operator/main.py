"""Starts the operator: takes the Lease, then watches and reconciles until it is told to end or the Lease is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Final

import kopf

from headrace_operator import handlers, health
from headrace_operator import metrics as metrics_module
from headrace_operator.apply import Applier
from headrace_operator.elastic import Elastic
from headrace_operator.errors import LeaseLostError, SettingsError
from headrace_operator.events import Recorder
from headrace_operator.kube import Api
from headrace_operator.lease import Lease
from headrace_operator.metrics import Metrics
from headrace_operator.objects import Objects
from headrace_operator.prometheus import Prometheus
from headrace_operator.queue import Queue
from headrace_operator.reconcile import Reconciler
from headrace_operator.reflector import PodReflector
from headrace_operator.settings import Settings, from_environment
from headrace_operator.templates import Templates
from headrace_operator.workers import Workers

log: Final = logging.getLogger(__name__)

EXIT_LEASE_LOST: Final = 3


async def lead(api: Api, settings: Settings, metrics: Metrics, lease: Lease, stop: asyncio.Event) -> None:
    """Watch and reconcile until `stop` is set.

    Raises:
        ExceptionGroup: something failed for good; LeaseLostError among it where the Lease was lost.
    """
    queue = Queue(backoff_max_s=settings.tick_s)
    workers = Workers(settings.worker_timeout_s)
    prometheus = Prometheus(settings.prometheus_url, settings.prometheus_timeout_s)
    reflector = PodReflector(api, settings.watch_namespaces, queue.add)
    recorder = Recorder(api, lease.identity)
    reconciler = Reconciler(
        api=api,
        reflector=reflector,
        workers=workers,
        elastic=Elastic(prometheus, recorder, metrics, settings.prometheus_max_age_s),
        templates=Templates(api),
        objects=Objects(api, time.monotonic),
        applier=Applier(api, reflector, workers, recorder, metrics, crash_after=settings.crash_after),
        metrics=metrics,
        settings=settings,
        fence=lease.transitions,
    )
    watching = kopf.operator(
        registry=handlers.registry(queue, api.connection),
        settings=handlers.settings(),
        standalone=True,
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
        stop_flag=stop,
    )
    try:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(lease.keep()),
                group.create_task(reflector.run()),
                group.create_task(queue.run(reconciler, settings.concurrency)),
            ]
            await watching
            for task in background:
                task.cancel()
    finally:
        await workers.close()
        await prometheus.close()


async def serve(settings: Settings) -> int:
    """Run one operator process; return its exit status.

    Raises:
        SettingsError: no way to the API server is configured.
    """
    metrics = Metrics()
    api = await Api.connect(on_request=lambda method: metrics.api_requests.labels(method).inc())
    servers = [
        await metrics_module.serve(metrics, settings.pod_ip, settings.metrics_port),
        await health.serve(settings.pod_ip, settings.health_port),
    ]
    lease = Lease(api, settings)
    stop = asyncio.Event()
    try:
        if not await _acquire(lease, stop):
            return 0
        metrics.leader.set(1)
        await lead(api, settings, metrics, lease, stop)
    except* LeaseLostError as lost:
        log.error("ending: %s", lost.exceptions[0])  # noqa: TRY400 - no fault of the code: no trace
        return_code = EXIT_LEASE_LOST
    else:
        return_code = 0
    finally:
        metrics.leader.set(0)
        await lease.release()
        for server in servers:
            await server.cleanup()
        await api.close()
    return return_code


async def _acquire(lease: Lease, stop: asyncio.Event) -> bool:
    """Wait for the Lease; False when the process is told to end first."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waiting = asyncio.create_task(lease.acquire())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not waiting.done():
        waiting.cancel()
        return False
    await waiting
    return True


def main() -> None:
    """Entry point of `headrace-operator`."""
    try:
        settings = from_environment(os.environ)
        logging.basicConfig(
            level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
        )
        # kopf tells of every event at INFO; what the operator does is in its own lines.
        logging.getLogger("kopf").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        sys.exit(asyncio.run(serve(settings)))
    except SettingsError as error:
        sys.exit(f"headrace-operator: {error}")
