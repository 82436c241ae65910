"""Starts the engine and the server in front of it, and ends both without breaking a request."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from headrace_worker import role
from headrace_worker.changer import RoleChanger
from headrace_worker.dispatcher import Dispatcher
from headrace_worker.door import Door
from headrace_worker.engine.interface import Engine
from headrace_worker.errors import EngineEndedError, SettingsError, StartError
from headrace_worker.metrics import Metrics, Snapshot
from headrace_worker.peers import PeerTable
from headrace_worker.report import Reporter
from headrace_worker.role import Identity, Standing
from headrace_worker.server import PATH_MODELS, PATH_TEXT, Parts, Server, call
from headrace_worker.settings import Settings, documentation, from_environment
from headrace_worker.tokens import Tokens

log = logging.getLogger("headrace_worker")

SHUTDOWN_POLL_S: Final = 0.02
CLOSE_TIMEOUT_S: Final = 3
"""Seconds that open connections get once all work is done: they are idle, or streams without end."""


@dataclass(slots=True)
class Worker:
    """A worker that can serve."""

    server: Server
    door: Door
    changer: RoleChanger
    reporter: Reporter
    engine: Engine
    metrics: Metrics


def assemble(
    settings: Settings, engine: Engine, vllm: ASGIApp, *, max_model_len: int, clock: Callable[[], float]
) -> Worker:
    """Put the parts of a worker together. `max_model_len` is the context length in tokens."""
    me = Identity(boot_id=str(uuid.uuid4()), pod_uid=settings.pod_uid)
    door, metrics = Door(Standing(settings.role), clock), Metrics()
    changer = RoleChanger(
        door,
        engine,
        metrics,
        me,
        drain_poll_s=settings.drain_poll_s,
        switch_timeout_s=settings.switch_timeout_s,
        clock=clock,
    )
    reporter = Reporter(
        door,
        engine,
        me,
        pod=settings.pod_name,
        address=settings.address,
        interval_s=settings.load_interval_s,
    )
    peers = PeerTable(settings.peers_max_age_s)
    dispatcher = Dispatcher(peers, random.Random(), clock, max_model_len=max_model_len)  # noqa: S311 - no secret
    metrics.watch(lambda: Snapshot(door.standing.role, door.standing.epoch, door.busy_s, engine.state()))
    parts = Parts(engine, door, changer, reporter, peers, dispatcher, metrics, Tokens(settings.token_file), clock)
    server = Server(vllm, parts, max_body_bytes=settings.max_body_bytes)
    return Worker(server, door, changer, reporter, engine, metrics)


async def first_pass(vllm: ASGIApp, model: str) -> int:
    """Run one real forward pass through vLLM's own API, and return the model's context length in tokens.

    Raises:
        StartError: vLLM answers with an error.
    """
    models = await call(vllm, "GET", PATH_MODELS)
    if models.status != HTTPStatus.OK:
        raise StartError(f"vLLM's list of models answers {models.status}: {models.body.decode(errors='replace')}")
    request = json.dumps({"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}).encode()
    answer = await call(vllm, "POST", PATH_TEXT, request)
    if answer.status != HTTPStatus.OK:
        raise StartError(f"the first forward pass answers {answer.status}: {answer.body.decode(errors='replace')}")
    return int(json.loads(models.body)["data"][0]["max_model_len"])


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own: the worker drains first, and closes the server then."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve(worker: Worker, listener: socket.socket, asked_to_stop: asyncio.Event, settings: Settings) -> None:
    """Serve until `asked_to_stop`, then finish what is in flight and what others still fetch.

    An error of the engine ends it at once, as an ExceptionGroup.
    """
    config = uvicorn.Config(
        worker.server,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    server = _Uvicorn(config)
    async with asyncio.TaskGroup() as group:
        parts = (worker.changer.run(), worker.reporter.run(), _watch(worker.engine))
        background = [group.create_task(part) for part in parts]
        serving = group.create_task(server.serve(sockets=[listener]))
        await asked_to_stop.wait()
        worker.door.standing = role.stop(worker.door.standing)
        log.info("stopping: %d requests in flight", worker.door.in_flight)
        await _drained(worker, settings.shutdown_timeout_s)
        worker.server.close()
        server.should_exit = True
        await serving
        for task in background:
            task.cancel()


async def _watch(engine: Engine) -> None:
    """A worker that outlived its engine would go on to report its last state, and be chosen for standing idle."""
    await engine.ended()
    raise EngineEndedError("the engine has ended by itself: the log above says why")


async def _drained(worker: Worker, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not worker.door.is_drained(worker.engine.state()):  # noqa: ASYNC110 - the engine sends no event
                await asyncio.sleep(SHUTDOWN_POLL_S)
    except TimeoutError:
        state = worker.engine.state()
        log.warning(
            "stopping with %d requests and %d KV blocks held after %g s",
            worker.door.in_flight,
            state.held_kv_blocks,
            timeout_s,
        )


@asynccontextmanager
async def _stop_signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, asked_to_stop.set)
    try:
        yield asked_to_stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def run(settings: Settings, listener: socket.socket) -> None:
    """Load the model, run one forward pass, and serve."""
    # Imported here: vLLM takes seconds to import, and --help needs none of it.
    from headrace_worker.engine.start import started  # noqa: PLC0415

    async with started(settings) as (engine, vllm):
        max_model_len = await first_pass(vllm, settings.name)
        worker = assemble(settings, engine, vllm, max_model_len=max_model_len, clock=time.monotonic)
        async with _stop_signals() as asked_to_stop:
            log.info("serving %s as %s on %s", settings.name, settings.role, settings.address)
            await serve(worker, listener, asked_to_stop, settings)


def _leave(*_: object) -> None:
    """Ends a worker that is still loading. As the first process of a container it would not hear SIGTERM otherwise."""
    log.info("stopping before the model is loaded")
    raise SystemExit(0)


def listen(settings: Settings) -> socket.socket:
    """A socket bound to the worker's address: a port that is taken shows before the model is loaded.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in settings.pod_ip else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.pod_ip, settings.port))
    except OSError:
        listener.close()
        raise
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    """The command `headrace-worker`.

    Returns the exit code: 0 after a stop that was asked for, 1 when the engine fails, 2 on bad settings.
    """
    parser = argparse.ArgumentParser(
        prog="headrace-worker",
        description="Serve one model with vLLM, as a prefill or a decode worker, and change between the two.",
        epilog="Settings, from the environment:\n" + documentation(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        settings = from_environment(os.environ)
        signal.signal(signal.SIGTERM, _leave)
        with listen(settings) as listener:
            uvloop.run(run(settings, listener))
    except SettingsError as error:
        print(f"headrace-worker: {error}", file=sys.stderr)
        return 2
    except (StartError, ValueError, OSError) as error:
        print(f"headrace-worker: cannot serve: {error}", file=sys.stderr)
        return 1
    return 0
