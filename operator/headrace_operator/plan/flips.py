"""Decides the next step of every open flip from what the pod's labels and the worker say.

The worker is the fact, the label a routing hint, the journal entry the reservation. So no step is remembered: an
operator that takes over reads the same facts and goes on. Each call plans one step of a flip; the next call sees its
effect. Which flip may begin is decided in `plan/admission`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from headrace_core.api import names
from headrace_core.api.names import FlipStep, Outcome, Reason, Role
from headrace_core.api.wire import Phase, RoleState
from headrace_operator.plan.actions import (
    Action,
    DeletePod,
    FinishFlip,
    LabelDraining,
    PostRole,
    Relabel,
    WriteJournal,
)
from headrace_operator.plan.view import Entry, FlipMarks, Observed, Pod, PoolSpec, Silent

OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
MAX_NAME: Final = 253
MAX_POOL_NAME: Final = 40
MAX_BOOT_ID: Final = 64
"""Lengths that the journal has room for (`ActiveFlip`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The two pools of a flip, as the spec has them."""

    source: PoolSpec
    target: PoolSpec


def plan_flips(observed: Observed, grace_s: float) -> list[Action]:
    """One step for each open flip, then repairs of labels that no flip explains.

    Args:
        observed: what is known.
        grace_s: seconds past a flip's deadline after which a silent or undecided worker is replaced.
    """
    rebuilt = rebuild(observed)
    if rebuilt:
        journal = observed.journal + tuple(rebuilt)
        text = ", ".join(entry.name for entry in rebuilt)
        return [WriteJournal(journal, observed.flipped, observed.window, Reason.FLIP_REBUILT, text)]
    actions: list[Action] = []
    for entry in observed.journal:
        steps = next_step(observed, entry, grace_s)
        actions += steps
        if any(isinstance(step, WriteJournal) for step in steps):
            # The journal is replaced as a whole: one write a reconcile, the others see its result.
            return actions
    return actions or repair(observed)


def rebuild(observed: Observed) -> list[Entry]:
    """Entries for pods in the middle of a flip that the journal does not know: the status was lost.

    Annotations that no operator can have written make none: without an entry the worker decides, in `repair`.
    """
    known = {entry.pod_uid for entry in observed.journal}
    timeout_s = observed.cluster.flips.drain_timeout_s
    found = {
        pod.flip.flip: Entry(
            name=pod.flip.flip,
            pod=pod.name,
            pod_uid=pod.uid,
            from_pool=pod.pool,
            to_pool=pod.flip.to_pool,
            epoch=pod.epoch,
            boot_id=pod.flip.boot_id,
            fence=observed.fence,
            started=pod.flip.deadline - timeout_s,
            deadline=pod.flip.deadline,
            step=FlipStep.LABELLED,
        )
        for pod in observed.workers
        if pod.flip is not None and pod.draining and pod.uid not in known and _can_be_ours(pod, pod.flip)
    }
    taken = {entry.name for entry in observed.journal}
    return [entry for name, entry in found.items() if name not in taken]


def _can_be_ours(pod: Pod, marks: FlipMarks) -> bool:
    return (
        len(marks.flip) <= MAX_NAME
        and OBJECT_NAME.fullmatch(marks.flip) is not None
        and max(len(pod.pool), len(marks.to_pool)) <= MAX_POOL_NAME
        and len(marks.boot_id) <= MAX_BOOT_ID
    )


def next_step(observed: Observed, entry: Entry, grace_s: float) -> list[Action]:
    """What to do now for one open flip; empty: look again soon."""
    pod = next((pod for pod in observed.pods if pod.uid == entry.pod_uid), None)
    sides = _sides(observed, entry)
    if pod is None or not pod.alive:
        across = sides is not None and sides.source.shape != sides.target.shape
        reason = Reason.SHAPE_DIFFERS if across else Reason.POD_GONE
        return _finish(observed, entry, Outcome.REPLACED, reason, moved=across)
    state = observed.roles.get(pod.uid)
    if sides is None:
        return _without_pools(observed, entry, pod, state)
    if sides.source.shape != sides.target.shape:
        return [DeletePod(pod, Reason.SHAPE_DIFFERS, f"a new pod in pool {entry.to_pool} takes its place")]
    if _stands_in(pod, sides.source):
        return _before_label(observed, entry, pod, sides, state)
    if _stands_in(pod, sides.target):
        return _finish(observed, entry, Outcome.SUCCEEDED, Reason.FLIPPED, moved=True, state=state)
    return _while_draining(observed, entry, pod, sides, state=state, grace_s=grace_s)


def _before_label(
    observed: Observed, entry: Entry, pod: Pod, sides: Sides, state: RoleState | Silent | None
) -> list[Action]:
    """The label says the old role: the flip has not begun, or has been rolled back."""
    if pod.epoch > entry.epoch:
        return _finish(observed, entry, Outcome.ROLLED_BACK, Reason.WORKER_ROLLED_BACK, state=state)
    if entry.fence != observed.fence:
        # Another operator reserved it and did no more. The request stands, and is judged anew.
        return [_journal_without(observed, entry, Reason.FLIP_DROPPED)]
    if _restarted(entry, state):
        return _finish(observed, entry, Outcome.ROLLED_BACK, Reason.CONTAINER_RESTARTED)
    if observed.now >= entry.deadline:
        return _finish(observed, entry, Outcome.ROLLED_BACK, Reason.DEADLINE_PASSED)
    return [LabelDraining(entry, pod, sides.source.role, sides.target.role)]


def _while_draining(
    observed: Observed,
    entry: Entry,
    pod: Pod,
    sides: Sides,
    *,
    state: RoleState | Silent | None,
    grace_s: float,
) -> list[Action]:
    """The label says draining: the worker decides."""
    late = observed.now > entry.deadline + grace_s
    if state is None:
        return []
    if isinstance(state, Silent):
        return [DeletePod(pod, Reason.WORKER_SILENT, state.why)] if late else []
    if _restarted(entry, state) or state.epoch < entry.epoch:
        return _back(observed, entry, pod, state, Reason.CONTAINER_RESTARTED)
    if state.phase is Phase.FAILED:
        return [DeletePod(pod, Reason.WORKER_FAILED, "the worker reports a failed role change")]
    if state.phase is not Phase.READY:
        return [DeletePod(pod, Reason.WORKER_STUCK, f"still {state.phase.value}")] if late else []
    if state.epoch > entry.epoch and state.role is sides.target.role:
        relabel = Relabel(pod, entry.to_pool, state.role, state.epoch, Reason.FLIPPED)
        done = _finish(observed, entry, Outcome.SUCCEEDED, Reason.FLIPPED, moved=True, state=state)
        return [relabel, *done]
    if state.epoch > entry.epoch:
        return _back(observed, entry, pod, state, Reason.WORKER_ROLLED_BACK)
    if observed.now >= entry.deadline:
        return _back(observed, entry, pod, state, Reason.DEADLINE_PASSED)
    return [PostRole(entry, pod, sides.target.role, entry.deadline - observed.now)]


def _without_pools(observed: Observed, entry: Entry, pod: Pod, state: RoleState | Silent | None) -> list[Action]:
    """A pool of the flip has left the spec: end it, wherever the worker stands."""
    if not pod.draining:
        return _finish(observed, entry, Outcome.ROLLED_BACK, Reason.POOL_GONE)
    if isinstance(state, RoleState) and state.phase is Phase.READY:
        return _back(observed, entry, pod, state, Reason.POOL_GONE)
    if isinstance(state, RoleState) and state.phase is not Phase.FAILED and observed.now <= entry.deadline:
        return []
    return [DeletePod(pod, Reason.POOL_GONE)]


def _back(observed: Observed, entry: Entry, pod: Pod, state: RoleState, reason: Reason) -> list[Action]:
    """Let the labels say what the worker is, and close the flip without success."""
    pool = home(observed, pod, state.role, prefer=entry.from_pool)
    if pool is None:
        return [DeletePod(pod, reason, f"no pool is left for a {state.role.value} worker of its shape")]
    relabel = Relabel(pod, pool.name, state.role, state.epoch, reason)
    counts = _moved(observed.flipped, entry.from_pool, pool.name)
    return [relabel, *_finish(observed, entry, Outcome.ROLLED_BACK, reason, state=state, flipped=counts)]


def home(observed: Observed, pod: Pod, role: Role, prefer: str) -> PoolSpec | None:
    """The pool in which a worker of a role belongs: the preferred one, the one it was made for, any of its shape."""
    origin = observed.cluster.pool(pod.origin_pool)
    candidates = [pool for pool in observed.cluster.pools if pool.role is role]
    if origin is not None:
        candidates = [pool for pool in candidates if pool.shape == origin.shape]
    ranked = sorted(candidates, key=lambda pool: (pool.name != prefer, pool.name != pod.origin_pool, pool.name))
    return ranked[0] if ranked else None


def repair(observed: Observed) -> list[Action]:
    """Relabel workers that are not what their labels say, with no flip open.

    They were restarted, or somebody has edited the labels. The pool label alone moves nobody: a worker in a pool of
    another role, or in none, goes back to its own, before that pool is found short and the other one too large.
    """
    busy = {entry.pod_uid for entry in observed.journal}
    for pod in observed.workers:
        state = observed.roles.get(pod.uid)
        if pod.uid in busy or not isinstance(state, RoleState) or state.phase is not Phase.READY:
            continue
        present = observed.cluster.pool(pod.pool)
        strayed = not pod.pool or (present is not None and present.role is not state.role)
        if state.role.value == pod.role and state.epoch == pod.epoch and pod.flip is None and not strayed:
            continue
        pool = home(observed, pod, state.role, prefer=pod.pool)
        if pool is None:
            return [DeletePod(pod, Reason.ROLE_REPAIRED, f"no pool is left for a {state.role.value} worker")]
        actions: list[Action] = [Relabel(pod, pool.name, state.role, state.epoch, Reason.ROLE_REPAIRED)]
        # A flip has written both labels. Where they contradict each other, no flip was counted.
        was_flipped = present is not None and pod.role in (present.role.value, names.ROLE_DRAINING)
        if pool.name != pod.pool and was_flipped:
            counts = _moved(observed.flipped, pod.pool, pool.name)
            actions.append(WriteJournal(observed.journal, counts, observed.window, Reason.ROLE_REPAIRED, pod.name))
        return actions
    return []


def step_of(observed: Observed, entry: Entry) -> FlipStep:
    """Where an open flip stands, for the status."""
    pod = next((pod for pod in observed.pods if pod.uid == entry.pod_uid), None)
    state = observed.roles.get(entry.pod_uid)
    if pod is None or not pod.draining:
        return FlipStep.RELABELLED if pod is not None and pod.pool == entry.to_pool else FlipStep.RESERVED
    if not isinstance(state, RoleState):
        return FlipStep.LABELLED
    if state.phase is Phase.DRAINING:
        return FlipStep.DRAINING
    if state.phase is Phase.SWITCHING:
        return FlipStep.SWITCHING
    if state.phase is Phase.ROLLING_BACK:
        return FlipStep.ROLLING_BACK
    return FlipStep.SWITCHED if state.epoch > entry.epoch else FlipStep.LABELLED


def _sides(observed: Observed, entry: Entry) -> Sides | None:
    source, target = observed.cluster.pool(entry.from_pool), observed.cluster.pool(entry.to_pool)
    return Sides(source=source, target=target) if source is not None and target is not None else None


def _stands_in(pod: Pod, pool: PoolSpec) -> bool:
    """Whether the labels say that a pod serves in a pool, with no flip in flight."""
    return pod.flip is None and pod.pool == pool.name and pod.role == pool.role.value


def _restarted(entry: Entry, state: RoleState | Silent | None) -> bool:
    """Whether the process that answers is another than the one the flip was reserved with."""
    return isinstance(state, RoleState) and bool(entry.boot_id) and state.boot_id != entry.boot_id


def _moved(flipped: Mapping[str, int], source: str, target: str) -> dict[str, int]:
    if source == target:
        return dict(flipped)
    return {**flipped, source: flipped.get(source, 0) - 1, target: flipped.get(target, 0) + 1}


def _journal_without(
    observed: Observed, entry: Entry, reason: Reason, flipped: Mapping[str, int] | None = None
) -> WriteJournal:
    journal = tuple(other for other in observed.journal if other.name != entry.name)
    return WriteJournal(journal, observed.flipped if flipped is None else flipped, observed.window, reason, entry.name)


def _finish(
    observed: Observed,
    entry: Entry,
    outcome: Outcome,
    reason: Reason,
    *,
    moved: bool = False,
    state: RoleState | Silent | None = None,
    flipped: Mapping[str, int] | None = None,
) -> list[Action]:
    """The outcome first, the journal after it: a crash between them leaves an entry that is closed again."""
    counts = _moved(observed.flipped, entry.from_pool, entry.to_pool) if moved else flipped
    done = FinishFlip(
        name=entry.name,
        outcome=outcome,
        reason=reason,
        message=explain(entry, outcome, reason),
        started=entry.started,
        from_pool=entry.from_pool,
    )
    last = state.last_switch if isinstance(state, RoleState) else None
    if last is not None and last.epoch > entry.epoch:
        done = replace(done, drain_s=last.drain_seconds, switch_s=last.switch_seconds)
    return [done, _journal_without(observed, entry, reason, counts)]


def explain(entry: Entry, outcome: Outcome, reason: Reason) -> str:
    """A flip's end in words."""
    move = f"{entry.pod} from pool {entry.from_pool} to pool {entry.to_pool}"
    why = {
        Reason.FLIPPED: "",
        Reason.WORKER_ROLLED_BACK: "the worker did not drain in time and went back by itself",
        Reason.DEADLINE_PASSED: "the deadline passed before the worker was asked",
        Reason.CONTAINER_RESTARTED: "the worker's process was restarted meanwhile",
        Reason.POOL_GONE: "a pool was removed meanwhile",
        Reason.POD_GONE: "the pod ended meanwhile",
        Reason.SHAPE_DIFFERS: "the pools have different shapes, so the pod was replaced",
    }.get(reason, reason.value)
    return f"{outcome.value}: {move}" + (f": {why}" if why else "")
