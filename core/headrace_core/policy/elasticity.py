"""Decides whether a worker should change its role: IdleThreshold, the rule of TetriInfer (arXiv 2401.11181, T9).

The paper flips an instance whose load was under 10 % for a minute. Ours adds where to: only to a pool whose workers
are all busy, so that two idle pools do not trade workers. A missing metric is unknown, not idle: then all hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from headrace_core.api.names import Role
from headrace_core.api.values import duration_text


@final
@dataclass(slots=True, kw_only=True)
class WorkerView:
    """A worker that counts in a pool. One that is being deleted is not listed."""

    pod: str
    busy_share: float | None
    """Share of `idle_for_s` in which it had a request, 0 to 1. None: unknown."""
    ready: bool = True
    """Whether its pod is Ready."""
    flipping: bool = False
    """Whether a flip of it is under way."""
    cooling: bool = False
    """Whether its last flip is less than the cool-down ago."""


@final
@dataclass(slots=True, kw_only=True)
class PoolView:
    """A pool and its workers. A worker whose flip is under way is listed in the pool that it leaves."""

    name: str
    role: Role
    elastic: bool
    shape: tuple[int, int]
    """Tensor and pipeline degree."""
    minimum: int
    maximum: int
    desired: int
    """Workers that the pool should have, before this decision and the flips under way."""
    workers: tuple[WorkerView, ...]
    arriving: int = 0
    """Flips under way into the pool."""


@final
@dataclass(slots=True, kw_only=True)
class ElasticityView:
    """All that the policy reads of a cluster."""

    pools: tuple[PoolView, ...]
    flips_allowed: bool
    flips_under_way: int
    flips_in_hour: int
    max_concurrent: int
    max_per_hour: int
    idle_below: float
    """Share of busy time, 0 to 1, under which a worker is idle."""
    idle_for_s: float
    """Seconds over which that share was taken."""


class Reason(StrEnum):
    """Why a worker flips, or why none does."""

    IDLE_WORKER = "IdleWorker"
    """The one reason to flip. All others hold."""
    FLIPS_FORBIDDEN = "FlipsForbidden"
    FLIP_UNDER_WAY = "FlipUnderWay"
    OVER_HOURLY_BUDGET = "OverHourlyBudget"
    METRICS_UNKNOWN = "MetricsUnknown"
    NOBODY_IDLE = "NobodyIdle"
    COOLING_DOWN = "CoolingDown"
    BELOW_MINIMUM = "BelowMinimum"
    NO_POOL_OF_SHAPE = "NoPoolOfShape"
    ABOVE_MAXIMUM = "AboveMaximum"
    TARGET_NOT_READY = "TargetNotReady"
    TARGET_NOT_BUSY = "TargetNotBusy"


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """Flip `pod` from `source` to `target`, or hold (all three empty)."""

    reason: Reason
    pod: str = ""
    source: str = ""
    target: str = ""

    @property
    def flips(self) -> bool:
        """Whether a worker should flip."""
        return self.reason is Reason.IDLE_WORKER


HOLD: Final[Mapping[Reason, Decision]] = {
    reason: Decision(reason) for reason in Reason if reason is not Reason.IDLE_WORKER
}


def decide(view: ElasticityView) -> Decision:
    """At most one flip: the idlest worker that may go, to the busiest pool that may take it.

    The rules stand in order. The first one that nobody passes gives the reason to hold.
    """
    held = _cluster_holds(view)
    if held is not None:
        return HOLD[held]
    moves = [
        _Move(worker, source, target)
        for source in view.pools
        if source.elastic
        for worker in source.workers
        if worker.ready and not worker.flipping
        for target in (*view.pools, None)
    ]
    for reason, passes in _RULES:
        moves = [move for move in moves if passes(view, move)]
        if not moves:
            return HOLD[reason]
    best = min(moves, key=_rank)
    return Decision(Reason.IDLE_WORKER, best.worker.pod, best.source.name, best.pool.name)


def explain(decision: Decision, view: ElasticityView) -> str:
    """The decision in words, with the figures that it was made from."""
    threshold = f"{view.idle_below:.0%} of {duration_text(view.idle_for_s)}"
    if not decision.flips:
        return f"hold: {_HOLD_TEXT[decision.reason].format(threshold=threshold, view=view, unknown=_unknown(view))}"
    shares = {worker.pod: worker.busy_share for pool in view.pools for worker in pool.workers}
    target = next(pool for pool in view.pools if pool.name == decision.target)
    busiest = ", ".join(f"{worker.pod} {_percent(worker.busy_share)}" for worker in target.workers)
    return (
        f"{decision.pod} was busy {_percent(shares[decision.pod])}, under {threshold}, "
        f"while all of pool {target.name} are busy ({busiest})"
    )


@final
@dataclass(frozen=True, slots=True)
class _Move:
    worker: WorkerView
    source: PoolView
    target: PoolView | None
    """None stands for "anywhere", so that rules about the worker alone also speak where no pool is left."""

    @property
    def pool(self) -> PoolView:
        if self.target is None:
            raise ValueError("a move to nowhere is left out by the rule about shapes")
        return self.target


def _cluster_holds(view: ElasticityView) -> Reason | None:
    if not view.flips_allowed:
        return Reason.FLIPS_FORBIDDEN
    if view.flips_under_way >= view.max_concurrent:
        return Reason.FLIP_UNDER_WAY
    if view.flips_in_hour >= view.max_per_hour:
        return Reason.OVER_HOURLY_BUDGET
    if _unknown(view):
        return Reason.METRICS_UNKNOWN
    return None


def _unknown(view: ElasticityView) -> str:
    """Ready workers of Elastic pools whose load is unknown."""
    return ", ".join(
        worker.pod
        for pool in view.pools
        if pool.elastic
        for worker in pool.workers
        if worker.ready and worker.busy_share is None
    )


def _is_idle(view: ElasticityView, move: _Move) -> bool:
    share = move.worker.busy_share
    return share is not None and share < view.idle_below


def _has_cooled_down(_: ElasticityView, move: _Move) -> bool:
    return not move.worker.cooling


def _source_keeps_minimum(_: ElasticityView, move: _Move) -> bool:
    """Both as planned and as it is: workers that are not ready do not carry the pool."""
    source = move.source
    leaving = sum(worker.flipping for worker in source.workers)
    staying = sum(worker.ready and not worker.flipping for worker in source.workers) - 1
    return min(source.desired - leaving - 1, staying) >= source.minimum


def _fits(_: ElasticityView, move: _Move) -> bool:
    target, source = move.target, move.source
    return target is not None and target.elastic and target.role is not source.role and target.shape == source.shape


def _target_has_place(_: ElasticityView, move: _Move) -> bool:
    pool = move.pool
    return max(pool.desired, len(pool.workers)) + pool.arriving + 1 <= pool.maximum


def _target_is_ready(_: ElasticityView, move: _Move) -> bool:
    """Workers that are still to come may be all the help that the pool needs."""
    pool = move.pool
    ready = [worker for worker in pool.workers if worker.ready and not worker.flipping]
    return not pool.arriving and len(ready) >= pool.desired and bool(ready)


def _target_is_busy(view: ElasticityView, move: _Move) -> bool:
    """All that can work do work. Workers that are not ready are the next rule's matter."""
    shares = [worker.busy_share for worker in move.pool.workers if worker.ready]
    return all(share is not None and share >= view.idle_below for share in shares)


_RULES: Final[tuple[tuple[Reason, Callable[[ElasticityView, _Move], bool]], ...]] = (
    (Reason.NOBODY_IDLE, _is_idle),
    (Reason.NO_POOL_OF_SHAPE, _fits),
    (Reason.TARGET_NOT_BUSY, _target_is_busy),
    (Reason.TARGET_NOT_READY, _target_is_ready),
    (Reason.BELOW_MINIMUM, _source_keeps_minimum),
    (Reason.ABOVE_MAXIMUM, _target_has_place),
    (Reason.COOLING_DOWN, _has_cooled_down),
)


def _rank(move: _Move) -> tuple[float, str, float, str]:
    """The idlest worker first, and of its targets the one whose least busy worker is the busiest."""
    theirs = min(_known_share(worker) for worker in move.pool.workers if worker.ready)
    return _known_share(move.worker), move.worker.pod, -theirs, move.pool.name


def _known_share(worker: WorkerView) -> float:
    if worker.busy_share is None:
        raise ValueError(f"the load of {worker.pod} is unknown: then the cluster holds before any worker is ranked")
    return worker.busy_share


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


_HOLD_TEXT: Final = {
    Reason.FLIPS_FORBIDDEN: "flips are forbidden",
    Reason.FLIP_UNDER_WAY: "{view.flips_under_way} of at most {view.max_concurrent} flips under way",
    Reason.OVER_HOURLY_BUDGET: "{view.flips_in_hour} of at most {view.max_per_hour} flips begun in this hour",
    Reason.METRICS_UNKNOWN: "the load of {unknown} is unknown",
    Reason.NOBODY_IDLE: "no worker of an Elastic pool was busy less than {threshold}",
    Reason.NO_POOL_OF_SHAPE: "no Elastic pool of the other role has the shape of an idle worker",
    Reason.TARGET_NOT_BUSY: "the other role has an idle worker as well",
    Reason.TARGET_NOT_READY: "the other pool is still waiting for workers of its own",
    Reason.BELOW_MINIMUM: "the idle worker's pool would fall below minReplicas",
    Reason.ABOVE_MAXIMUM: "the busy pool has maxReplicas already",
    Reason.COOLING_DOWN: "the idle worker has changed its role within the cool-down",
}
