"""Touches the API server: one small client per identity, and a list-and-watch loop that outlives its restarts."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

JSON_TYPE = "application/json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

Json = dict[str, Any]

log = logging.getLogger(__name__)

_LIST_PAGE = 500
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0
_HTTP_GONE = 410
_HTTP_ERROR = 400


class KubeError(Exception):
    """Any failed call to the API server."""


class KubeUnavailable(KubeError):
    """The API server did not answer; the call may be tried again."""


class KubeRefused(KubeError):
    """The API server answered with an error status; `status` is the HTTP code, `reason` the API's own word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Kube:
    """A client that speaks as the identity of one kubeconfig (client certificate or bearer token)."""

    def __init__(self, server: str, context: ssl.SSLContext | bool, token: str | None = None) -> None:
        self.server = server.rstrip("/")
        self._context = context
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_kubeconfig(cls, path: str | Path) -> Kube:
        """Read the current context of the kubeconfig at `path`; paths in it are relative to its folder."""
        path = Path(path)
        config = yaml.safe_load(path.read_text())
        contexts = {each["name"]: each["context"] for each in config["contexts"]}
        context = contexts[config["current-context"]]
        cluster = {each["name"]: each["cluster"] for each in config["clusters"]}[context["cluster"]]
        user = {each["name"]: each["user"] for each in config["users"]}[context["user"]]
        trust = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority", path.parent))
        certificate = _pem(user, "client-certificate", path.parent)
        if certificate:
            _load_client_certificate(trust, certificate, _pem(user, "client-key", path.parent) or "")
        return cls(cluster["server"], trust, user.get("token"))

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._context, limit=0, keepalive_timeout=60)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    async def close(self) -> None:
        """Close the connections of this client."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        params: dict[str, str] | None = None,
        content: str = JSON_TYPE,
        timeout_s: float = 15.0,
    ) -> Json:
        """One request; returns the decoded answer, raises `KubeRefused` or `KubeUnavailable`."""
        text = await self._send(method, path, body, params=params, content=content, timeout_s=timeout_s)
        return dict(json.loads(text))

    async def text(self, path: str, timeout_s: float = 15.0) -> str:
        """The answer to a GET that is no JSON, such as a log; raises as `call` does."""
        data = await self._send("GET", path, None, params=None, content=JSON_TYPE, timeout_s=timeout_s)
        return data.decode(errors="replace")

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None,
        *,
        params: dict[str, str] | None,
        content: str,
        timeout_s: float,
    ) -> bytes:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content, "Accept": f"{JSON_TYPE}, */*"}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client().request(method, self.server + path, params=params, data=data, headers=headers) as answer,
            ):
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
        if answer.status >= _HTTP_ERROR:
            raise _refusal(answer.status, text)
        return text

    async def list(self, path: str, params: dict[str, str] | None = None) -> tuple[list[Json], str]:
        """All objects at `path`, page by page, and the resource version to watch from."""
        items: list[Json] = []
        query = {**(params or {}), "limit": str(_LIST_PAGE)}
        while True:
            page = await self.call("GET", path, params=query)
            items += page.get("items") or []
            onward = page["metadata"].get("continue")
            if not onward:
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = onward

    async def watch(self, path: str, version: str, params: dict[str, str] | None = None) -> AsyncIterator[Json]:
        """Watch events after `version` until the server closes the stream."""
        query = {
            **(params or {}),
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(400, 800)),
        }
        try:
            async with self._client().get(self.server + path, params=query) as answer:
                if answer.status >= _HTTP_ERROR:
                    raise _refusal(answer.status, await answer.read())
                pending = b""
                async for chunk in answer.content.iter_any():
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        if line:
                            yield json.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnavailable(f"watch {path}: {error or type(error).__name__}") from error


async def reflect(
    kube: Kube,
    path: str,
    *,
    on_list: Callable[[list[Json]], None],
    on_event: Callable[[str, Json], None],
    params: dict[str, str] | None = None,
    on_refused: Callable[[KubeRefused], None] | None = None,
) -> None:
    """Keep a view of `path` up to date for ever: list, watch, and list again after a gap.

    `on_list` gets everything that exists, `on_event` each ADDED, MODIFIED or DELETED object. `on_refused` is told
    when the server refuses the list (no permission, not found), which is tried again like an outage.
    """
    retry_s = _RETRY_FIRST_S
    while True:
        try:
            items, version = await kube.list(path, params)
            on_list(items)
            while True:
                version = await _follow(kube, path, version, params, on_event)
                retry_s = _RETRY_FIRST_S
        except KubeRefused as refused:
            if refused.status != _HTTP_GONE:
                log.debug("%s: %s", path, refused)
                if on_refused:
                    on_refused(refused)
        except KubeUnavailable as error:
            log.debug("%s", error)
        await asyncio.sleep(retry_s * random.uniform(0.7, 1.3))
        retry_s = min(retry_s * 2, _RETRY_MAX_S)


async def _follow(
    kube: Kube, path: str, version: str, params: dict[str, str] | None, on_event: Callable[[str, Json], None]
) -> str:
    async for event in kube.watch(path, version, params):
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise KubeRefused(item.get("code", 500), item.get("reason", ""), item.get("message", ""))
        version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            on_event(kind, item)
    return version


def _refusal(status: int, text: bytes) -> KubeRefused:
    try:
        answer = json.loads(text)
    except ValueError:
        return KubeRefused(status, "", text.decode(errors="replace")[:500])
    return KubeRefused(status, answer.get("reason", ""), answer.get("message", ""))


def _pem(entry: Json, key: str, folder: Path) -> str | None:
    if data := entry.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return (folder / entry[key]).read_text() if key in entry else None


def _load_client_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    # ssl reads certificate chains from files only.
    handle, name = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(certificate + "\n" + key)
        context.load_cert_chain(name)
    finally:
        Path(name).unlink()
