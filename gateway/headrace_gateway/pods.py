"""Folds what the Kubernetes API says of the workers' pods into slim records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace_core.api.names import Annotation, Label


@dataclass(frozen=True, slots=True)
class PodRecord:
    """What the gateway needs to know of a worker pod. All of it is a hint: the worker itself knows better."""

    name: str
    """Empty for a worker given by its address alone, which says its name itself."""
    uid: str
    address: str
    """`host:port` of the worker's HTTP server."""
    role: str
    """Value of the role label: prefill, decode or draining; empty without the label."""
    epoch: int
    """Value of the epoch annotation: the epoch in which the role label was written."""
    ready: bool
    terminating: bool


class PodEventType(StrEnum):
    """Types of a watch event (Kubernetes API concepts, "Efficient detection of changes")."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


PodTable = Mapping[str, PodRecord]
"""Pods by name."""


def record_of(pod: Mapping[str, Any], *, port: int) -> PodRecord | None:
    """The record of a pod as the API shows it; None while it has no address, or once it has run to its end."""
    metadata, status = pod["metadata"], pod.get("status", {})
    address = status.get("podIP")
    if not address or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    conditions = status.get("conditions") or ()
    return PodRecord(
        name=metadata["name"],
        uid=metadata["uid"],
        address=f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        role=(metadata.get("labels") or {}).get(Label.ROLE, ""),
        epoch=_whole_number((metadata.get("annotations") or {}).get(Annotation.EPOCH)),
        ready=any(item["type"] == "Ready" and item["status"] == "True" for item in conditions),
        terminating="deletionTimestamp" in metadata,
    )


def table_of(pods: Iterable[Mapping[str, Any]], *, port: int) -> dict[str, PodRecord]:
    """The table that a list of pods gives."""
    records = (record_of(pod, port=port) for pod in pods)
    return {record.name: record for record in records if record}


def fold(table: PodTable, event_type: PodEventType, pod: Mapping[str, Any], *, port: int) -> dict[str, PodRecord]:
    """The table after a watch event."""
    name = pod["metadata"]["name"]
    after = {other: record for other, record in table.items() if other != name}
    record = None if event_type is PodEventType.DELETED else record_of(pod, port=port)
    if record:
        after[name] = record
    return after


def static_table(addresses: Iterable[str]) -> dict[str, PodRecord]:
    """The table of workers that are given by address, without Kubernetes: their own reports say the rest."""
    return {
        address: PodRecord(name="", uid="", address=address, role="", epoch=0, ready=True, terminating=False)
        for address in addresses
    }


def _whole_number(text: str | None) -> int:
    # A malformed annotation says nothing: with 0 a worker's report wins over the label, as it should.
    return int(text) if text and text.isdecimal() else 0
