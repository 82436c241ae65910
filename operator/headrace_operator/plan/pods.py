"""Decides which worker pods to make, adopt and delete, so that each pool has as many as it should."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace_core.api import names
from headrace_core.api.names import Reason
from headrace_core.api.wire import RoleState
from headrace_operator.plan.actions import Action, AdoptPod, CreatePod, DeletePod
from headrace_operator.plan.rollout import out_of_date, plan_rollout
from headrace_operator.plan.view import Observed, Pod, PoolSpec


def plan_pods(observed: Observed) -> list[Action]:
    """All changes to the set of pods that are due now. A pool whose template was refused keeps the pods it has."""
    actions: list[Action] = [*_adopt(observed), *_bury(observed), *_leave_removed_pools(observed)]
    slots = _free_slots(observed)
    for pool in observed.cluster.pools:
        if pool.name not in observed.revisions:
            continue
        members, desired = observed.members(pool.name), observed.desired(pool)
        if len(members) < desired:
            actions += _grow(observed, pool, desired - len(members), slots)
        elif len(members) > desired:
            victims = choose_victims(observed, members, len(members) - desired)
            actions += [DeletePod(pod, Reason.SCALE_DOWN, f"pool {pool.name} should have {desired}") for pod in victims]
        else:
            actions += plan_rollout(observed, pool)
    return actions


def backing_off(observed: Observed) -> bool:
    """Whether the next pod has to wait, because pods keep ending by themselves."""
    return observed.now < observed.failures.retry_at()


def choose_victims(observed: Observed, members: tuple[Pod, ...], count: int) -> list[Pod]:
    """The workers that a pool can spare best; never one whose flip is open.

    In order: on a cordoned node (it drains anyway), not ready (nothing is lost), out of date, least loaded, newest.
    A worker whose load is unknown is taken after those whose load is known.
    """
    busy = {entry.pod_uid for entry in observed.journal}

    def cost(pod: Pod) -> tuple[bool, bool, bool, float, float, str]:
        state = observed.roles.get(pod.uid)
        load = float(state.draining_requests) if isinstance(state, RoleState) else float("inf")
        return (
            pod.node not in observed.cordoned,
            pod.ready,
            not out_of_date(observed, pod),
            load,
            -pod.created,
            pod.name,
        )

    return sorted((pod for pod in members if pod.uid not in busy), key=cost)[:count]


def _grow(observed: Observed, pool: PoolSpec, missing: int, slots: Iterator[int]) -> list[Action]:
    if backing_off(observed):
        return []
    return [CreatePod(next(slots), pool.name, Reason.SCALE_UP) for _ in range(missing)]


def _free_slots(observed: Observed) -> Iterator[int]:
    """Slots without a pod of that name, lowest first. A terminating pod still has its name."""
    taken = {pod.name for pod in observed.pods}
    slot = 0
    while True:
        if names.worker_pod_name(observed.cluster.name, slot) not in taken:
            yield slot
        slot += 1


def _adopt(observed: Observed) -> list[Action]:
    """Orphans that are ours by name and labels. A pod with another controller is that one's."""
    pattern = re.compile(re.escape(observed.cluster.name) + r"-w\d+")
    return [
        AdoptPod(pod)
        for pod in observed.pods
        if pod.component == names.COMPONENT_WORKER
        and not pod.owner_uid
        and pod.alive
        and pattern.fullmatch(pod.name)
        and pod.revision
        and pod.origin_pool
        and observed.cluster.pool(pod.pool) is not None
    ]


def _bury(observed: Observed) -> list[Action]:
    """Pods that have ended (eviction, node shutdown, refused by the kubelet): free their names."""
    return [
        DeletePod(pod, Reason.POD_FAILED, pod.reason or pod.phase)
        for pod in observed.pods
        if pod.component == names.COMPONENT_WORKER
        and pod.owner_uid == observed.cluster.uid
        and pod.failed
        and not pod.terminating
    ]


def _leave_removed_pools(observed: Observed) -> list[Action]:
    known = {pool.name for pool in observed.cluster.pools}
    busy = {entry.pod_uid for entry in observed.journal}
    return [
        DeletePod(pod, Reason.POOL_REMOVED, f"spec.pools has no pool {pod.pool}")
        for pod in observed.workers
        if observed.pool_of(pod) not in known and pod.uid not in busy
    ]
