"""Decides what the status of an InferenceCluster says: counts, journal and conditions with their reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headrace_core.api import resources
from headrace_core.api.names import COMPONENT_WORKER, Condition, FlipStep, Reason, Role
from headrace_operator.plan.flips import step_of
from headrace_operator.plan.pods import backing_off
from headrace_operator.plan.rollout import out_of_date
from headrace_operator.plan.view import Entry, Observed, Pod, PoolSpec, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One condition: status, reason and words. `met` None is Unknown."""

    met: bool | None
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the status tells besides the workers."""

    accepted: Verdict = field(default_factory=lambda: Verdict(met=True, reason=Reason.ACCEPTED))
    gateways_ready: int = 0
    foreign_budgets: tuple[str, ...] = ()
    failure: str = ""
    """What the API server refused in this reconcile. Empty: nothing."""
    hold: str = ""
    """Why the policy cannot decide: its metrics are unknown. Empty: they are known, or it does not run."""
    advice: str = ""
    """What the policy would do, in mode Advise."""


def cluster_status(observed: Observed, around: Surroundings, before: resources.ClusterStatus) -> dict[str, Any]:
    """The whole status as a manifest. Equal input gives equal output, so that nothing is written for nothing."""
    pools = tuple(_pool_status(observed, pool) for pool in observed.cluster.pools)
    by_role = {role: _ready_of(observed, pools, role) for role in Role}
    verdicts = {
        Condition.ACCEPTED: around.accepted,
        Condition.READY: ready(observed, around),
        Condition.PROGRESSING: progressing(observed, around),
        Condition.DEGRADED: degraded(observed, around),
    }
    status = resources.ClusterStatus(
        observed_generation=observed.cluster.generation,
        conditions=merge_conditions(verdicts, before.conditions, observed.cluster.generation, observed.now),
        pools=pools,
        prefill=by_role[Role.PREFILL],
        decode=by_role[Role.DECODE],
        active_flips=tuple(journal_entry(entry, step_of(observed, entry)) for entry in observed.journal),
        flip_window=window_status(observed.window),
    )
    return status.manifest()


def journal_status(
    journal: Iterable[Entry], flipped: Mapping[str, int], window: Window | None, before: resources.ClusterStatus
) -> dict[str, Any]:
    """The part of the status that reserves and closes flips: journal, flip counts, window."""
    known = {pool.name: pool for pool in before.pools}
    pools = tuple(
        known.get(name, resources.PoolStatus(name=name)).model_copy(update={"flipped": flipped.get(name, 0)})
        for name in dict.fromkeys([*known, *flipped])
    )
    status = resources.ClusterStatus(
        pools=pools,
        active_flips=tuple(journal_entry(entry, entry.step) for entry in journal),
        flip_window=window_status(window),
    ).manifest()
    return {key: status[key] for key in ("pools", "activeFlips", "flipWindow") if key in status}


def journal_entry(entry: Entry, step: FlipStep) -> resources.ActiveFlip:
    """An entry as the status has it."""
    return resources.ActiveFlip.model_validate(
        {
            "name": entry.name,
            "pod": entry.pod,
            "podUID": entry.pod_uid,
            "from": entry.from_pool,
            "to": entry.to_pool,
            "step": step,
            "epoch": entry.epoch,
            "bootID": entry.boot_id,
            "fence": entry.fence,
            "started": _moment(entry.started),
            "deadline": _moment(entry.deadline),
        }
    )


def window_status(window: Window | None) -> resources.FlipWindow | None:
    """The hour as the status has it."""
    return None if window is None else resources.FlipWindow(started=_moment(window.started), count=window.count)


def merge_conditions(
    verdicts: Mapping[Condition, Verdict], before: Iterable[resources.Condition], generation: int, now: float
) -> tuple[resources.Condition, ...]:
    """Conditions from verdicts; a transition time changes with the status only (API conventions)."""
    known = {condition.type: condition for condition in before}
    merged = []
    for kind, verdict in verdicts.items():
        status = _condition_status(verdict.met)
        old = known.get(kind.value)
        since = old.last_transition_time if old is not None and old.status is status else _second(now)
        merged.append(
            resources.Condition(
                type=kind.value,
                status=status,
                reason=verdict.reason.value,
                message=verdict.message,
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(merged)


def ready(observed: Observed, around: Surroundings) -> Verdict:
    """Whether each pool has the workers it should have, and the gateway a ready pod.

    During a rollout a pool may lack `maxUnavailable` workers and still be ready. A worker in a flip serves nobody but
    is on its way: it counts, as long as each role has a ready worker.
    """
    if observed.cluster.gateway.managed and around.gateways_ready < 1:
        return Verdict(met=False, reason=Reason.GATEWAY_NOT_READY, message="no gateway pod is ready")
    lacking = [
        f"{pool.name} has {len(serving) + flipping} of {observed.desired(pool)}"
        for pool in observed.cluster.pools
        for serving, flipping in [_standing(observed, pool)]
        if len(serving) + flipping < observed.desired(pool) - _allowance(observed, pool)
    ]
    without = [role.value for role in Role if not any(pod.ready and pod.role == role for pod in observed.workers)]
    if lacking or without:
        text = "ready workers: " + ", ".join(lacking or [f"none for {role}" for role in without])
        return Verdict(met=False, reason=Reason.WORKERS_NOT_READY, message=text)
    return Verdict(met=True, reason=Reason.ALL_READY)


def progressing(observed: Observed, around: Surroundings) -> Verdict:
    """Whether the operator is changing something, and what."""
    if observed.journal:
        names = ", ".join(f"{entry.pod} to {entry.to_pool}" for entry in observed.journal)
        return Verdict(met=True, reason=Reason.FLIPPING, message=names)
    if any(out_of_date(observed, pod) for pod in observed.workers):
        old = sum(out_of_date(observed, pod) for pod in observed.workers)
        return Verdict(met=True, reason=Reason.ROLLING_OUT, message=f"{old} workers are out of date")
    counts = [(pool, len(observed.members(pool.name))) for pool in observed.cluster.pools]
    short = [
        f"{pool.name} {count}/{observed.desired(pool)}" for pool, count in counts if count != observed.desired(pool)
    ]
    starting = sum(not pod.ready for pod in observed.workers)
    if short or starting:
        text = "; ".join([*short, *([f"{starting} workers are starting"] if starting else [])])
        return Verdict(met=True, reason=Reason.SCALING, message=text)
    if around.advice:
        return Verdict(met=False, reason=Reason.FLIP_ADVISED, message=around.advice)
    return Verdict(met=False, reason=Reason.STABLE)


def degraded(observed: Observed, around: Surroundings) -> Verdict:
    """Whether something is wrong that a person should look at; the gravest first, the message names all."""
    stuck = [pod for pod in observed.workers if pod.unschedulable]
    looping = [pod for pod in observed.workers if pod.waiting not in ("", "ContainerCreating", "PodInitializing")]
    found: list[tuple[Reason, str]] = []
    if around.failure:
        found.append((Reason.REFUSED_BY_API, around.failure))
    if backing_off(observed):
        found.append(
            (Reason.PODS_FAILING, f"{observed.failures.count} pods ended by themselves; replacing them slowly")
        )
    if looping:
        found.append((Reason.PODS_FAILING, ", ".join(f"{pod.name}: {pod.waiting}" for pod in looping)))
    if stuck:
        found.append((Reason.PODS_UNSCHEDULABLE, f"{stuck[0].name}: {stuck[0].unschedulable}"))
    if around.foreign_budgets:
        text = "budgets over the same pods, which makes evictions fail: " + ", ".join(around.foreign_budgets)
        found.append((Reason.FOREIGN_BUDGET, text))
    if around.hold:
        found.append((Reason.METRICS_UNKNOWN, f"the policy holds: {around.hold}"))
    if not found:
        return Verdict(met=False, reason=Reason.HEALTHY)
    return Verdict(met=True, reason=found[0][0], message="; ".join(text for _, text in found))


def _pool_status(observed: Observed, pool: PoolSpec) -> resources.PoolStatus:
    members = observed.members(pool.name)
    leaving = {entry.pod_uid for entry in observed.journal}
    return resources.PoolStatus(
        name=pool.name,
        desired=observed.desired(pool),
        ready=sum(pod.ready and not pod.draining for pod in members),
        draining=sum(pod.uid in leaving or pod.draining for pod in members),
        updated=sum(not out_of_date(observed, pod) for pod in members),
        flipped=observed.flipped.get(pool.name, 0),
    )


def _ready_of(observed: Observed, pools: tuple[resources.PoolStatus, ...], role: Role) -> str:
    mine = {pool.name for pool in observed.cluster.pools if pool.role is role}
    of_role = [pool for pool in pools if pool.name in mine]
    return f"{sum(pool.ready for pool in of_role)}/{sum(pool.desired for pool in of_role)}"


def _standing(observed: Observed, pool: PoolSpec) -> tuple[list[Pod], int]:
    members = [pod for pod in observed.members(pool.name) if pod.ready]
    serving = [pod for pod in members if not pod.draining]
    return serving, len(members) - len(serving)


def _allowance(observed: Observed, pool: PoolSpec) -> int:
    """Workers that a pool may lack while a rollout replaces them: as long as one is out of date or ending."""
    of_pool = [pod for pod in observed.pods if pod.component == COMPONENT_WORKER and pod.pool == pool.name]
    rolling = any(pod.terminating or (pod.alive and out_of_date(observed, pod)) for pod in of_pool)
    return observed.cluster.max_unavailable if rolling else 0


def _condition_status(met: bool | None) -> resources.ConditionStatus:
    if met is None:
        return resources.ConditionStatus.UNKNOWN
    return resources.ConditionStatus.TRUE if met else resources.ConditionStatus.FALSE


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)


def _second(seconds: float) -> datetime:
    return datetime.fromtimestamp(math.floor(seconds), UTC)
