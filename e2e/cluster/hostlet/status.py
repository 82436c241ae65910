"""Decides what a pod's status says: container states, conditions and phase, from the records of its containers."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

UNKNOWN_EXIT_CODE = 137


@dataclass(frozen=True)
class Waiting:
    """A container that does not run yet, and why."""

    reason: str
    message: str = ""

    def to_json(self) -> Json:
        """As in containerStatuses[].state."""
        return {"waiting": _without_blanks({"reason": self.reason, "message": self.message})}


@dataclass(frozen=True)
class Started:
    """A container that runs, since `started_at` (seconds since the epoch)."""

    started_at: float

    def to_json(self) -> Json:
        """As in containerStatuses[].state."""
        return {"running": {"startedAt": timestamp(self.started_at)}}


@dataclass(frozen=True)
class Terminated:
    """A container that has ended."""

    exit_code: int
    reason: str
    started_at: float
    finished_at: float
    container_id: str
    message: str = ""

    def to_json(self) -> Json:
        """As in containerStatuses[].state."""
        values = {
            "exitCode": self.exit_code,
            "reason": self.reason,
            "message": self.message,
            "startedAt": timestamp(self.started_at),
            "finishedAt": timestamp(self.finished_at),
            "containerID": self.container_id,
        }
        return {"terminated": _without_blanks(values)}


State = Waiting | Started | Terminated


@dataclass
class ContainerRecord:
    """What is known of one container of a pod."""

    name: str
    image: str
    state: State
    last: Terminated | None = None
    restart_count: int = 0
    container_id: str = ""
    image_id: str = ""
    ready: bool = False
    started: bool = False
    # An init container that keeps running beside the others (restartPolicy Always).
    sidecar: bool = False

    def succeeded(self) -> bool:
        """Whether it has ended with exit code 0."""
        return isinstance(self.state, Terminated) and self.state.exit_code == 0

    def to_json(self) -> Json:
        """As in status.containerStatuses."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image_id,
            "containerID": self.container_id,
            "restartCount": self.restart_count,
            "ready": self.ready,
            "started": self.started,
            "state": self.state.to_json(),
            "lastState": self.last.to_json() if self.last else {},
        }


@dataclass
class PodRecord:
    """What is known of one pod on its node; `failure` is a (reason, message) that the node itself ended it for."""

    init: list[ContainerRecord]
    main: list[ContainerRecord]
    pod_ip: str = ""
    host_ip: str = ""
    start_time: float = 0.0
    sandbox_ready: bool = False
    ended: bool = False
    failure: tuple[str, str] | None = None
    conditions: dict[str, Json] = field(default_factory=dict)


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, to the second, as the API's Time type."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def seconds(text: str | None) -> float:
    """The inverse of `timestamp`; 0 for nothing."""
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))) if text else 0.0


def initialized(record: PodRecord) -> bool:
    """Whether every init container is done; a sidecar is when it has started."""
    return not _incomplete(record)


def _incomplete(record: PodRecord) -> list[str]:
    if any(not isinstance(each.state, Waiting) or each.last for each in record.main):
        return []  # the main containers have been started, whatever has become of sidecars since
    return [each.name for each in record.init if not (each.started if each.sidecar else each.succeeded())]


def pod_phase(record: PodRecord, restart_policy: str) -> str:
    """Pending, Running, Succeeded or Failed (concepts/workloads/pods/pod-lifecycle, "Pod phase").

    A pod is not Succeeded or Failed while one of its containers still runs.
    """
    phase = _phase_of_containers(record, restart_policy)
    runs = any(isinstance(each.state, Started) for each in [*record.init, *record.main])
    return "Running" if runs and phase in ("Succeeded", "Failed") else phase


def _phase_of_containers(record: PodRecord, restart_policy: str) -> str:
    if record.failure:
        return "Failed"
    if restart_policy == "Never" and any(
        isinstance(each.state, Terminated) and each.state.exit_code != 0 for each in record.init if not each.sidecar
    ):
        return "Failed"
    if record.ended:
        return "Succeeded" if all(_exit_code(each) == 0 for each in record.main) else "Failed"
    if not initialized(record) and not any(isinstance(each.state, Started) for each in record.main):
        return "Pending"
    if any(isinstance(each.state, Waiting) and not each.last for each in record.main):
        return "Pending"
    if any(isinstance(each.state, Started) for each in record.main) or restart_policy == "Always":
        return "Running"
    if all(_exit_code(each) == 0 for each in record.main):
        return "Succeeded"
    return "Failed" if restart_policy == "Never" else "Running"


def _exit_code(record: ContainerRecord) -> int:
    state = record.state if isinstance(record.state, Terminated) else record.last
    return state.exit_code if state else UNKNOWN_EXIT_CODE


def pod_status(pod: Json, record: PodRecord, now: float) -> Json:
    """The whole status that the node reports; updates `record.conditions` with their times of change."""
    policy = pod["spec"].get("restartPolicy", "Always")
    phase = pod_phase(record, policy)
    generation = pod["metadata"].get("generation", 0)
    existing = {each["type"]: each for each in (pod.get("status") or {}).get("conditions") or []}
    for kind, (status, reason, message) in _conditions(pod, record, phase, existing).items():
        before = record.conditions.get(kind) or existing.get(kind) or {}
        changed = before.get("status") != status
        record.conditions[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": generation,
            "lastProbeTime": None,
            "lastTransitionTime": timestamp(now) if changed else before.get("lastTransitionTime"),
        }
    reason, message = record.failure or (None, None)
    return {
        "phase": phase,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "hostIP": record.host_ip or None,
        "hostIPs": [{"ip": record.host_ip}] if record.host_ip else [],
        "podIP": record.pod_ip or None,
        "podIPs": [{"ip": record.pod_ip}] if record.pod_ip else [],
        "startTime": timestamp(record.start_time),
        "conditions": list(record.conditions.values()),
        "initContainerStatuses": [_init_json(each) for each in record.init],
        "containerStatuses": [each.to_json() for each in record.main],
    }


def _init_json(record: ContainerRecord) -> Json:
    # An init container that has done its work counts as ready.
    return record.to_json() | ({"ready": True} if not record.sidecar and record.succeeded() else {})


def _conditions(
    pod: Json, record: PodRecord, phase: str, existing: Mapping[str, Json]
) -> dict[str, tuple[str, str | None, str | None]]:
    """Condition type -> (status, reason, message), with the kubelet's reasons."""
    done = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase)
    result: dict[str, tuple[str, str | None, str | None]] = {
        "PodReadyToStartContainers": (_word(record.sandbox_ready), None, None)
    }
    incomplete = _incomplete(record)
    if not incomplete:
        result["Initialized"] = ("True", "PodCompleted" if phase == "Succeeded" else None, None)
    else:
        result["Initialized"] = (
            "False",
            "ContainersNotInitialized",
            f"containers with incomplete status: [{' '.join(incomplete)}]",
        )
    watched = [*(each for each in record.init if each.sidecar), *record.main]
    unready = [each.name for each in watched if not each.ready]
    if done:
        containers: tuple[str, str | None, str | None] = ("False", done, None)
    elif unready:
        containers = ("False", "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    else:
        containers = ("True", None, None)
    result["ContainersReady"] = containers
    result["Ready"] = _ready(containers, pod["spec"].get("readinessGates") or [], existing)
    return result


def _ready(
    containers: tuple[str, str | None, str | None], gates: Sequence[Json], existing: Mapping[str, Json]
) -> tuple[str, str | None, str | None]:
    if containers[0] != "True":
        return containers
    problems = []
    for gate in gates:
        kind = gate["conditionType"]
        if kind not in existing:
            problems.append(f'corresponding condition of pod readiness gate "{kind}" does not exist.')
        elif existing[kind]["status"] != "True":
            problems.append(f'the status of pod readiness gate "{kind}" is not "True", but {existing[kind]["status"]}')
    return ("False", "ReadinessGatesNotReady", ", ".join(problems)) if problems else ("True", None, None)


def _word(value: bool) -> str:
    return "True" if value else "False"


def _without_blanks(values: Json) -> Json:
    return {key: value for key, value in values.items() if value != ""}


def recorded(spec: Json, old: Json | None, *, init: bool, reason: str) -> ContainerRecord:
    """The record of a container as the node finds it: new, or as an earlier run of the hostlet reported it.

    A container that ran then is gone with that run: it is reported as the kubelet reports one it cannot find.
    """
    record = ContainerRecord(spec["name"], spec["image"], Waiting(reason))
    record.sidecar = init and spec.get("restartPolicy") == "Always"
    if not old:
        return record
    record.restart_count = old.get("restartCount", 0)
    record.container_id = old.get("containerID", "")
    last = (old.get("lastState") or {}).get("terminated")
    record.last = _terminated(last) if last else None
    state = old.get("state") or {}
    if "terminated" in state:
        record.state = _terminated(state["terminated"])
    if init and not record.sidecar:
        # The pod's network and folders are new, so its init containers run again.
        record.last = record.state if isinstance(record.state, Terminated) else record.last
        record.state = Waiting(reason)
    elif "running" in state:
        record.state = Terminated(
            UNKNOWN_EXIT_CODE,
            "ContainerStatusUnknown",
            seconds(state["running"].get("startedAt")),
            0.0,
            record.container_id,
            "The container could not be located when the node started again",
        )
    return record


def _terminated(state: Json) -> Terminated:
    return Terminated(
        state["exitCode"],
        state.get("reason", ""),
        seconds(state.get("startedAt")),
        seconds(state.get("finishedAt")),
        state.get("containerID", ""),
        state.get("message", ""),
    )
