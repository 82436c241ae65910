"""Turns a deployment into a patch of an InferenceCluster, or says why it cannot be one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_core.api.spec import MAX_GPUS_PER_WORKER, MAX_REPLICAS, Pool, PoolRole, Scaling
from headrace_core.planner.deployment import Deployment, Side
from headrace_core.planner.question import Layout
from headrace_core.planner.space import Nodes


def patch_of(deployment: Deployment, nodes: Nodes, present: Sequence[Pool]) -> tuple[dict[str, Any] | None, str]:
    """A JSON merge patch that makes a cluster's pools those of the deployment, and a word on it.

    `present`: the cluster's pools. The first of each role keeps its name, its template and all else; where there is
    none, the pool is called after its role.
    """
    if deployment.layout.colocation is not None:
        return None, "colocated workers are no InferenceCluster: its pools are of prefill or of decode workers"
    for side in deployment.sides:
        if side.shape.gpus > min(nodes.gpus, MAX_GPUS_PER_WORKER):
            return None, (
                f"{side.shape.name} takes {side.shape.gpus} GPUs, but a worker is one pod on one node of {nodes.gpus}; "
                "plan with --nodes-per-worker 1"
            )
        if side.workers > MAX_REPLICAS:
            return None, f"{side.workers} workers are more than a pool may have ({MAX_REPLICAS}); split the traffic"
    total = sum(side.workers for side in deployment.sides)
    flips = _flips(deployment)
    roles = (PoolRole.PREFILL, PoolRole.DECODE)
    pools = [
        _pool(side, role, present, flips=flips, total=total) for side, role in zip(deployment.sides, roles, strict=True)
    ]
    return {"spec": {"pools": pools}}, _note(deployment, flips=flips)


def _flips(deployment: Deployment) -> bool:
    """Whether a worker of one side fits the other."""
    first, second = (side.shape for side in deployment.sides)
    return (first.offer, first.tensor, first.pipeline) == (second.offer, second.tensor, second.pipeline)


def _pool(side: Side, role: PoolRole, present: Sequence[Pool], *, flips: bool, total: int) -> dict[str, Any]:
    known = next((pool for pool in present if pool.role is role), None)
    kept = known.model_dump(mode="json", by_alias=True, exclude_unset=True) if known else {"name": role.worker.value}
    elastic = flips and (known is None or known.scaling is Scaling.ELASTIC)
    changed: dict[str, Any] = {
        "role": role.value,
        "scaling": (Scaling.ELASTIC if elastic else Scaling.STATIC).value,
        "replicas": side.workers,
        "parallelism": {"tensor": side.shape.tensor, "pipeline": side.shape.pipeline},
    }
    if elastic:
        least = min(known.min_replicas, side.workers) if known else 1
        changed |= {"minReplicas": least, "maxReplicas": min(MAX_REPLICAS, max(side.workers, total - 1))}
    return kept | changed


def _note(deployment: Deployment, *, flips: bool) -> str:
    notes: list[str] = []
    names = sorted({side.shape.offer.accelerator.name for side in deployment.sides})
    if len(names) > 1:
        notes.append(f"select the nodes of {' and '.join(names)} in the pools' templates")
    if not flips:
        notes.append("the pools have different shapes, so no worker flips: both are Static")
    if deployment.layout is Layout.PAIRED:
        notes.append(
            "each prefill worker has to share a node with a decode worker: add a pod affinity to the templates"
        )
    return "; ".join(notes)
