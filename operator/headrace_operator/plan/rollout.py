"""Decides which out-of-date workers to replace next, within `rollout.maxUnavailable` of their pool."""

from __future__ import annotations

from headrace_core.api.names import Reason
from headrace_operator.plan.actions import Action, DeletePod
from headrace_operator.plan.view import Observed, Pod, PoolSpec


def out_of_date(observed: Observed, pod: Pod) -> bool:
    """Whether a pod was made from another template than the present one of the pool it was made for.

    A flipped worker is measured by the pool it came from: its role is not part of what it was made of. A template that
    the API server refused makes nothing out of date.
    """
    origin = pod.origin_pool or pod.pool
    if observed.cluster.pool(origin) is None:
        return True
    present = observed.revisions.get(origin)
    return present is not None and pod.revision != present


def plan_rollout(observed: Observed, pool: PoolSpec) -> list[Action]:
    """Out-of-date workers of a pool of the right size to delete now; the next call makes up for them.

    Those that are not ready cost nothing and go at once. No worker goes while a flip of the pool is open: both take
    workers away, and each counts on the others.
    """
    if any(pool.name in (entry.from_pool, entry.to_pool) for entry in observed.journal):
        return []
    members = observed.members(pool.name)
    old = [pod for pod in members if out_of_date(observed, pod)]
    unavailable = observed.desired(pool) - sum(pod.ready for pod in members)
    spare = max(0, observed.cluster.max_unavailable - unavailable)
    ready = sorted((pod for pod in old if pod.ready), key=lambda pod: (pod.node not in observed.cordoned, pod.name))
    chosen = [pod for pod in old if not pod.ready] + ready[:spare]
    text = f"made from another template than pool {pool.name} has"
    return [DeletePod(pod, Reason.OUT_OF_DATE, text) for pod in chosen]
