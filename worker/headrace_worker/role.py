"""Decides what role a worker has: who may change it, when a drain ends, and which epoch comes next.

All functions are pure: the state and an event in, the next state out; the time is an argument. The contract is that of
vLLM's draft (pull request 56134), with a boot id, a pod uid and a fence added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace_core.api.names import Outcome, Role
from headrace_core.api.wire import ErrorCode, Handoff, LastSwitch, Phase, RoleRequest, RoleState


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is: what a role change may name, so that it meets no other."""

    boot_id: str
    """New at each start of the process, since epochs begin at 0 again."""
    pod_uid: str
    """Empty: not known, and then not checked."""


@dataclass(frozen=True, slots=True)
class Change:
    """A role change under way. Times are seconds of a monotonic clock."""

    target: Role
    began_s: float
    deadline_s: float
    drained_s: float | None = None
    """When the drain ended, by its success or by the deadline."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker's role and what is happening to it."""

    role: Role
    epoch: int = 0
    phase: Phase = Phase.READY
    fence: int = 0
    """The highest fence that was seen."""
    change: Change | None = None
    stopping: bool = False
    """The process was told to end. It finishes what it has and takes nothing new."""
    last_switch: LastSwitch | None = None

    @property
    def accepts(self) -> bool:
        """Whether new work is taken at all."""
        return self.phase is Phase.READY and not self.stopping


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a change is refused: a code for the caller, a message for its log."""

    code: ErrorCode
    message: str


# --- who may change the role ---------------------------------------------------------------------------------------


def ask(standing: Standing, request: RoleRequest, me: Identity, now_s: float) -> tuple[Standing, Refusal | None]:
    """Begin a change of role, or refuse it; a repeat of the change under way changes nothing and is no refusal.

    A request that is meant for another process is refused before its fence counts. Any other one raises the fence,
    even if it is refused: whoever sent it has replaced those with a lower one.
    """
    if refusal := _meant_for_another(request, me):
        return standing, refusal
    if request.fence < standing.fence:
        text = f"fence {request.fence} is below {standing.fence}: another operator has taken over"
        return standing, Refusal(ErrorCode.STALE_FENCE, text)
    fenced = replace(standing, fence=request.fence)
    if refusal := _not_now(fenced, request):
        return fenced, refusal
    if fenced.change is not None:
        return fenced, None
    change = Change(request.role, began_s=now_s, deadline_s=now_s + request.drain_timeout)
    return replace(fenced, phase=Phase.DRAINING, change=change), None


def _meant_for_another(request: RoleRequest, me: Identity) -> Refusal | None:
    if request.pod_uid and me.pod_uid and request.pod_uid != me.pod_uid:
        return Refusal(ErrorCode.WRONG_POD, f"this is pod {me.pod_uid}, not {request.pod_uid}")
    if request.boot_id and request.boot_id != me.boot_id:
        text = f"this process started as {me.boot_id}, not {request.boot_id}: read the role anew"
        return Refusal(ErrorCode.STALE_BOOT_ID, text)
    return None


def _not_now(standing: Standing, request: RoleRequest) -> Refusal | None:
    if standing.phase is Phase.FAILED:
        return Refusal(ErrorCode.WORKER_FAILED, "the engine did not take up its last role: replace this worker")
    if standing.stopping:
        return Refusal(ErrorCode.SHUTTING_DOWN, "this worker is shutting down")
    if standing.change is not None:
        same = (request.role, request.expected_epoch) == (standing.change.target, standing.epoch)
        if same and standing.phase is not Phase.ROLLING_BACK:
            return None
        text = f"a change to {standing.change.target} is under way ({standing.phase}): wait until the phase is ready"
        return Refusal(ErrorCode.ROLE_CHANGE_UNDER_WAY, text)
    if request.expected_epoch != standing.epoch:
        text = f"the epoch is {standing.epoch}, not {request.expected_epoch}: read the role anew"
        return Refusal(ErrorCode.STALE_EPOCH, text)
    if request.role is standing.role:
        return Refusal(ErrorCode.ALREADY_IN_ROLE, f"the role is {standing.role} already")
    return None


# --- how a change goes on ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is to be told: this role, at this epoch."""

    role: Role
    epoch: int


def drain(standing: Standing, *, is_drained: bool, now_s: float) -> Standing:
    """Look at a drain: it ends with the last word of the work, or at its deadline with a roll-back."""
    change = standing.change
    if standing.phase is not Phase.DRAINING or change is None:
        return standing
    ended = replace(change, drained_s=now_s)
    if is_drained:
        return replace(standing, phase=Phase.SWITCHING, change=ended)
    if now_s >= change.deadline_s:
        return replace(standing, phase=Phase.ROLLING_BACK, change=ended)
    return standing


def next_step(standing: Standing) -> Step | None:
    """The role and epoch that the engine must read before the change is done; None while there is nothing to tell.

    A roll-back takes a new epoch too: what was sent in the old one must not be taken for new work.
    """
    if standing.change is None or standing.phase not in (Phase.SWITCHING, Phase.ROLLING_BACK):
        return None
    role = standing.change.target if standing.phase is Phase.SWITCHING else standing.role
    return Step(role, standing.epoch + 1)


def switched(standing: Standing, epoch_read: int, now_s: float) -> Standing:
    """The scheduler has read an epoch: the one it was told ends the change, any other one is a failure."""
    step, change = next_step(standing), standing.change
    if step is None or change is None or change.drained_s is None or epoch_read != step.epoch:
        return failed(standing)
    last = LastSwitch(
        epoch=step.epoch,
        from_role=standing.role,
        to_role=change.target,
        outcome=Outcome.SUCCEEDED if standing.phase is Phase.SWITCHING else Outcome.ROLLED_BACK,
        drain_seconds=change.drained_s - change.began_s,
        switch_seconds=now_s - change.drained_s,
    )
    return replace(standing, role=step.role, epoch=step.epoch, phase=Phase.READY, change=None, last_switch=last)


def failed(standing: Standing) -> Standing:
    """The engine did not read the epoch: nobody knows which role it has, so no more work is taken."""
    return replace(standing, phase=Phase.FAILED)


def stop(standing: Standing) -> Standing:
    """The process was told to end."""
    return replace(standing, stopping=True)


# --- what others are told ------------------------------------------------------------------------------------------


def refuse_work(standing: Standing, handoff: Handoff | None) -> str | None:
    """Why a request is sent elsewhere; None: it is taken. The text is a label of the metric of refusals."""
    if standing.stopping:
        return "shutting_down"
    if not standing.accepts:
        return standing.phase.value
    if handoff is None:
        return None
    if handoff.expected_role is not standing.role:
        return "another_role"
    if handoff.expected_epoch != standing.epoch:
        return "another_epoch"
    return None


def describe(standing: Standing, me: Identity, *, requests: int, held_kv_blocks: int) -> RoleState:
    """The state as it goes over the wire. A worker that shuts down shows as draining, without a target."""
    phase = standing.phase
    if standing.stopping and phase is Phase.READY:
        phase = Phase.DRAINING
    return RoleState(
        role=standing.role,
        epoch=standing.epoch,
        boot_id=me.boot_id,
        phase=phase,
        target_role=standing.change.target if standing.change else None,
        draining_requests=requests,
        held_kv_blocks=held_kv_blocks,
        last_switch=standing.last_switch,
    )
