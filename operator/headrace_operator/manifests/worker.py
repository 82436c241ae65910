"""Builds what workers are made of: the pod template of a pool, a pod in a slot, account, token, budgets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from headrace_core.api import names
from headrace_core.api.names import COMPONENT_WORKER, Annotation, Env, Label, Role
from headrace_operator.manifests.shared import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    Images,
    Manifest,
    from_field,
    labels,
    leave_to_user,
    literal,
    metadata,
    owner,
    token_mount,
    token_volume,
)
from headrace_operator.plan.view import ClusterSpec, PoolSpec

GPU_RESOURCE: Final = "nvidia.com/gpu"
TERMINATION_GRACE_S: Final = 600
"""Long enough for the answers that a worker is writing when it is told to go; it leaves as soon as it is drained."""
STARTUP_PERIOD_S: Final = 2
STARTUP_TRIES: Final = 1800
"""An hour at one probe every two seconds: loading the largest models from a cold store takes tens of minutes."""


def template_name(cluster: str, pool: str) -> str:
    """Name of the PodTemplate on which the API server merges a pool's template."""
    return f"{cluster}-pool-{pool}"


def base_template(cluster: ClusterSpec, pool: PoolSpec, images: Images) -> Manifest:
    """The operator's part of a pool's pod template; the user's part is merged into it by the API server."""
    base: Manifest = {
        "metadata": {
            "labels": {**labels(cluster, COMPONENT_WORKER), **role_labels(pool)},
            "annotations": {Annotation.EPOCH: "0", Annotation.ORIGIN_POOL: pool.name},
        },
        "spec": {
            "serviceAccountName": names.worker_name(cluster.name),
            "automountServiceAccountToken": False,
            # A Service called headrace would set HEADRACE_PORT, which is a setting of ours.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
            "securityContext": dict(POD_SECURITY),
            "containers": [_container(cluster, pool, images)],
            "volumes": [token_volume(cluster)],
        },
    }
    if images.pull_secrets:
        base["spec"]["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    if pool.tensor * pool.pipeline > 1:
        # The ranks of one engine exchange tensors through shared memory; a container's 64 MiB are too few.
        base["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        base["spec"]["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    return leave_to_user(base, pool.template, names.CONTAINER_WORKER)


def role_labels(pool: PoolSpec) -> dict[str, str]:
    """Labels of a worker in a pool."""
    return {Label.POOL: pool.name, Label.ROLE: pool.role.value, Label.LLMD_ROLE: pool.role.value}


def pod(cluster: ClusterSpec, slot: int, template: Mapping[str, Any], revision_hash: str) -> Manifest:
    """The pod in a slot, made from a merged template."""
    meta = template.get("metadata") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.worker_pod_name(cluster.name, slot),
            "namespace": cluster.namespace,
            "labels": {**(meta.get("labels") or {}), Label.REVISION: revision_hash},
            "annotations": dict(meta.get("annotations") or {}),
            "ownerReferences": [owner(cluster)],
        },
        "spec": template["spec"],
    }


def service_account(cluster: ClusterSpec) -> Manifest:
    """The workers' account. It has no rights: a worker never talks to the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(cluster, names.worker_name(cluster.name), COMPONENT_WORKER),
        "automountServiceAccountToken": False,
    }


def token_secret(cluster: ClusterSpec, token: str) -> Manifest:
    """The Secret with the bearer token that gateway, workers and operator share."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata(cluster, names.token_secret_name(cluster.name), COMPONENT_WORKER),
        "stringData": {names.TOKEN_SECRET_KEY: f"{token}\n"},
    }


def disruption_budget(cluster: ClusterSpec, role: Role, min_available: int) -> Manifest:
    """The budget of a role. An integer minAvailable: percentages and maxUnavailable need `/scale` on the owner."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(cluster, names.budget_name(cluster.name, role), COMPONENT_WORKER),
        "spec": {
            "minAvailable": min_available,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {
                    Label.CLUSTER: cluster.name,
                    Label.APP_COMPONENT: COMPONENT_WORKER,
                    Label.ROLE: role.value,
                }
            },
        },
    }


def _container(cluster: ClusterSpec, pool: PoolSpec, images: Images) -> Manifest:
    gpus = str(pool.tensor * pool.pipeline)
    return {
        "name": names.CONTAINER_WORKER,
        "image": cluster.engine_image or images.worker,
        "imagePullPolicy": images.pull_policy,
        "ports": [{"name": "http", "containerPort": names.WORKER_PORT, "protocol": "TCP"}],
        "env": _environment(cluster, pool),
        "resources": {"requests": {GPU_RESOURCE: gpus}, "limits": {GPU_RESOURCE: gpus}},
        "volumeMounts": [token_mount()],
        "securityContext": dict(CONTAINER_SECURITY),
        "startupProbe": {
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": STARTUP_PERIOD_S,
            "timeoutSeconds": 2,
            "failureThreshold": STARTUP_TRIES,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": 5,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def _environment(cluster: ClusterSpec, pool: PoolSpec) -> list[Manifest]:
    model = cluster.model
    variables = [
        from_field(Env.POD_NAME, "metadata.name"),
        from_field(Env.POD_UID, "metadata.uid"),
        from_field(Env.POD_IP, "status.podIP"),
        literal(Env.ROLE, pool.role.value),
        literal(Env.MODEL, model.uri),
        literal(Env.SERVED_NAME, model.served_name),
        literal(Env.TENSOR_PARALLEL, str(pool.tensor)),
        literal(Env.PIPELINE_PARALLEL, str(pool.pipeline)),
        literal(Env.ENGINE_ARGS, json.dumps([dict(item) for item in cluster.engine_args], sort_keys=True)),
        literal(Env.TOKEN_FILE, names.TOKEN_PATH),
        literal(Env.PORT, str(names.WORKER_PORT)),
    ]
    if model.revision:
        variables.append(literal(Env.MODEL_REVISION, model.revision))
    if model.max_model_len is not None:
        variables.append(literal(Env.MAX_MODEL_LEN, str(model.max_model_len)))
    return variables + [dict(item) for item in cluster.engine_env]
