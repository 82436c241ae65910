"""Touches Events: tells the cluster what happened to a pod, counting what happens again."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from e2e.cluster.hostlet.kube import MERGE_PATCH, Kube, KubeError
from e2e.cluster.hostlet.status import timestamp

Json = dict[str, Any]

log = logging.getLogger(__name__)

_KEPT = 2000
_QUEUE = 1000


@dataclass
class _Series:
    path: str
    count: int


class Events:
    """The Events of one node, sent one after another; what cannot be sent is dropped, as with the kubelet."""

    def __init__(self, kube: Kube, node_name: str) -> None:
        self._kube = kube
        self._node_name = node_name
        self._queue: asyncio.Queue[tuple[Json, str, str, str, float]] = asyncio.Queue(_QUEUE)
        self._series: dict[tuple[str, str, str], _Series] = {}

    def record(self, pod: Json, kind: str, reason: str, message: str) -> None:
        """Send an Event of kind Normal or Warning about `pod`."""
        try:
            self._queue.put_nowait((pod, kind, reason, message, time.time()))
        except asyncio.QueueFull:
            log.warning("event dropped: %s %s", reason, message)

    async def run(self) -> None:
        """Send for ever."""
        while True:
            pod, kind, reason, message, when = await self._queue.get()
            try:
                await self._send(pod, kind, reason, message, when)
            except KubeError as error:
                log.debug("event dropped: %s: %s", reason, error)

    async def _send(self, pod: Json, kind: str, reason: str, message: str, when: float) -> None:
        meta = pod["metadata"]
        key = (meta["uid"], reason, message)
        if series := self._series.get(key):
            series.count += 1
            patch = {"count": series.count, "lastTimestamp": timestamp(when)}
            await self._kube.call("PATCH", series.path, patch, content=MERGE_PATCH)
            return
        folder, name = f"/api/v1/namespaces/{meta['namespace']}/events", f"{meta['name']}.{uuid.uuid4().hex[:16]}"
        body = {
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "kubelet", "host": self._node_name},
            "reportingComponent": "kubelet",
            "reportingInstance": self._node_name,
            "firstTimestamp": timestamp(when),
            "lastTimestamp": timestamp(when),
            "count": 1,
        }
        await self._kube.call("POST", folder, body)
        if len(self._series) >= _KEPT:
            del self._series[next(iter(self._series))]
        self._series[key] = _Series(f"{folder}/{name}", 1)
