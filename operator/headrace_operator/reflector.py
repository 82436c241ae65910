"""Keeps the pods of all clusters in memory: one paged list, then a watch, with a label selector."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from headrace_core.api.names import CONTAINER_WORKER, Annotation, Label
from headrace_operator import times
from headrace_operator.errors import ApiUnavailableError, ForbiddenError, GoneError
from headrace_operator.kube import PODS, Api, resource_version
from headrace_operator.plan.view import FlipMarks, Pod

log: Final = logging.getLogger(__name__)

RETRY_FIRST_S: Final = 0.2
RETRY_MAX_S: Final = 5.0

EARLIEST_S: Final = 86400.0
"""A deadline long past, from which a drain's length can still be taken away."""
MAX_DIGITS: Final = 15
"""Of an epoch: any such number is exact in JSON."""

Key = tuple[str, str]
"""Namespace and name of an InferenceCluster."""


class PodReflector:
    """A cache of the pods with our cluster label. Readers check `has_seen` to read their own writes."""

    def __init__(self, api: Api, namespaces: Iterable[str], on_change: Callable[[Key], None]) -> None:
        self._api = api
        self._scopes = tuple(namespaces) or ("",)
        self._on_change = on_change
        self._by_cluster: dict[Key, dict[str, Pod]] = {}
        self._versions: dict[str, int] = {}
        self._written: dict[Key, int] = {}

    @property
    def synced(self) -> bool:
        """Whether every namespace has been listed once."""
        return len(self._versions) == len(self._scopes)

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """A cluster's pods, by name."""
        found = self._by_cluster.get(key, {})
        return tuple(found[name] for name in sorted(found))

    def wrote(self, key: Key, version: int) -> None:
        """Remember that the cluster's pods were written at a resource version."""
        self._written[key] = max(self._written.get(key, 0), version)

    def has_seen(self, key: Key) -> bool:
        """Whether the cache holds all that was written to the cluster's pods through `wrote`."""
        version = self._versions.get(key[0] if self._scopes != ("",) else "", 0)
        return version >= self._written.get(key, 0)

    async def run(self) -> None:
        """Reflect until cancelled."""
        async with asyncio.TaskGroup() as group:
            for scope in self._scopes:
                group.create_task(self._reflect(scope))

    async def _reflect(self, scope: str) -> None:
        version, wait_s = "", RETRY_FIRST_S
        while True:
            try:
                if not version:
                    version = await self._list(scope)
                async for kind, body in self._api.watch(PODS, scope, Label.CLUSTER, version):
                    version = body["metadata"]["resourceVersion"]
                    wait_s = RETRY_FIRST_S
                    self._take(scope, kind, body)
            except GoneError:
                version = ""
            except (ApiUnavailableError, ForbiddenError) as error:
                log.warning("pods of %s: %s; again in %.1f s", scope or "all namespaces", error, wait_s)
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))  # noqa: S311 - spreads the retries
                wait_s = min(RETRY_MAX_S, wait_s * 2)

    async def _list(self, scope: str) -> str:
        items, version = await self._api.list_all(PODS, scope, Label.CLUSTER)
        fresh: dict[Key, dict[str, Pod]] = {}
        for body in items:
            pod = parse(body)
            fresh.setdefault((pod.namespace, pod.cluster), {})[pod.name] = pod
        stale = [key for key in self._by_cluster if not scope or key[0] == scope]
        changed = {key for key in {*fresh, *stale} if fresh.get(key) != self._by_cluster.get(key)}
        for key in stale:
            del self._by_cluster[key]
        self._by_cluster |= fresh
        self._versions[scope] = int(version)
        for key in changed:
            self._on_change(key)
        return version

    def _take(self, scope: str, kind: str, body: Mapping[str, Any]) -> None:
        self._versions[scope] = int(body["metadata"]["resourceVersion"])
        if kind == "BOOKMARK":
            return
        pod = parse(body)
        key = (pod.namespace, pod.cluster)
        known = self._by_cluster.setdefault(key, {})
        if kind == "DELETED":
            known.pop(pod.name, None)
            if not known:
                del self._by_cluster[key]
        else:
            known[pod.name] = pod
        self._on_change(key)


def parse(body: Mapping[str, Any]) -> Pod:
    """What we keep of a pod."""
    meta, status = body["metadata"], body.get("status") or {}
    labels, marks = meta.get("labels") or {}, meta.get("annotations") or {}
    owners = [item for item in meta.get("ownerReferences") or [] if item.get("controller")]
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=resource_version(dict(body)),
        cluster=labels.get(Label.CLUSTER, ""),
        component=labels.get(Label.APP_COMPONENT, ""),
        pool=labels.get(Label.POOL, ""),
        role=labels.get(Label.ROLE, ""),
        revision=labels.get(Label.REVISION, ""),
        epoch=_number(marks.get(Annotation.EPOCH, "0")),
        origin_pool=marks.get(Annotation.ORIGIN_POOL, ""),
        owner_uid=owners[0]["uid"] if owners else "",
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in meta,
        created=times.parse(meta["creationTimestamp"]),
        address=status.get("podIP", ""),
        node=(body.get("spec") or {}).get("nodeName", ""),
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        waiting=_waiting(status),
        flip=_flip_marks(marks),
    )


def _waiting(status: Mapping[str, Any]) -> str:
    for container in status.get("containerStatuses") or []:
        if container.get("name") == CONTAINER_WORKER:
            return str(((container.get("state") or {}).get("waiting") or {}).get("reason", ""))
    return ""


def _flip_marks(marks: Mapping[str, str]) -> FlipMarks | None:
    if Annotation.FLIP_ID not in marks:
        return None
    try:
        deadline = max(EARLIEST_S, times.parse(marks.get(Annotation.DEADLINE, "")))
    except ValueError:
        # Somebody edited the annotation. A deadline that has passed is the safe reading: the flip is rolled back.
        deadline = EARLIEST_S
    return FlipMarks(
        flip=marks[Annotation.FLIP_ID],
        from_role=marks.get(Annotation.FROM_ROLE, ""),
        to_role=marks.get(Annotation.TARGET_ROLE, ""),
        to_pool=marks.get(Annotation.TARGET_POOL, ""),
        deadline=deadline,
        boot_id=marks.get(Annotation.BOOT_ID, ""),
    )


def _number(text: str) -> int:
    """An epoch annotation; one that somebody broke reads as 0, and the worker's own epoch then repairs it."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0
