"""Gathers all that one reconcile decides from: the custom resources, the pods of the cache, the workers' roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from headrace_core.api import names, resources
from headrace_core.api.names import COMPONENT_GATEWAY, Label
from headrace_operator import times
from headrace_operator.errors import InvalidSpecError
from headrace_operator.plan.disruption import Budget
from headrace_operator.plan.view import (
    ClusterSpec,
    Entry,
    FlipObject,
    FlipRules,
    GatewaySpec,
    ModelSpec,
    Observed,
    Pod,
    PoolSpec,
    Window,
)


def read_cluster(body: Mapping[str, Any]) -> resources.InferenceCluster:
    """An InferenceCluster as the API server returned it.

    Raises:
        InvalidSpecError: it was stored under another version of the schema; the message names the fields.
    """
    try:
        return resources.InferenceCluster.model_validate(body)
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()[:5]
        )
        raise InvalidSpecError(found) from error


def cluster_spec(cluster: resources.InferenceCluster) -> ClusterSpec:
    """What the planners see of it."""
    meta, spec, elasticity = cluster.metadata, cluster.spec, cluster.spec.elasticity
    mode = elasticity.mode
    return ClusterSpec(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        generation=meta.generation,
        model=ModelSpec(
            uri=spec.model.uri,
            served_name=spec.model.name,
            revision=spec.model.revision,
            max_model_len=spec.model.max_model_len,
        ),
        pools=tuple(_pool_spec(pool) for pool in spec.pools),
        flips=FlipRules(
            automatic=mode is resources.ElasticityMode.AUTO,
            advised=mode is resources.ElasticityMode.ADVISE,
            allowed=elasticity.flips.mode is resources.FlipsMode.ALLOWED,
            cooldown_s=elasticity.flips.cooldown_s,
            drain_timeout_s=elasticity.flips.drain_timeout_s,
            max_concurrent=elasticity.flips.max_concurrent,
            max_per_hour=elasticity.flips.max_per_hour,
            idle_below=elasticity.flips.idle_below_share,
            idle_for_s=elasticity.flips.idle_for_s,
            interval_s=elasticity.interval_s,
        ),
        gateway=GatewaySpec(
            managed=spec.gateway.managed, replicas=spec.gateway.replicas, template=spec.gateway.template
        ),
        engine_image=spec.engine.image,
        engine_args=tuple(arg.manifest() for arg in spec.engine.args),
        engine_env=tuple(variable.manifest() for variable in spec.engine.env),
        max_unavailable=spec.rollout.max_unavailable,
    )


def _pool_spec(pool: resources.Pool) -> PoolSpec:
    return PoolSpec(
        name=pool.name,
        role=pool.role.worker,
        elastic=pool.elastic,
        replicas=pool.replicas,
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        tensor=pool.parallelism.tensor,
        pipeline=pool.parallelism.pipeline,
        template=pool.template,
    )


def journal_view(status: resources.ClusterStatus) -> tuple[Entry, ...]:
    """The journal."""
    return tuple(
        Entry(
            name=flip.name,
            pod=flip.pod,
            pod_uid=flip.pod_uid,
            from_pool=flip.from_pool,
            to_pool=flip.to_pool,
            epoch=flip.epoch,
            boot_id=flip.boot_id,
            fence=flip.fence,
            started=flip.started.timestamp(),
            deadline=flip.deadline.timestamp(),
            step=flip.step,
        )
        for flip in status.active_flips
    )


def window_view(status: resources.ClusterStatus) -> Window | None:
    """The hour in which flips are counted."""
    window = status.flip_window
    return None if window is None else Window(started=window.started.timestamp(), count=window.count)


def flipped_view(status: resources.ClusterStatus, observed: Observed) -> dict[str, int]:
    """Net flips by pool: from the status, or from where the pods came from when there is no status."""
    if status.pools:
        return {pool.name: pool.flipped for pool in status.pools}
    counts: dict[str, int] = {}
    for pod in observed.workers:
        if pod.origin_pool and pod.origin_pool != pod.pool:
            counts[pod.origin_pool] = counts.get(pod.origin_pool, 0) - 1
            counts[pod.pool] = counts.get(pod.pool, 0) + 1
    return counts


def flip_view(body: Mapping[str, Any], cluster_uid: str) -> FlipObject:
    """An InferenceFlip."""
    meta, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    accepted = next((item for item in status.get("conditions") or [] if item["type"] == names.Condition.ACCEPTED), None)
    return FlipObject(
        name=meta["name"],
        uid=meta["uid"],
        cluster=spec["clusterName"],
        pod=spec["podName"],
        to_pool=spec["targetPool"],
        reason=spec.get("reason", ""),
        created=times.parse(meta["creationTimestamp"]),
        generation=int(meta.get("generation", 1)),
        outcome=status.get("outcome") or "",
        finished=times.parse(status["finished"]) if status.get("finished") else None,
        owned=any(item["uid"] == cluster_uid for item in meta.get("ownerReferences") or []),
        by_operator=(meta.get("labels") or {}).get(Label.APP_MANAGED_BY) == names.MANAGER,
        waiting_for=accepted["reason"] if accepted is not None and accepted["status"] != "True" else "",
    )


def budget_view(body: Mapping[str, Any]) -> Budget:
    """A PodDisruptionBudget."""
    selector = body["spec"].get("selector")
    owners = [item["uid"] for item in body["metadata"].get("ownerReferences") or [] if item.get("controller")]
    return Budget(
        name=body["metadata"]["name"],
        owner_uid=owners[0] if owners else "",
        match_labels=(selector or {}).get("matchLabels") or {},
        match_expressions=tuple((selector or {}).get("matchExpressions") or ()),
        selects_nothing=selector is None,
    )


def pods_to_ask(observed: Observed) -> tuple[Pod, ...]:
    """Workers whose role is needed: those in a flip while there is one, else all that are ready."""
    open_uids = {entry.pod_uid for entry in observed.journal}
    wanted = {flip.pod for flip in observed.flips if not flip.outcome}
    in_flip = tuple(
        pod
        for pod in observed.workers
        if pod.uid in open_uids or pod.draining or pod.flip is not None or pod.name in wanted
    )
    if open_uids:
        return in_flip
    ready = tuple(pod for pod in observed.workers if pod.ready and pod not in in_flip)
    return in_flip + ready


def gateways_ready(pods: tuple[Pod, ...]) -> int:
    """Ready gateway pods. Their controller is a ReplicaSet, so they are told by label."""
    return sum(pod.ready and pod.alive for pod in pods if pod.component == COMPONENT_GATEWAY)
