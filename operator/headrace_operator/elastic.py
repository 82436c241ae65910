"""Runs the elasticity policy at its interval: gathers loads, lets the core decide, publishes the decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace_core.api.names import Reason as OperatorReason
from headrace_core.policy.elasticity import Decision, ElasticityView, PoolView, Reason, WorkerView, decide, explain
from headrace_operator.errors import PrometheusError
from headrace_operator.events import Recorder
from headrace_operator.metrics import Metrics
from headrace_operator.plan.actions import CreateFlip
from headrace_operator.plan.admission import current_window, is_cooling
from headrace_operator.plan.view import Observed, Pod, PoolSpec
from headrace_operator.prometheus import Load, Prometheus
from headrace_operator.reflector import Key

LEVER: Final = "flip"
MAX_REASON: Final = 1024
"""Longest `spec.reason` of an InferenceFlip; the text names all workers of a pool."""


@dataclass(slots=True)
class _Last:
    """The last decision on a cluster. Times are seconds since the epoch."""

    at: float = -math.inf
    decision: Decision | None = None
    text: str = ""
    hold: str = ""
    unknown_since: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What the status says of the policy."""

    hold: str = ""
    """Why it cannot decide. Empty: it can, or does not run."""
    would: str = ""
    """What it would do, in mode Advise."""


@dataclass(slots=True)
class Elastic:
    """The policy of all clusters, with the last decision on each."""

    prometheus: Prometheus
    recorder: Recorder
    metrics: Metrics
    max_age_s: float
    _last: dict[Key, _Last] = field(default_factory=dict)

    def due_in(self, observed: Observed) -> float | None:
        """Seconds until the next decision; None where the policy does not run."""
        if not _runs(observed):
            return None
        return max(0.0, self._of(observed).at + observed.cluster.flips.interval_s - observed.now)

    def advice(self, observed: Observed) -> Advice:
        """The last decision, as the status tells it."""
        last = self._of(observed)
        if not _runs(observed):
            return Advice()
        advised = observed.cluster.flips.advised and last.decision is not None and last.decision.flips
        return Advice(hold=last.hold, would=last.text if advised else "")

    async def decide(self, observed: Observed) -> CreateFlip | None:
        """Decide if it is time to; in mode Auto, return the flip to ask for."""
        if self.due_in(observed) != 0:
            return None
        last, cluster = self._of(observed), observed.cluster
        loads, trouble = await self._loads(observed)
        view = elasticity_view(observed, loads)
        decision = decide(view)
        text = explain(decision, view)
        if decision.reason is Reason.METRICS_UNKNOWN and trouble:
            text = f"hold: {trouble}"
        last.hold = text.removeprefix("hold: ") if self._is_wrong(observed, last, decision, trouble) else ""
        self.metrics.decisions.labels(cluster.namespace, cluster.name, LEVER, decision.reason.value).inc()
        changed = last.decision != decision
        last.at, last.decision, last.text = observed.now, decision, text
        if cluster.flips.advised:
            if changed and decision.flips:
                await self.recorder.record(cluster, OperatorReason.FLIP_ADVISED, f"{text}: flip to {decision.target}")
            return None
        if changed and last.hold:
            await self.recorder.record(cluster, OperatorReason.METRICS_UNKNOWN, text, warning=True)
        if not decision.flips:
            return None
        reason = f"{decision.reason.value}: {text}"[:MAX_REASON]
        return CreateFlip(f"{decision.pod}-{int(observed.now):x}", decision.pod, decision.target, reason)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a cluster."""
        self._last.pop(key, None)

    def _of(self, observed: Observed) -> _Last:
        return self._last.setdefault((observed.cluster.namespace, observed.cluster.name), _Last())

    def _is_wrong(self, observed: Observed, last: _Last, decision: Decision, trouble: str) -> bool:
        """Whether unknown loads are a fault: not while workers are so new that there cannot be samples yet."""
        if decision.reason is not Reason.METRICS_UNKNOWN:
            last.unknown_since = None
            return False
        if last.unknown_since is None:
            last.unknown_since = observed.now
        return bool(trouble) or observed.now - last.unknown_since > observed.cluster.flips.idle_for_s + self.max_age_s

    async def _loads(self, observed: Observed) -> tuple[Mapping[str, Load], str]:
        """Fresh loads by pod, and what keeps others from being known."""
        cluster = observed.cluster
        age = self.metrics.prometheus_age_s.labels(cluster.namespace, cluster.name)
        if not self.prometheus.configured:
            age.set(math.inf)
            return {}, "the operator has no PROMETHEUS_URL"
        try:
            loads = await self.prometheus.loads(cluster.namespace, cluster.name, cluster.flips.idle_for_s)
        except PrometheusError as error:
            age.set(math.inf)
            return {}, str(error)
        age.set(max((load.age_s for load in loads.values()), default=math.inf))
        stale = sorted(pod for pod, load in loads.items() if load.age_s > self.max_age_s)
        trouble = f"samples of {', '.join(stale)} are older than {self.max_age_s:g} s" if stale else ""
        return {pod: load for pod, load in loads.items() if load.age_s <= self.max_age_s}, trouble


def elasticity_view(observed: Observed, loads: Mapping[str, Load]) -> ElasticityView:
    """What the policy reads of a cluster."""
    rules = observed.cluster.flips
    return ElasticityView(
        pools=tuple(_pool_view(observed, pool, loads) for pool in observed.cluster.pools),
        flips_allowed=rules.allowed,
        flips_under_way=len(observed.journal) + sum(not flip.outcome for flip in observed.flips),
        flips_in_hour=current_window(observed).count,
        max_concurrent=rules.max_concurrent,
        max_per_hour=rules.max_per_hour,
        idle_below=rules.idle_below,
        idle_for_s=rules.idle_for_s,
    )


def _pool_view(observed: Observed, pool: PoolSpec, loads: Mapping[str, Load]) -> PoolView:
    return PoolView(
        name=pool.name,
        role=pool.role,
        elastic=pool.elastic,
        shape=pool.shape,
        minimum=pool.min_replicas,
        maximum=pool.max_replicas,
        desired=observed.desired(pool),
        workers=tuple(_worker_view(observed, pod, loads) for pod in observed.members(pool.name)),
        arriving=sum(entry.to_pool == pool.name for entry in observed.journal),
    )


def _worker_view(observed: Observed, pod: Pod, loads: Mapping[str, Load]) -> WorkerView:
    load = loads.get(pod.name)
    return WorkerView(
        pod=pod.name,
        busy_share=None if load is None else load.busy_share,
        ready=pod.ready,
        flipping=pod.draining or any(entry.pod_uid == pod.uid for entry in observed.journal),
        cooling=is_cooling(observed, pod),
    )


def _runs(observed: Observed) -> bool:
    rules = observed.cluster.flips
    return (rules.automatic or rules.advised) and rules.allowed
