"""Writes Events about a cluster, so that `kubectl describe` tells what the operator did and why."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Final

from headrace_core.api import names
from headrace_core.api.names import Reason
from headrace_operator import times
from headrace_operator.errors import ApiError, ApiUnavailableError
from headrace_operator.kube import EVENTS, Api
from headrace_operator.plan.view import ClusterSpec

log: Final = logging.getLogger(__name__)

MAX_NOTE: Final = 1024
"""Longest note that events.k8s.io/v1 takes."""


class Recorder:
    """Writes each Event to the API and to the log."""

    def __init__(self, api: Api, instance: str) -> None:
        self._api = api
        self._instance = instance

    async def record(self, cluster: ClusterSpec, reason: Reason, note: str, *, warning: bool = False) -> None:
        """Record one. An Event that cannot be written is logged and no reason to stop the work it tells of."""
        log.info("%s/%s: %s: %s", cluster.namespace, cluster.name, reason.value, note)
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{cluster.name}.{uuid.uuid4().hex[:16]}", "namespace": cluster.namespace},
            "eventTime": times.micro(time.time()),
            "reportingController": f"{names.GROUP}/operator",
            "reportingInstance": self._instance[:128],
            "action": reason.value,
            "reason": reason.value,
            "type": "Warning" if warning else "Normal",
            "note": note[:MAX_NOTE],
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.Kind.CLUSTER.value,
                "namespace": cluster.namespace,
                "name": cluster.name,
                "uid": cluster.uid,
            },
        }
        try:
            await self._api.create(EVENTS, body)
        except (ApiError, ApiUnavailableError) as error:
            log.warning("the Event was not written: %s", error)
