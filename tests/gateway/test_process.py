"""The command `headrace-gateway` as a process: it serves, ends in order on SIGTERM, and says what is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from tests.gateway.fakes import MODEL, FakeWorker, decode_answer, decoder, prefill

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HEADRACE_SERVED_NAME": MODEL,
    "HEADRACE_POD_IP": "127.0.0.1",
    "HEADRACE_GATEWAY_LAME_DUCK": "0.3",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def gateway_process(*workers: FakeWorker, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start(stack)
        addresses = ",".join(worker.address for worker in workers)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "headrace_gateway", "--workers", addresses, "--port", str(port)),
            env=ENVIRONMENT,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_sigterm_lets_a_stream_end() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    workers = (prefill("p0"), decoder("d0", decode_answer("a" * 40, gap_s=0.03)))
    async with gateway_process(*workers, port=port) as process, aiohttp.ClientSession() as session:

        async def ready() -> int:
            try:
                async with session.get(f"{url}/readyz") as response:
                    return response.status
            except aiohttp.ClientConnectorError:
                return 0

        async with asyncio.timeout(15):
            while await ready() != 200:
                await asyncio.sleep(0.02)
        body = {"prompt": "a", "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
            first = await response.content.readline()
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            assert await ready() == 503
            rest = await response.content.read()
        assert (first + rest).count(b'"a"') == 40
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await process.wait() == 0


async def _end_of(arguments: list[str], **changes: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_gateway",
        *arguments,
        env={**ENVIRONMENT, **changes},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(15):
        _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode()


async def test_bad_settings_end_with_2_and_name_the_variable() -> None:
    code, said = await _end_of([])
    assert code == 2
    assert "HEADRACE_CLUSTER" in said


async def test_taken_port_ends_with_1() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        code, said = await _end_of(["--workers", "127.0.0.1:9", "--port", str(holder.getsockname()[1])])
    assert code == 1
    assert "cannot serve" in said
    assert "Traceback" not in said


async def test_no_way_to_kubernetes_ends_with_2() -> None:
    code, said = await _end_of(
        ["--port", "0"], HEADRACE_CLUSTER="c", HEADRACE_NAMESPACE="n", KUBECONFIG="/nowhere", HOME="/nowhere"
    )
    assert code == 2
    assert "KUBECONFIG" in said
    assert "Traceback" not in said
