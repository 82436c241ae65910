"""Watches the cluster's worker pods through the Kubernetes API: list, then watch, and list again when it must."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from headrace_core.api.names import Label
from headrace_gateway.errors import SettingsError
from headrace_gateway.pods import PodEventType, PodTable, fold, table_of

log = logging.getLogger(__name__)

WATCH_S = 300
"""The server ends a watch after so long; it goes on from the last resource version."""
ANSWER_S = 15.0
"""In which an answer must begin; a watch's begins at once."""
SILENCE_S = 90.0
"""A bookmark comes every minute: more silence means a connection that died without a word."""
LONGEST_WAIT_S = 5.0


class _ListAgain(Exception):
    """The watch cannot go on from where it was: 410, or an error event."""


class PodWatch:
    """Keeps a table of one cluster's worker pods and tells each change.

    `on_change` gets the whole table. Nothing that the API server does ends the watch, and while it is away the last
    table stands.
    """

    def __init__(
        self,
        *,
        cluster: str,
        namespace: str,
        port: int,
        on_change: Callable[[PodTable], None],
        chance: Callable[[], float],
    ) -> None:
        self._namespace = namespace
        # A gateway pod bears the cluster label as well, but never a role.
        self._selector = f"{Label.CLUSTER}={cluster},{Label.ROLE}"
        self._port = port
        self._on_change = on_change
        self._chance = chance

    async def run(self) -> None:
        """Watch until cancelled. Raises SettingsError when no way to reach the API server is configured."""
        failures = 0
        async with client.ApiClient(await _configuration()) as api:
            pods = client.CoreV1Api(api)
            while True:
                try:
                    table, version = await self._list(pods)
                    failures = 0
                    await self._follow(pods, table, version)
                except _ListAgain as reason:
                    log.info("listing the pods again: %s", reason)
                except (client.ApiException, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    failures += 1
                    log.warning("the pods cannot be watched: %s", str(error).partition("\n")[0] or type(error).__name__)
                await asyncio.sleep(wait_s(failures, self._chance()))

    async def _list(self, pods: client.CoreV1Api) -> tuple[PodTable, str]:
        items, version, more = [], "", None
        while True:
            page = await self._call(pods, limit=500, **({"_continue": more} if more else {}))
            body = json.loads(await page.read())
            _raise_for(page.status, body)
            items += body["items"]
            version, more = body["metadata"]["resourceVersion"], body["metadata"].get("continue")
            if not more:
                break
        table = table_of(items, port=self._port)
        self._on_change(table)
        return table, version

    async def _follow(self, pods: client.CoreV1Api, table: PodTable, version: str) -> None:
        while True:
            response = await self._call(
                pods,
                watch=True,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
            )
            async with response:
                if response.status != HTTPStatus.OK:
                    _raise_for(response.status, json.loads(await response.read()))
                async for line in _lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _ListAgain(event["object"].get("message", "error event"))
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        table = fold(table, PodEventType(event["type"]), event["object"], port=self._port)
                        self._on_change(table)
            await asyncio.sleep(wait_s(0, self._chance()))

    async def _call(self, pods: client.CoreV1Api, **options: Any) -> aiohttp.ClientResponse:
        async with asyncio.timeout(ANSWER_S):
            response = await pods.list_namespaced_pod_without_preload_content(
                self._namespace, label_selector=self._selector, _request_timeout=2 * WATCH_S, **options
            )
        assert isinstance(response, aiohttp.ClientResponse)  # noqa: S101 - the client's raw answer has no type
        return response


def wait_s(failures: int, chance: float) -> float:
    """Seconds before the next list after so many failures in a row: doubling up to a bound, spread by `chance`."""
    longest: float = min(LONGEST_WAIT_S, 0.1 * 2 ** min(failures, 6))
    return longest * (0.5 + chance / 2)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # Not readline: a pod can be longer than the reader's buffer.
    rest = b""
    while True:
        async with asyncio.timeout(SILENCE_S):
            chunk = await response.content.readany()
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def _raise_for(status: int, body: dict[str, Any]) -> None:
    if status == HTTPStatus.GONE:
        raise _ListAgain(str(body.get("message", status)))
    if status != HTTPStatus.OK:
        raise OSError(f"{status}: {body.get('message', '')}")


async def _configuration() -> client.Configuration:
    configuration = client.Configuration()
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        try:
            await config.load_kube_config(client_configuration=configuration)
        except config.ConfigException as error:
            raise SettingsError(
                f"neither a pod's service account nor a kubeconfig is there ({error}): "
                "run in a pod, set KUBECONFIG, or name the workers with --workers"
            ) from error
    return configuration
