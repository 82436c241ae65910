"""Puts a cluster's key on the queue when its InferenceCluster or one of its InferenceFlips changes; nothing else.

Only `kopf.on.event` is used: the other kinds of handlers write annotations and finalizers into the objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import kopf

from headrace_core.api import names
from headrace_operator.kube import Connection
from headrace_operator.queue import Queue


class _Forever:
    """Delays between tries to reach the API server, in seconds. Without end: giving up is the Lease's business."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.1, 0.2, 0.5, 1.0)
        while True:
            yield 2.0


ERROR_BACKOFFS_S: Final = _Forever()


def registry(queue: Queue, connection: Callable[[], Awaitable[Connection]]) -> kopf.OperatorRegistry:
    """The handlers, and how kopf logs in: with the same credentials as the operator's own client."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found = await connection()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=found.insecure,
            token=found.token,
            certificate_path=found.certificate_path,
            private_key_path=found.private_key_path,
        )

    @kopf.on.event(names.GROUP, names.VERSION, names.Plural.CLUSTER.value, registry=handlers)
    async def cluster_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        queue.add((namespace or "", name or ""))

    @kopf.on.event(names.GROUP, names.VERSION, names.Plural.FLIP.value, registry=handlers)
    async def flip_changed(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        queue.add((namespace or "", spec["clusterName"]))

    return handlers


def settings() -> kopf.OperatorSettings:
    """kopf's settings: it watches and writes nothing."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    # After a patch of its own kopf holds back the next change of the object for this long. It makes none.
    chosen.persistence.consistency_timeout = 0
    # The CRDs come with the chart and namespaces are a setting: nothing to discover, and no right to needed.
    chosen.scanning.disabled = True
    chosen.networking.error_backoffs = ERROR_BACKOFFS_S
    return chosen
