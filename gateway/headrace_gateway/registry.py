"""Holds what is known of every worker, and decides from it who stands where: role, epoch, and whether to send.

The worker's own report is a fact, the pod's labels are hints: role, epoch and acceptance come from the report while
it is fresh. Two hints still count beside it, because they are written before the worker knows: a pod that is being
deleted, and the role label `draining`, as long as the worker has not moved on since that label was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace_core.api.names import ROLE_DRAINING, Role
from headrace_core.api.wire import LoadReport
from headrace_gateway.pods import PodRecord, PodTable


class Standing(StrEnum):
    """Whether a worker gets new work."""

    READY = "ready"
    SUSPECT = "suspect"
    """Silent for a second, or not Ready for Kubernetes: chosen only where nobody better is there."""
    DRAINING = "draining"
    """Takes nothing now, by its own word or by its pod's label."""
    OUT = "out"
    """Silent for too long, or never heard of."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker at one moment, as the rules see it."""

    pod: str
    address: str
    role: Role | None
    """None: never heard of, and its pod's label names none."""
    epoch: int
    standing: Standing
    queued_prefill_tokens: int
    """As reported, and what this gateway has sent since."""
    running_tokens: int

    @property
    def can_take(self) -> bool:
        """Whether it may be sent new work at all."""
        return self.standing in {Standing.READY, Standing.SUSPECT}


@dataclass(frozen=True, slots=True)
class Silence:
    """After how many seconds without a report a worker is suspect, and out."""

    suspect_after_s: float
    out_after_s: float


@dataclass(slots=True)
class _Worker:
    record: PodRecord
    report: LoadReport | None = None
    heard_at_s: float = 0.0
    closed: bool = False
    """It refused or failed since its last report: not chosen until it reports again."""
    sent_tokens: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Prefills under way from here: when they were sent, and how many prompt tokens they are estimated to have."""


def standing_of(
    record: PodRecord, report: LoadReport | None, *, silent_s: float, closed: bool, silence: Silence
) -> Standing:
    """Where a worker stands, from its pod's record, its last report and the seconds since that."""
    if report is None or silent_s >= silence.out_after_s:
        return Standing.OUT
    label_is_newer = report.epoch <= record.epoch
    if record.terminating or (record.role == ROLE_DRAINING and label_is_newer):
        return Standing.DRAINING
    if not report.accepting or closed:
        return Standing.DRAINING
    if silent_s >= silence.suspect_after_s or not record.ready:
        return Standing.SUSPECT
    return Standing.READY


class Registry:
    """All workers, by the address of their HTTP server. Times are seconds of the caller's monotonic clock."""

    def __init__(self, silence: Silence) -> None:
        self._silence = silence
        self._workers: dict[str, _Worker] = {}
        self._next_placement = 0

    def set_pods(self, table: PodTable) -> None:
        """Take over what Kubernetes says. A pod of another uid at an old address starts unknown."""
        workers: dict[str, _Worker] = {}
        # Terminating ones first, so that a new pod at an address still held by an old one's record wins.
        for record in sorted(table.values(), key=lambda record: not record.terminating):
            known = self._workers.get(record.address)
            if known and known.record.uid == record.uid:
                known.record = record
                workers[record.address] = known
            else:
                workers[record.address] = _Worker(record)
        self._workers = workers

    def hear(self, address: str, report: LoadReport, now_s: float) -> bool:
        """Take over a report; False for one that is old, of a pod that is not the one at this address, or unknown."""
        worker = self._workers.get(address)
        if worker is None or (worker.record.name and worker.record.name != report.pod):
            return False
        last = worker.report
        if last and last.boot_id == report.boot_id and report.sequence <= last.sequence:
            return False
        worker.report, worker.heard_at_s, worker.closed = report, now_s, False
        return True

    def close(self, address: str) -> None:
        """A worker has refused or failed: do not choose it until its next report."""
        if worker := self._workers.get(address):
            worker.closed = True

    def forgive(self, seconds: float) -> None:
        """The gateway itself stood still for so long: nobody could be heard, so nobody was silent."""
        for worker in self._workers.values():
            worker.heard_at_s += seconds

    def place(self, address: str, tokens: int, now_s: float) -> int:
        """Count a prefill of about so many tokens on a worker until `unplace`. Returns the placement's number."""
        self._next_placement += 1
        if worker := self._workers.get(address):
            worker.sent_tokens[self._next_placement] = (now_s, tokens)
        return self._next_placement

    def unplace(self, address: str, placement: int) -> None:
        """The prefill has ended, well or not."""
        if worker := self._workers.get(address):
            worker.sent_tokens.pop(placement, None)

    def addresses(self) -> set[str]:
        """The addresses of all workers."""
        return set(self._workers)

    def views(self, now_s: float) -> Iterator[WorkerView]:
        """Every worker as it stands now."""
        for worker in self._workers.values():
            yield self._view(worker, now_s)

    def standing(self, address: str, now_s: float) -> Standing | None:
        """Where the worker at an address stands; None when there is no such worker."""
        worker = self._workers.get(address)
        return self._view(worker, now_s).standing if worker else None

    def silent(self, now_s: float) -> Mapping[str, float]:
        """The seconds of silence of every worker that has ever reported, by address."""
        return {address: now_s - worker.heard_at_s for address, worker in self._workers.items() if worker.report}

    def reports(self, role: Role, now_s: float) -> tuple[LoadReport, ...]:
        """The newest reports of a role's workers, those that are out left away.

        A worker that should not be chosen is included and does not accept, whether it says so itself, its pod's label
        does, or it is suspect while a better one is there: so a dispatcher that reads this leaves it aside.
        """
        known = [
            (worker.report, self._view(worker, now_s).standing)
            for worker in self._workers.values()
            if worker.report and worker.report.role is role
        ]
        choosable = {Standing.READY} if any(s is Standing.READY for _, s in known) else {Standing.SUSPECT}
        return tuple(
            report if standing in choosable else report.model_copy(update={"accepting": False})
            for report, standing in known
            if standing is not Standing.OUT
        )

    def _view(self, worker: _Worker, now_s: float) -> WorkerView:
        record, report = worker.record, worker.report
        standing = standing_of(
            record, report, silent_s=now_s - worker.heard_at_s, closed=worker.closed, silence=self._silence
        )
        # What was sent after the last report cannot be in it yet.
        sent = sum(tokens for at_s, tokens in worker.sent_tokens.values() if at_s >= worker.heard_at_s)
        return WorkerView(
            pod=report.pod if report else record.name,
            address=record.address,
            role=_role_of(record, report, fresh=standing is not Standing.OUT),
            epoch=report.epoch if report else record.epoch,
            standing=standing,
            queued_prefill_tokens=(report.queued_prefill_tokens if report else 0) + sent,
            running_tokens=report.running_tokens if report else 0,
        )


def _role_of(record: PodRecord, report: LoadReport | None, *, fresh: bool) -> Role | None:
    labelled = Role(record.role) if record.role in set(Role) else None
    if report is None:
        return labelled
    return report.role if fresh else labelled or report.role
