"""Turns objects of the API into the tables that the commands print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from headrace_core.api.names import Annotation, Label

NOTHING = "-"
FLIP_COLUMNS = ("NAME", "CLUSTER", "POD", "FROM", "TO", "OUTCOME", "DRAIN", "SWITCH", "AGE", "REASON")
POD_COLUMNS = ("POD", "POOL", "ROLE", "EPOCH", "READY", "NODE", "AGE")
POOL_COLUMNS = ("POOL", "DESIRED", "READY", "DRAINING", "UPDATED", "FLIPPED")
CONDITION_COLUMNS = ("CONDITION", "STATUS", "REASON", "MESSAGE")

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_STILL_IN_SMALLER_UNIT = 2


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, kubectl's way."""
    lines = [tuple(columns), *(tuple(cell or NOTHING for cell in row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def flip_row(flip: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    """One InferenceFlip under FLIP_COLUMNS. What is not known yet is left empty."""
    spec, status = flip["spec"], flip.get("status") or {}
    drain_s, switch_ms = status.get("drainSeconds"), status.get("switchMilliseconds")
    return (
        flip["metadata"]["name"],
        spec["clusterName"],
        spec["podName"],
        status.get("fromPool", ""),
        spec["targetPool"],
        flip_state(flip),
        "" if drain_s is None else f"{drain_s:.2f}s",
        "" if switch_ms is None else f"{switch_ms:.1f}ms",
        age(flip["metadata"].get("creationTimestamp"), now),
        spec.get("reason", ""),
    )


def flip_state(flip: Mapping[str, Any]) -> str:
    """Its outcome, or how far it is: Pending until the operator has accepted it, then Running."""
    status = flip.get("status") or {}
    if status.get("outcome"):
        return str(status["outcome"])
    return "Running" if status.get("started") else "Pending"


def pod_row(pod: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    """One worker pod under POD_COLUMNS."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    ready = {item["type"]: item["status"] for item in status.get("conditions") or ()}.get("Ready", "")
    return (
        metadata["name"],
        labels.get(Label.POOL, ""),
        _role(labels, annotations),
        annotations.get(Annotation.EPOCH, ""),
        "Terminating" if "deletionTimestamp" in metadata else ready,
        (pod.get("spec") or {}).get("nodeName", ""),
        age(metadata.get("creationTimestamp"), now),
    )


def _role(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    role = labels.get(Label.ROLE, "")
    before, after = annotations.get(Annotation.FROM_ROLE), annotations.get(Annotation.TARGET_ROLE)
    return f"{role} ({before} to {after})" if before and after else role


def pool_row(pool: Mapping[str, Any]) -> tuple[str, ...]:
    """One entry of `status.pools` under POOL_COLUMNS."""
    counts = (pool.get(key, 0) for key in ("desired", "ready", "draining", "updated"))
    return (pool["name"], *(str(count) for count in counts), f"{pool.get('flipped', 0):+d}")


def condition_row(condition: Mapping[str, Any]) -> tuple[str, ...]:
    """One condition under CONDITION_COLUMNS."""
    return (condition["type"], condition["status"], condition.get("reason", ""), condition.get("message", ""))


def cluster_text(cluster: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], now: datetime) -> str:
    """All that `headrace status` prints of one cluster."""
    metadata, status = cluster["metadata"], cluster.get("status") or {}
    head = f"{metadata['namespace']}/{metadata['name']}"
    if status.get("observedGeneration", -1) < metadata.get("generation", 0):
        head += "   (the operator has not seen the latest change yet)"
    parts = [head]
    if conditions := status.get("conditions"):
        parts.append(table(CONDITION_COLUMNS, map(condition_row, conditions)))
    if pools := status.get("pools"):
        parts.append(table(POOL_COLUMNS, map(pool_row, pools)))
    parts.append(table(POD_COLUMNS, (pod_row(pod, now) for pod in pods)) if pods else "no worker pods")
    for active in status.get("activeFlips") or ():
        parts.append(f"flip under way: {active['pod']} from {active['from']} to {active['to']}, {active['step']}")
    return "\n\n".join(parts)


def age(timestamp: str | None, now: datetime) -> str:
    """How long ago, in the largest unit of which there are two or more; empty where the time is not known."""
    if not timestamp:
        return ""
    seconds = max(0, int((now - datetime.fromisoformat(timestamp)).total_seconds()))
    for unit, letter in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "m")):
        if seconds >= _STILL_IN_SMALLER_UNIT * unit:
            return f"{seconds // unit}{letter}"
    return f"{seconds}s"


def as_json(items: Sequence[Mapping[str, Any]]) -> str:
    """Objects for another program, as a list of the Kubernetes API."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}, indent=2)


def now() -> datetime:
    """The time against which ages are shown."""
    return datetime.now(UTC)
