"""Serves the kubelet's HTTPS API of one node: the logs of containers, for `kubectl logs`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from e2e.cluster.hostlet.container import Container
from e2e.cluster.hostlet.node import Node

log = logging.getLogger(__name__)

# Common name of the certificate by which the API server speaks to nodes (kubeadm's name for it).
APISERVER_CLIENT = "kube-apiserver-kubelet-client"

_BLOCK = 65536
_FOLLOW_S = 0.1


class KubeletServer:
    """The server of one node; only clients with a certificate of the node's client authority are heard."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on the node's address."""
        app = web.Application(middlewares=[_from_apiserver])
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/healthz", self._healthz)
        config = self._node.config
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.client_ca)
        context.load_cert_chain(config.serving_cert, config.serving_key)
        context.verify_mode = ssl.CERT_REQUIRED
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, config.address, config.kubelet_port, ssl_context=context).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        pod = self._node.find(namespace, name)
        container = pod and next(
            (each for each in pod.containers() if each.name == request.match_info["container"]), None
        )
        if not pod or not container:
            return web.Response(status=404, text=f"{namespace}/{name} has no such container on this node")
        restart = container.record.restart_count - (1 if request.query.get("previous") == "true" else 0)
        path = pod.log_path(container.name, restart)
        if restart < 0 or not path.exists():
            text = f"container {container.name} of pod {name} has no such log: it has not started or is too old"
            return web.Response(status=400, text=text)
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        limit = int(request.query.get("limitBytes") or 0) or None
        await self._send(
            answer, path, container, tail=request.query.get("tailLines"), limit=limit, follow=_follows(request)
        )
        await answer.write_eof()
        return answer

    async def _send(
        self,
        answer: web.StreamResponse,
        path: Path,
        container: Container,
        *,
        tail: str | None,
        limit: int | None,
        follow: bool,
    ) -> None:
        run = container.record.container_id
        with path.open("rb") as file:
            if tail is not None:
                start = sum(len(line) for line in file) - sum(len(line) for line in _last_lines(path, int(tail)))
                file.seek(start)
            while limit is None or limit > 0:
                block = file.read(min(_BLOCK, limit or _BLOCK))
                if block:
                    limit = None if limit is None else limit - len(block)
                    await answer.write(block)
                elif follow and container.running and container.record.container_id == run:
                    await asyncio.sleep(_FOLLOW_S)
                else:
                    follow_on = file.read(_BLOCK)
                    if not follow_on:
                        return
                    await answer.write(follow_on)


@web.middleware
async def _from_apiserver(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Only the API server may ask: any identity of the cluster has a certificate of the same authority."""
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    names = [value for part in (certificate or {}).get("subject", ()) for key, value in part if key == "commonName"]
    if names != [APISERVER_CLIENT]:
        return web.Response(status=403, text=f"client {names} is not {APISERVER_CLIENT}")
    return await handler(request)


def _follows(request: web.Request) -> bool:
    return request.query.get("follow") in ("true", "1")


def _last_lines(path: Path, count: int) -> deque[bytes]:
    with path.open("rb") as file:
        return deque(file, maxlen=count)
