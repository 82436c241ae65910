"""What the planners may ask for. Each action is a value with the reason it was chosen for; `apply` carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_core.api.names import Outcome, Reason, Role
from headrace_operator.plan.view import Entry, FlipObject, Pod, Window


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Make the pod of a slot from a pool's template."""

    slot: int
    pool: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod gracefully: the worker drains when it is told to end."""

    pod: Pod
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True)
class AdoptPod:
    """Become the controller of a pod that is ours by name and labels and has none."""

    pod: Pod
    reason: Reason = Reason.ADOPTED


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Replace journal, flip counts and window in the status, if the cluster is still the one that was read."""

    journal: tuple[Entry, ...]
    flipped: Mapping[str, int]
    window: Window | None
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True)
class LabelDraining:
    """Step 1: take a worker out of its role's traffic, by compare-and-swap."""

    entry: Entry
    pod: Pod
    from_role: Role
    to_role: Role


@dataclass(frozen=True, slots=True)
class PostRole:
    """Step 2: ask the worker to change its role."""

    entry: Entry
    pod: Pod
    to_role: Role
    drain_timeout_s: float


@dataclass(frozen=True, slots=True)
class Relabel:
    """Step 5 and 6: let the labels say what the worker is, by compare-and-swap, and clear the flip's annotations."""

    pod: Pod
    pool: str
    role: Role
    epoch: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class OwnFlip:
    """Make the cluster an owner of an InferenceFlip, so that it goes with it."""

    flip: FlipObject


@dataclass(frozen=True, slots=True)
class HoldFlip:
    """Say on an InferenceFlip what it waits for."""

    flip: FlipObject
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class FinishFlip:
    """Write the outcome to an InferenceFlip, and an Event to the cluster."""

    name: str
    outcome: Outcome
    reason: Reason
    message: str
    started: float | None = None
    drain_s: float | None = None
    switch_s: float | None = None
    from_pool: str = ""


@dataclass(frozen=True, slots=True)
class ForgetFlip:
    """Delete a finished InferenceFlip that the ledger has no room for."""

    flip: FlipObject


@dataclass(frozen=True, slots=True)
class CreateFlip:
    """Ask for a flip on the policy's behalf, as an object of its own."""

    name: str
    pod: str
    to_pool: str
    reason: str


Action = (
    CreatePod
    | DeletePod
    | AdoptPod
    | WriteJournal
    | LabelDraining
    | PostRole
    | Relabel
    | OwnFlip
    | HoldFlip
    | FinishFlip
    | ForgetFlip
    | CreateFlip
)
