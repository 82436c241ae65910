"""Touches containers from outside: runs probes and lifecycle hooks, and decides when a threshold is crossed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from e2e.cluster.build import KUBERNETES_VERSION

Json = dict[str, Any]

log = logging.getLogger(__name__)

USER_AGENT = "kube-probe/" + ".".join(KUBERNETES_VERSION.removeprefix("v").split(".")[:2])
"""As the kubelet of that version says: major and minor."""
_OK_FROM, _OK_BELOW = 200, 400
_SHOWN_BYTES = 10 * 1024


@dataclass(frozen=True)
class Outcome:
    """What one probe found, with the text an Event shows."""

    ok: bool
    message: str = ""


@dataclass(frozen=True)
class Target:
    """Where a handler is aimed: the pod's address, its named ports, and how to run a command in the container."""

    address: str
    ports: dict[str, int]
    run: Callable[[Sequence[str]], Awaitable[asyncio.subprocess.Process]]


class Threshold:
    """Counts results in a row; `feed` returns the verdict when one is due (kubelet: prober/worker.go)."""

    def __init__(self, success: int, failure: int) -> None:
        self._needed = {True: success, False: failure}
        self._last: bool | None = None
        self._count = 0

    def feed(self, ok: bool) -> bool | None:
        """True or False once that result came often enough in a row, None before."""
        self._count = self._count + 1 if ok == self._last else 1
        self._last = ok
        return ok if self._count >= self._needed[ok] else None


def named_ports(container: Json) -> dict[str, int]:
    """Port name -> number of a container."""
    return {each["name"]: each["containerPort"] for each in container.get("ports") or [] if each.get("name")}


async def run_handler(handler: Json, target: Target, timeout_s: float | None) -> Outcome:
    """Run an exec, httpGet, tcpSocket or sleep handler once; a failure is an outcome, not an exception."""
    if "exec" in handler:
        return await _exec(handler["exec"].get("command") or [], target, timeout_s)
    if "httpGet" in handler:
        return await _http(handler["httpGet"], target, timeout_s)
    if "tcpSocket" in handler:
        return await _tcp(handler["tcpSocket"], target, timeout_s)
    if "sleep" in handler:
        await asyncio.sleep(handler["sleep"]["seconds"])
        return Outcome(True)
    return Outcome(False, f"handler {sorted(handler)} is not offered by this node")


async def _exec(command: Sequence[str], target: Target, timeout_s: float | None) -> Outcome:
    try:
        process = await target.run(command)
    except OSError as error:
        return Outcome(False, f"cannot run {command[0]!r}: {error}")
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return Outcome(False, f"command timed out: {' '.join(command)!r} timed out after {timeout_s:g}s")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Outcome(process.returncode == 0, output[:_SHOWN_BYTES].decode(errors="replace").strip())


def _port(value: int | str, target: Target) -> int | None:
    return value if isinstance(value, int) else target.ports.get(value) or (int(value) if value.isdigit() else None)


async def _http(handler: Json, target: Target, timeout_s: float | None) -> Outcome:
    port = _port(handler["port"], target)
    if port is None:
        return Outcome(False, f"no port is named {handler['port']!r}")
    host = handler.get("host") or target.address
    url = f"{handler.get('scheme', 'HTTP').lower()}://{host}:{port}/{(handler.get('path') or '/').lstrip('/')}"
    headers = {"User-Agent": USER_AGENT, "Accept": "*/*", "Connection": "close"}
    headers.update({each["name"]: each["value"] for each in handler.get("httpHeaders") or []})
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=False)) as session,
            session.get(url, headers=headers) as answer,
        ):
            body = await answer.content.read(_SHOWN_BYTES)
    except TimeoutError:
        return Outcome(False, f'Get "{url}": context deadline exceeded')
    except (aiohttp.ClientError, OSError) as error:
        return Outcome(False, f'Get "{url}": {error}')
    if _OK_FROM <= answer.status < _OK_BELOW:
        return Outcome(True, body.decode(errors="replace"))
    return Outcome(False, f"HTTP probe failed with statuscode: {answer.status}")


async def _tcp(handler: Json, target: Target, timeout_s: float | None) -> Outcome:
    port = _port(handler["port"], target)
    host = handler.get("host") or target.address
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError) as error:
        return Outcome(False, f"dial tcp {host}:{port}: {error or 'i/o timeout'}")
    writer.close()
    return Outcome(True)


async def probe(spec: Json, target: Target, tell: Callable[[bool, Outcome], None]) -> None:
    """Probe for ever by `spec`; `tell` gets a verdict each time that a threshold is met."""
    threshold = Threshold(spec.get("successThreshold") or 1, spec.get("failureThreshold") or 3)
    period_s, timeout_s = spec.get("periodSeconds") or 10, spec.get("timeoutSeconds") or 1
    loop = asyncio.get_running_loop()
    await asyncio.sleep(spec.get("initialDelaySeconds") or 0)
    while True:
        begun = loop.time()
        outcome = await run_handler(spec, target, timeout_s)
        verdict = threshold.feed(outcome.ok)
        if verdict is not None:
            tell(verdict, outcome)
        await asyncio.sleep(max(0.0, begun + period_s - loop.time()))
