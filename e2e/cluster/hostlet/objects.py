"""Touches Secrets and ConfigMaps: watches each one that a pod of the node names, and tells the pod of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from e2e.cluster.hostlet.kube import Kube, KubeRefused, reflect

Json = dict[str, Any]
Key = tuple[str, str, str]  # kind, namespace, name

_PLURALS = {"Secret": "secrets", "ConfigMap": "configmaps"}
# The authorizer learns of a new pod's references a moment after the node does: one refusal is no answer.
_REFUSALS_THAT_COUNT = 3


def references(pod: Json) -> set[tuple[str, str]]:
    """The (kind, name) pairs of Secrets and ConfigMaps that the pod's volumes and environments name."""
    found: set[tuple[str, str]] = set()
    for volume in pod["spec"].get("volumes") or []:
        sources = (volume.get("projected") or {}).get("sources") or [volume]
        for source in sources:
            if "secret" in source:
                found.add(("Secret", source["secret"].get("secretName") or source["secret"].get("name")))
            if "configMap" in source:
                found.add(("ConfigMap", source["configMap"]["name"]))
    for container in [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]:
        for source in container.get("envFrom") or []:
            found |= {(kind, source[key]["name"]) for key, kind in _ENV_FROM.items() if key in source}
        for entry in container.get("env") or []:
            origin = entry.get("valueFrom") or {}
            found |= {(kind, origin[key]["name"]) for key, kind in _ENV_KEYS.items() if key in origin}
    return found


_ENV_FROM = {"secretRef": "Secret", "configMapRef": "ConfigMap"}
_ENV_KEYS = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}


class _Watched:
    def __init__(self) -> None:
        self.item: Json | None = None
        self.known = asyncio.Event()
        self.refusals = 0
        self.holders: dict[str, Callable[[], None]] = {}
        self.task: asyncio.Task[None] | None = None

    def put(self, item: Json | None) -> None:
        # Those who hold it from the start wait for the first answer themselves.
        changed = self.known.is_set() and item != self.item
        self.item, self.refusals = item, 0
        self.known.set()
        if changed:
            for tell in list(self.holders.values()):
                tell()

    def refused(self, _: KubeRefused) -> None:
        self.refusals += 1
        if self.refusals == _REFUSALS_THAT_COUNT:
            self.put(None)


class ObjectCache:
    """The watched Secrets and ConfigMaps of one node, by its own identity."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._watched: dict[Key, _Watched] = {}

    async def hold(self, pod: Json, tell: Callable[[], None]) -> None:
        """Watch all that `pod` names until `release`; returns when each is known. `tell` is called on changes."""
        uid, namespace = pod["metadata"]["uid"], pod["metadata"]["namespace"]
        waiting = []
        for kind, name in references(pod):
            key = (kind, namespace, name)
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = _Watched()
                watched.task = asyncio.create_task(self._watch(key, watched))
            watched.holders[uid] = tell
            waiting.append(watched.known.wait())
        await asyncio.gather(*waiting)

    def release(self, uid: str) -> None:
        """The pod needs nothing any more; what nobody needs is watched no longer."""
        for key, watched in list(self._watched.items()):
            watched.holders.pop(uid, None)
            if not watched.holders:
                del self._watched[key]
                if watched.task:
                    watched.task.cancel()

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """The object as last seen, None where it does not exist."""
        watched = self._watched.get((kind, namespace, name))
        return watched.item if watched else None

    async def _watch(self, key: Key, watched: _Watched) -> None:
        kind, namespace, name = key
        await reflect(
            self._kube,
            f"/api/v1/namespaces/{namespace}/{_PLURALS[kind]}",
            params={"fieldSelector": f"metadata.name={name}"},
            on_list=lambda items: watched.put(items[0] if items else None),
            on_event=lambda event, item: watched.put(None if event == "DELETED" else item),
            on_refused=watched.refused,
        )
