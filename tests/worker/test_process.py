"""The worker's end: by SIGTERM as a process, and by an engine that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from headrace_worker.errors import EngineEndedError
from tests.worker.fakes import KV, serving, until

PROGRAM = """
import asyncio, sys, time, types
from contextlib import asynccontextmanager
from tests.worker.fakes import FakeEngine, FakeVllm

@asynccontextmanager
async def started(settings):
    if settings.name == "slow-to-load":
        print("loading", flush=True)
        time.sleep(60)
    engine, vllm = FakeEngine(), FakeVllm()
    engine.held.add("r-1")
    engine.set(held_requests=1)
    async def slowly(number):
        await asyncio.sleep(0.05)
    vllm.goes_on = slowly
    vllm.chunks = vllm.chunks * 10
    yield engine, vllm
    print("engine ended", flush=True)

start = types.ModuleType("headrace_worker.engine.start")
start.started = started
sys.modules[start.__name__] = start
from headrace_worker.main import main
sys.exit(main([]))
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        return host, port


@asynccontextmanager
async def process(address: tuple[str, int], **environment: str) -> AsyncIterator[subprocess.Popen[str]]:
    variables = {
        "HEADRACE_MODEL": "file:///tiny",
        "HEADRACE_ROLE": "prefill",
        "HEADRACE_POD_IP": address[0],
        "HEADRACE_PORT": str(address[1]),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=dict(os.environ) | variables | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


async def until_ready(http: httpx.AsyncClient, child: subprocess.Popen[str]) -> None:
    async with asyncio.timeout(30):
        while child.poll() is None:
            try:
                assert (await http.get("/readyz")).status_code == 200
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
            else:
                return
    pytest.fail(f"ended with {child.returncode}: {child.communicate()[1]}")


async def test_sigterm_refuses_new_work_finishes_the_old_and_waits_for_held_kv(address: tuple[str, int]) -> None:
    base = f"http://{address[0]}:{address[1]}"
    async with process(address) as child, httpx.AsyncClient(base_url=base, trust_env=False, timeout=10) as http:
        await until_ready(http, child)
        async with (
            http.stream("GET", "/v1/load") as load,
            http.stream("POST", "/v1/completions", json={"stream": True}) as answer,
        ):
            chunks = answer.aiter_raw()
            text = await anext(chunks)
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while (await http.get("/v1/pd_role")).json()["phase"] != "draining":
                    await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "try_another")
            body = {"role": "decode", "expected_epoch": 0, "drain_timeout": 1}
            assert (await http.post("/v1/pd_role", json=body)).json()["error"]["code"] == "shutting_down"
            async for chunk in chunks:
                text += chunk
            assert text.count(b"data: ") == 30
            await asyncio.sleep(0.1)
            assert child.poll() is None  # the KV is still held
            assert (await http.post("/v1/release", json={"kv_transfer_params": KV})).json() == {"released": 1}
            told = [line async for line in load.aiter_lines() if line]
            assert '"accepting":true' in told[0]
            assert '"accepting":false' in told[-1]
        out, errors = await asyncio.to_thread(child.communicate, timeout=10)
        assert child.returncode == 0, errors
        assert "engine ended" in out


async def test_a_stop_does_not_wait_for_ever(address: tuple[str, int]) -> None:
    base = f"http://{address[0]}:{address[1]}"
    async with (
        process(address, HEADRACE_WORKER_SHUTDOWN_TIMEOUT="0.2") as child,
        httpx.AsyncClient(base_url=base, trust_env=False) as http,
    ):
        await until_ready(http, child)
        child.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(child.communicate, timeout=10)
        assert child.returncode == 0, errors
        assert "stopping with 0 requests" in errors


async def test_sigterm_ends_a_worker_that_is_still_loading(address: tuple[str, int]) -> None:
    async with process(address, HEADRACE_MODEL="file:///slow-to-load") as child:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "loading\n"
        child.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(child.communicate, timeout=10)
        assert child.returncode == 0, errors
        assert "stopping before the model is loaded" in errors
        assert "Traceback" not in errors


async def test_a_port_that_is_taken_is_told_at_once(address: tuple[str, int]) -> None:
    with socket.create_server(address):
        async with process(address) as child:
            out, errors = await asyncio.to_thread(child.communicate, timeout=30)
            assert child.returncode == 1
            assert "headrace-worker: cannot serve:" in errors
            assert "engine ended" not in out


async def test_bad_settings_are_told_in_one_line(address: tuple[str, int]) -> None:
    async with process(address, HEADRACE_ROLE="both") as child:
        _, errors = await asyncio.to_thread(child.communicate, timeout=30)
        assert child.returncode == 2
        assert errors == "headrace-worker: HEADRACE_ROLE is 'both': give one of prefill, decode\n"


async def test_a_change_under_way_is_finished_before_the_end() -> None:
    async with serving() as rig:
        rig.engine.set(running_requests=1)
        await rig.flip()
        rig.stop.set()
        await until(lambda: rig.worker.door.standing.stopping)
        rig.engine.set(running_requests=0)
        await asyncio.wait_for(rig.serving, 5)


async def test_a_stream_of_peers_does_not_hold_up_the_end() -> None:
    async with serving() as rig:

        async def for_ever() -> AsyncIterator[bytes]:
            while True:
                yield b'{"decode": []}\n'
                await asyncio.sleep(0.02)

        telling = asyncio.create_task(rig.http.put("/v1/peers", content=for_ever()))
        await asyncio.sleep(0.1)
        started_s = asyncio.get_running_loop().time()
        rig.stop.set()
        await asyncio.wait_for(rig.serving, 5)
        assert asyncio.get_running_loop().time() - started_s < 1.5
        telling.cancel()


async def test_an_engine_that_is_gone_ends_the_worker() -> None:
    async with serving() as rig:
        rig.engine.broken = RuntimeError("the engine is gone")
        await asyncio.wait({rig.serving}, timeout=5)
        failure = rig.serving.exception()
        assert isinstance(failure, ExceptionGroup)
        assert "the engine is gone" in str(failure.exceptions[0])


@pytest.mark.parametrize("stopping", [False, True])
async def test_an_engine_that_ends_by_itself_ends_the_worker(stopping: bool) -> None:
    """Its last state stays readable: work that is in there must not be waited for."""
    async with serving() as rig:
        rig.engine.set(running_requests=1)
        if stopping:
            rig.stop.set()
            await until(lambda: rig.worker.door.standing.stopping)
        rig.engine.gone.set()
        await asyncio.wait({rig.serving}, timeout=5)
        failure = rig.serving.exception()
        assert isinstance(failure, ExceptionGroup)
        assert isinstance(failure.exceptions[0], EngineEndedError)
