"""One InferenceCluster that is deployed: reads its pods, roles, ledger and counters, and asks for flips."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from e2e.cluster.api import Cluster
from headrace_core.api import names

Found = TypeVar("Found")


class TimedOutError(Exception):
    """Something did not come about in time; the message says what, and what was seen last."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker pod as its labels, annotations and status name it."""

    name: str
    uid: str
    role: str
    pool: str
    epoch: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Flip:
    """An entry of the ledger: an InferenceFlip, finished when it has an outcome."""

    name: str
    pod: str
    from_pool: str
    to_pool: str
    reason: str
    drain_s: float | None
    switch_ms: float | None
    outcome: str


class Deployed:
    """An InferenceCluster by name; every method asks the API server or Prometheus anew."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, served_name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.served_name = served_name

    @property
    def gateway_url(self) -> str:
        """Address of the gateway's Service."""
        return self.cluster.service_url(names.gateway_name(self.name), namespace=self.namespace)

    def token(self) -> str:
        """The bearer token that the workers want."""
        secret = self.cluster.get("secrets", names.token_secret_name(self.name), namespace=self.namespace)
        return base64.b64decode(secret["data"][names.TOKEN_SECRET_KEY]).decode().split()[0]

    def status(self) -> dict[str, Any]:
        """The status of the InferenceCluster."""
        found = self.cluster.get(names.Plural.CLUSTER, self.name, namespace=self.namespace)
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, kind: names.Condition) -> dict[str, Any]:
        """The condition of that type, empty if it is not there."""
        conditions: list[dict[str, Any]] = self.status().get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def is_ready(self) -> bool:
        """Whether the Ready condition is True."""
        return self.condition(names.Condition.READY).get("status") == "True"

    def workers(self) -> list[Worker]:
        """The worker pods, by name."""
        selector = f"{names.Label.CLUSTER}={self.name},{names.Label.ROLE}"
        found = self.cluster.list("pods", namespace=self.namespace, selector=selector)
        return sorted((_worker(pod) for pod in found), key=lambda worker: worker.name)

    def in_words(self) -> str:
        """The workers in one line, for a progress line or an error."""
        words = (f"{w.name} {w.role} {'ready' if w.ready else 'not ready'}" for w in self.workers())
        return ", ".join(words) or "no worker yet"

    def ledger(self) -> list[Flip]:
        """The InferenceFlips of this cluster."""
        found = self.cluster.list(names.Plural.FLIP, namespace=self.namespace)
        return [_flip(one) for one in found if one["spec"]["clusterName"] == self.name]

    def finished_flips(self) -> list[Flip]:
        """The entries of the ledger that have an outcome."""
        return [flip for flip in self.ledger() if flip.outcome]

    def ask_for_flip(self, name: str, pod: str, target_pool: str, reason: str = "asked for by hand") -> None:
        """Creates an InferenceFlip."""
        spec = {"clusterName": self.name, "podName": pod, "targetPool": target_pool, "reason": reason}
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": names.Kind.FLIP,
            "metadata": {"name": name},
            "spec": spec,
        }
        self.cluster.apply(manifest, namespace=self.namespace)

    def metric(self, name: str, labels: str = "") -> float | None:
        """Sum over the workers of a metric in Prometheus, or None where it has no sample."""
        query = f'sum({name}{{namespace="{self.namespace}",cluster="{self.name}"{labels and ","}{labels}}})'
        url = f"{self.cluster.prometheus_url}/api/v1/query"
        answer = httpx.get(url, params={"query": query}, trust_env=False)
        result = answer.raise_for_status().json()["data"]["result"]
        return float(result[0]["value"][1]) if result else None

    def worker_url(self, worker: Worker) -> str:
        """Address of a worker, as this process reaches it."""
        return self.cluster.pod_url(worker.name, names.WORKER_PORT, namespace=self.namespace)

    def worker_metric(self, worker: Worker, name: str) -> float:
        """Sum over the labels of a metric, as the worker itself exports it now."""
        text = httpx.get(f"{self.worker_url(worker)}/metrics", trust_env=False).raise_for_status().text
        samples = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        if not samples:
            raise LookupError(f"{worker.name} exports no {name}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def until(
    what: str,
    look: Callable[[], Found | None],
    *,
    timeout_s: float,
    seen: Callable[[], str],
    every_s: float = 0.5,
    say: Callable[[str], None] | None = None,
) -> Found:
    """Calls `look` until it returns something true; `say` gets what is seen every ten seconds.

    Raises:
        TimedOutError: after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    next_word = time.monotonic() + 10
    while not (found := look()):
        now = time.monotonic()
        if now > deadline:
            raise TimedOutError(f"after {timeout_s:.0f} s still waiting: {what} ({seen()})")
        if say is not None and now > next_word:
            say(f"  {seen()}")
            next_word = now + 10
        time.sleep(every_s)
    return found


def _worker(pod: dict[str, Any]) -> Worker:
    metadata, status = pod["metadata"], pod.get("status", {})
    conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
    leaving = "deletionTimestamp" in metadata
    return Worker(
        name=metadata["name"],
        uid=metadata["uid"],
        role=metadata["labels"][names.Label.ROLE],
        pool=metadata["labels"][names.Label.POOL],
        epoch=int(metadata["annotations"][names.Annotation.EPOCH]),
        ready=conditions.get("Ready") == "True" and not leaving,
    )


def _flip(found: dict[str, Any]) -> Flip:
    spec, status = found["spec"], found.get("status", {})
    return Flip(
        name=found["metadata"]["name"],
        pod=spec["podName"],
        from_pool=status.get("fromPool", ""),
        to_pool=spec["targetPool"],
        reason=spec.get("reason", ""),
        drain_s=_number(status.get("drainSeconds")),
        switch_ms=_number(status.get("switchMilliseconds")),
        outcome=status.get("outcome", ""),
    )


def _number(value: str | float | None) -> float | None:
    return None if value is None else float(value)
