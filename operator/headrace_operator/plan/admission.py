"""Decides which requested flip may begin: each InferenceFlip is reserved, held for a moment, or refused with a reason.

A flip that a person asked for passes the rules that keep the cluster whole. One that the policy asked for also counts
against the cool-down and the hourly budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from headrace_core.api.names import Outcome, Reason
from headrace_core.api.wire import Phase, RoleState
from headrace_operator.plan.actions import Action, FinishFlip, ForgetFlip, HoldFlip, OwnFlip, WriteJournal
from headrace_operator.plan.view import Entry, FlipObject, Observed, Pod, PoolSpec, Window

LEDGER_LENGTH: Final = 20
"""Finished InferenceFlips of a cluster that are kept."""
WAIT_LIMIT_S: Final = 60.0
"""Longest that a request waits for its worker to be ready and known. Then the situation it was made for has passed."""
HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a flip may not begin: for good, or (`passing`) for a moment."""

    reason: Reason
    message: str
    passing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A flip with what its names stand for."""

    flip: FlipObject
    pod: Pod
    source: PoolSpec
    target: PoolSpec


Rule = Callable[[Observed, Request], Refusal | None]


def plan_requests(observed: Observed) -> list[Action]:
    """Judge the requested flips, oldest first; at most one is reserved a call, since that is a write of the journal."""
    actions: list[Action] = []
    active = {entry.name for entry in observed.journal}
    pending = sorted(
        (flip for flip in observed.flips if not flip.outcome and flip.name not in active),
        key=lambda flip: (flip.created, flip.name),
    )
    for flip in pending:
        if not flip.owned:
            actions.append(OwnFlip(flip))
        verdict = judge(observed, flip)
        if isinstance(verdict, Request):
            actions.append(reserve(observed, verdict))
            break
        if not verdict.passing:
            actions.append(refuse(flip, verdict.reason, verdict.message))
        elif flip.waiting_for != verdict.reason:
            actions.append(HoldFlip(flip, verdict.reason, verdict.message))
    return actions


def judge(observed: Observed, flip: FlipObject) -> Request | Refusal:
    """Resolve the names of a request and put it through the rules in order; the first objection counts."""
    pod = next((pod for pod in observed.workers if pod.name == flip.pod), None)
    if pod is None:
        return Refusal(reason=Reason.POD_NOT_FOUND, message=f"no worker of this cluster is called {flip.pod}")
    source, target = observed.cluster.pool(observed.pool_of(pod)), observed.cluster.pool(flip.to_pool)
    if source is None or target is None:
        missing = flip.to_pool if target is None else pod.pool
        return Refusal(reason=Reason.POOL_NOT_FOUND, message=f"spec.pools has no pool {missing}")
    request = Request(flip=flip, pod=pod, source=source, target=target)
    for rule in RULES:
        refusal = rule(observed, request)
        if refusal is not None:
            return refusal
    return request


def _allowed(observed: Observed, _: Request) -> Refusal | None:
    if observed.cluster.flips.allowed:
        return None
    return Refusal(reason=Reason.FLIPS_FORBIDDEN, message="spec.elasticity.flips.mode is Forbidden")


def _elastic(_: Observed, request: Request) -> Refusal | None:
    fixed = [pool.name for pool in (request.source, request.target) if not pool.elastic]
    if not fixed:
        return None
    return Refusal(reason=Reason.POOL_NOT_ELASTIC, message=f"scaling of pool {fixed[0]} is not Elastic")


def _other_role(_: Observed, request: Request) -> Refusal | None:
    if request.source.role is not request.target.role:
        return None
    text = (
        f"{request.pod.name} is a {request.source.role.value} worker already; change the replicas of the pools instead"
    )
    return Refusal(reason=Reason.SAME_ROLE, message=text)


def _within_bounds(observed: Observed, request: Request) -> Refusal | None:
    """The pools' bounds hold after this flip and all open ones, and ready workers stay in the pool that is left."""
    source, target = request.source, request.target
    leaving = sum(entry.from_pool == source.name for entry in observed.journal)
    joining = sum(entry.to_pool == target.name for entry in observed.journal)
    if observed.desired(source) - leaving - 1 < source.min_replicas:
        text = f"pool {source.name} would have fewer than its minReplicas of {source.min_replicas}"
        return Refusal(reason=Reason.BELOW_MINIMUM, message=text)
    if observed.desired(target) + joining + 1 > target.max_replicas:
        text = f"pool {target.name} would have more than its maxReplicas of {target.max_replicas}"
        return Refusal(reason=Reason.ABOVE_MAXIMUM, message=text)
    staying = [
        pod
        for pod in observed.members(source.name)
        if pod.ready and not pod.draining and pod.uid != request.pod.uid and not _open(observed, pod)
    ]
    if len(staying) < source.min_replicas:
        text = f"pool {source.name} would have {len(staying)} ready workers, below its minReplicas"
        return Refusal(reason=Reason.BELOW_MINIMUM, message=text)
    return None


def _cooled_down(observed: Observed, request: Request) -> Refusal | None:
    if not request.flip.by_operator or not is_cooling(observed, request.pod):
        return None
    text = f"{request.pod.name} was flipped less than the cooldown ago"
    return Refusal(reason=Reason.COOLING_DOWN, message=text)


def _within_budget(observed: Observed, request: Request) -> Refusal | None:
    if not request.flip.by_operator:
        return None
    window = current_window(observed)
    if window.count < observed.cluster.flips.max_per_hour:
        return None
    text = f"{window.count} flips have begun in the present hour, as many as maxPerHour allows"
    return Refusal(reason=Reason.OVER_HOURLY_BUDGET, message=text)


def _one_at_a_time(observed: Observed, request: Request) -> Refusal | None:
    limit = observed.cluster.flips.max_concurrent
    if _open(observed, request.pod) or len(observed.journal) >= limit:
        text = f"{len(observed.journal)} of at most {limit} flips are under way"
        return Refusal(reason=Reason.WAITING_FOR_ANOTHER_FLIP, message=text, passing=True)
    return None


def _worker_known(observed: Observed, request: Request) -> Refusal | None:
    state, pod = observed.roles.get(request.pod.uid), request.pod
    if (
        pod.ready
        and isinstance(state, RoleState)
        and state.phase is Phase.READY
        and state.role is request.source.role
        and state.role.value == pod.role
        and state.epoch == pod.epoch
    ):
        return None
    if observed.now - request.flip.created > WAIT_LIMIT_S:
        return Refusal(reason=Reason.WORKER_NOT_READY, message=f"{pod.name} was not ready within a minute")
    text = f"{pod.name} is not ready, or has not said in which role it is"
    return Refusal(reason=Reason.WAITING_FOR_WORKER, message=text, passing=True)


RULES: Final[tuple[Rule, ...]] = (
    _allowed,
    _elastic,
    _other_role,
    _one_at_a_time,
    _within_bounds,
    _cooled_down,
    _within_budget,
    _worker_known,
)


def reserve(observed: Observed, request: Request) -> WriteJournal:
    """Step 0: the entry, and one more flip in the present hour."""
    state = observed.roles[request.pod.uid]
    assert isinstance(state, RoleState)  # noqa: S101 - the rule _worker_known has let it pass
    entry = Entry(
        name=request.flip.name,
        pod=request.pod.name,
        pod_uid=request.pod.uid,
        from_pool=request.source.name,
        to_pool=request.target.name,
        epoch=state.epoch,
        boot_id=state.boot_id,
        fence=observed.fence,
        started=observed.now,
        deadline=observed.now + observed.cluster.flips.drain_timeout_s,
    )
    window = current_window(observed)
    if request.flip.by_operator:
        window = replace(window, count=window.count + 1)
    text = f"{request.pod.name} goes from pool {entry.from_pool} to pool {entry.to_pool}: {request.flip.reason}"
    return WriteJournal((*observed.journal, entry), observed.flipped, window, Reason.FLIP_RESERVED, text)


def current_window(observed: Observed) -> Window:
    """The hour that is counted in: the recorded one, or a new one when that has passed."""
    if observed.window is not None and observed.now - observed.window.started < HOUR_S:
        return observed.window
    return Window(started=observed.now, count=0)


def is_cooling(observed: Observed, pod: Pod) -> bool:
    """Whether a worker's last flip is less than the cool-down ago.

    A refused flip touched no worker, and one that ended before the pod was made was that of another pod of its name.
    """
    return any(
        flip.pod == pod.name
        and flip.finished is not None
        and flip.finished >= pod.created
        and flip.outcome != Outcome.REFUSED
        and observed.now < flip.finished + observed.cluster.flips.cooldown_s
        for flip in observed.flips
    )


def refuse(flip: FlipObject, reason: Reason, message: str) -> FinishFlip:
    """End a request without touching its worker."""
    return FinishFlip(name=flip.name, outcome=Outcome.REFUSED, reason=reason, message=message)


def forget(flips: Iterable[FlipObject]) -> list[Action]:
    """The oldest finished flips beyond those that the ledger keeps."""
    finished = sorted(
        (flip for flip in flips if flip.outcome), key=lambda flip: (flip.finished or flip.created, flip.name)
    )
    return [ForgetFlip(flip) for flip in finished[: max(0, len(finished) - LEDGER_LENGTH)]]


def _open(observed: Observed, pod: Pod) -> bool:
    return any(entry.pod_uid == pod.uid for entry in observed.journal)
