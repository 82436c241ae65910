"""Touches Services: listens on each ClusterIP and passes connections to the ready pods that the selector names."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from e2e.cluster.hostlet.kube import Kube, reflect
from e2e.cluster.hostlet.splice import Backend, Frontside

Json = dict[str, Any]

log = logging.getLogger(__name__)

_GATHER_S = 0.02
_BACKLOG = 1024


@dataclass(frozen=True)
class Frontend:
    """One port of one Service."""

    address: str
    port: int
    name: str


def backends(service: Json, port: Json, pods: list[Json]) -> list[Backend]:
    """The (address, port) pairs of the ready pods behind one port of a service, in the order of their names."""
    selector = service["spec"].get("selector") or {}
    result = []
    for pod in sorted(pods, key=lambda each: each["metadata"]["name"]):
        labels = pod["metadata"].get("labels") or {}
        if (
            pod["metadata"]["namespace"] == service["metadata"]["namespace"]
            and selector.items() <= labels.items()
            and (is_ready(pod) or service["spec"].get("publishNotReadyAddresses"))
            and (address := (pod.get("status") or {}).get("podIP"))
            and (number := target_port(pod, port)) is not None
        ):
            result.append((address, number))
    return result


def is_ready(pod: Json) -> bool:
    """Whether a pod is to get new connections."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return not pod["metadata"].get("deletionTimestamp") and any(
        each["type"] == "Ready" and each["status"] == "True" for each in conditions
    )


def target_port(pod: Json, port: Json) -> int | None:
    """The pod's port number behind a service port, None where the pod has no port of that name."""
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for each in container.get("ports") or []:
            if each.get("name") == target:
                return int(each["containerPort"])
    return None


def frontends(services: list[Json], pods: list[Json], network: str) -> dict[Frontend, list[Backend]]:
    """Every TCP port of a service with a ClusterIP in `network` and at least one ready pod."""
    inside = ipaddress.ip_network(network)
    result = {}
    for service in services:
        spec, meta = service["spec"], service["metadata"]
        address = spec.get("clusterIP") or "None"
        if address == "None" or not spec.get("selector") or ipaddress.ip_address(address) not in inside:
            continue
        for port in spec.get("ports") or []:
            found = backends(service, port, pods) if port.get("protocol", "TCP") == "TCP" else []
            if found:
                result[Frontend(address, port["port"], f"{meta['namespace']}/{meta['name']}")] = found
    return result


class ServiceProxy:
    """Listens for all services of the cluster; a port without a ready pod behind it refuses connections."""

    def __init__(self, kube: Kube, network: str, apiserver: Backend) -> None:
        self._kube = kube
        self._network = network
        self._apiserver = apiserver
        self._services: dict[str, Json] = {}
        self._pods: dict[str, Json] = {}
        self._dirty = asyncio.Event()
        self._listeners: dict[Frontend, asyncio.Server] = {}
        self._turns: dict[Frontend, Iterator[int]] = {}
        self._backends: dict[Frontend, list[Backend]] = {}
        self.services_known = asyncio.Event()

    def services(self) -> list[Json]:
        """All services as last seen."""
        return list(self._services.values())

    async def run(self) -> None:
        """Follow services and pods, and listen accordingly, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow("/api/v1/services", self._services, self.services_known))
                group.create_task(self._follow("/api/v1/pods", self._pods, asyncio.Event()))
                group.create_task(self._keep_listening())
        finally:
            for server in self._listeners.values():
                server.close()

    async def _follow(self, path: str, store: dict[str, Json], known: asyncio.Event) -> None:
        def listed(items: list[Json]) -> None:
            store.clear()
            store.update({item["metadata"]["uid"]: item for item in items})
            known.set()
            self._dirty.set()

        def changed(event: str, item: Json) -> None:
            if event == "DELETED":
                store.pop(item["metadata"]["uid"], None)
            else:
                store[item["metadata"]["uid"]] = item
            self._dirty.set()

        await reflect(self._kube, path, on_list=listed, on_event=changed)

    async def _keep_listening(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(_GATHER_S)
            self._dirty.clear()
            wanted = frontends(self.services(), list(self._pods.values()), self._network)
            for service in self.services():
                if service["metadata"]["name"] == "kubernetes" and service["metadata"]["namespace"] == "default":
                    for port in service["spec"]["ports"]:
                        frontend = Frontend(service["spec"]["clusterIP"], port["port"], "default/kubernetes")
                        wanted[frontend] = [self._apiserver]
            self._backends = wanted
            for frontend in self._listeners.keys() - wanted.keys():
                self._listeners.pop(frontend).close()
            for frontend in wanted.keys() - self._listeners.keys():
                await self._listen(frontend)

    async def _listen(self, frontend: Frontend) -> None:
        turns = self._turns.setdefault(frontend, itertools.count())

        def pick() -> Backend | None:
            choices = self._backends.get(frontend)
            return choices[next(turns) % len(choices)] if choices else None

        try:
            self._listeners[frontend] = await asyncio.get_running_loop().create_server(
                lambda: Frontside(pick), frontend.address, frontend.port, backlog=_BACKLOG
            )
        except OSError as error:
            log.warning("service %s: cannot listen on %s:%d: %s", frontend.name, frontend.address, frontend.port, error)
