"""Starts the gateway, and ends it without breaking a request."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop
from aiohttp import web

from headrace_gateway.app import Gateway, Readiness
from headrace_gateway.errors import SettingsError
from headrace_gateway.metrics import Metrics
from headrace_gateway.monitor import Monitor
from headrace_gateway.pipeline import Pipeline
from headrace_gateway.pods import PodTable, static_table
from headrace_gateway.proxy import WorkerClient
from headrace_gateway.registry import Registry, Silence
from headrace_gateway.release import Releases
from headrace_gateway.requests import RequestTable
from headrace_gateway.settings import Settings, documentation, from_environment
from headrace_gateway.steps.admit import Admission
from headrace_gateway.steps.recover import Bounds
from headrace_gateway.tokens import Tokens

log = logging.getLogger("headrace_gateway")

RELEASE_DRAIN_S = 3.0


@dataclass(slots=True)
class Running:
    """A gateway that serves."""

    gateway: Gateway
    registry: Registry
    port: int
    background: asyncio.Task[None]
    """Ends only by an error: the pod watch or the monitor has failed for good."""


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Running]:
    """Serve while the context lasts; leaving it waits for the requests in flight.

    Raises OSError if the port is taken.
    """
    tokens, metrics = Tokens(settings.token_file), Metrics()
    registry = Registry(Silence(settings.suspect_after_s, settings.out_after_s))
    readiness = Readiness()
    async with WorkerClient(tokens, connect_timeout_s=settings.connect_timeout_s, clock=time.monotonic) as client:
        releases = Releases(client)
        gateway = Gateway(
            settings=settings,
            pipeline=_pipeline(settings, client, registry, releases, metrics),
            metrics=metrics,
            tokens=tokens,
            readiness=readiness,
            admission=Admission(settings.max_in_flight),
        )
        monitor = _monitor(settings, client, registry)
        background = asyncio.create_task(_background(settings, registry, readiness, monitor))
        runner = web.AppRunner(
            gateway.application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=settings.shutdown_timeout_s,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
            await site.start()
            yield Running(gateway, registry, runner.addresses[0][1], background)
        finally:
            readiness.stopping = True
            await runner.cleanup()
            await releases.drain(RELEASE_DRAIN_S)
            background.cancel()
            await asyncio.wait({background})


def _pipeline(
    settings: Settings, client: WorkerClient, registry: Registry, releases: Releases, metrics: Metrics
) -> Pipeline:
    return Pipeline(
        workers=client,
        registry=registry,
        releases=releases,
        table=RequestTable(),
        metrics=metrics,
        bounds=Bounds(settings.worker_wait_s, settings.max_attempts),
        handoff_max_age_s=settings.handoff_max_age_s,
        clock=time.monotonic,
        chance=random.random,
    )


def _monitor(settings: Settings, client: WorkerClient, registry: Registry) -> Monitor:
    return Monitor(
        registry,
        client,
        out_after_s=settings.out_after_s,
        abandon_after_s=settings.abandon_after_s,
        stream_idle_s=settings.stream_idle_s,
        clock=time.monotonic,
        chance=random.random,
    )


async def _background(settings: Settings, registry: Registry, readiness: Readiness, monitor: Monitor) -> None:
    def take_over(table: PodTable) -> None:
        registry.set_pods(table)
        readiness.synced = True

    async with asyncio.TaskGroup() as group:
        if settings.static_workers:
            take_over(static_table(settings.static_workers))
        else:
            # Imported here: the client library takes a second, and is not needed without Kubernetes.
            from headrace_gateway.kube import PodWatch  # noqa: PLC0415

            watch = PodWatch(
                cluster=settings.cluster,
                namespace=settings.namespace,
                port=settings.worker_port,
                on_change=take_over,
                chance=random.random,
            )
            group.create_task(watch.run())
        group.create_task(monitor.run())


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    async with running(settings) as instance:
        log.info("serving %s on %s:%d", settings.served_name, settings.host, instance.port)
        stop = asyncio.create_task(asked_to_stop.wait())
        await asyncio.wait({stop, instance.background}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if instance.background.done():
            await _raise_cause_of(instance.background)
        instance.gateway.readiness.stopping = True
        log.info("stopping: %d requests in flight", instance.gateway.admission.in_flight)
        # Services still send here until they have seen that this pod is going.
        await asyncio.sleep(settings.lame_duck_s)


async def _raise_cause_of(background: asyncio.Task[None]) -> None:
    try:
        await background
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


def main(argv: Sequence[str] | None = None) -> int:
    """The command `headrace-gateway`. Returns the exit code: 0 after a stop that was asked for, 2 on bad settings."""
    parser = argparse.ArgumentParser(
        prog="headrace-gateway",
        description="Serve the OpenAI API from prefill and decode workers.",
        epilog="Settings, from the environment:\n" + documentation(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", help="host:port,host:port: run with these workers, without Kubernetes")
    parser.add_argument("--port", help="port to listen on")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    environment = dict(os.environ)
    if options.workers:
        environment["HEADRACE_WORKERS"] = options.workers
    if options.port:
        environment["HEADRACE_PORT"] = options.port
    try:
        uvloop.run(serve(from_environment(environment)))
    except SettingsError as error:
        print(f"headrace-gateway: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"headrace-gateway: cannot serve: {error}", file=sys.stderr)
        return 1
    return 0
