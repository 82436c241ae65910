"""Every name that two parts of Headrace must spell alike: labels, annotations, reasons, variables, metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

GROUP: Final = "serving.headrace.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

MANAGER: Final = "headrace-operator"
"""Field manager of every server-side apply, and the value of `app.kubernetes.io/managed-by`."""

WORKER_PORT: Final = 8000
GATEWAY_PORT: Final = 8080
OPERATOR_METRICS_PORT: Final = 8081
OPERATOR_HEALTH_PORT: Final = 8082
NIXL_PORT: Final = 5600

CONTAINER_WORKER: Final = "worker"
CONTAINER_GATEWAY: Final = "gateway"

COMPONENT_WORKER: Final = "worker"
COMPONENT_GATEWAY: Final = "gateway"
"""Values of `app.kubernetes.io/component` on what the operator makes."""


class Kind(StrEnum):
    """Kinds of the API group."""

    CLUSTER = "InferenceCluster"
    FLIP = "InferenceFlip"


class Plural(StrEnum):
    """Resource names of the API group, as in a URL path."""

    CLUSTER = "inferenceclusters"
    FLIP = "inferenceflips"


class Role(StrEnum):
    """A worker's role: the value of the role label and of `role` on the wire."""

    PREFILL = "prefill"
    DECODE = "decode"


ROLE_DRAINING: Final = "draining"
"""Third value of the role label: a worker between two roles, to which nobody may send new work."""


class Label:
    """Labels on pods and on what the operator makes for a cluster."""

    CLUSTER: Final = f"{GROUP}/cluster"
    POOL: Final = f"{GROUP}/pool"
    ROLE: Final = f"{GROUP}/role"
    REVISION: Final = f"{GROUP}/revision"
    LLMD_ROLE: Final = "llm-d.ai/role"
    """The same value as ROLE, so that an llm-d endpoint picker works unchanged."""
    APP_NAME: Final = "app.kubernetes.io/name"
    APP_INSTANCE: Final = "app.kubernetes.io/instance"
    APP_COMPONENT: Final = "app.kubernetes.io/component"
    APP_PART_OF: Final = "app.kubernetes.io/part-of"
    APP_MANAGED_BY: Final = "app.kubernetes.io/managed-by"


class Annotation:
    """Annotations on worker pods. All but EPOCH and ORIGIN_POOL stand there only while a flip is in flight."""

    EPOCH: Final = f"{GROUP}/epoch"
    ORIGIN_POOL: Final = f"{GROUP}/origin-pool"
    """The pool whose template the pod was made from, wherever flips take it."""
    TARGET_ROLE: Final = f"{GROUP}/target-role"
    TARGET_POOL: Final = f"{GROUP}/target-pool"
    FROM_ROLE: Final = f"{GROUP}/from-role"
    FLIP_ID: Final = f"{GROUP}/flip-id"
    DEADLINE: Final = f"{GROUP}/deadline"
    """Time of day in RFC 3339 at which the drain ends."""
    BOOT_ID: Final = f"{GROUP}/boot-id"
    """The worker process that was asked, so that a restarted one is not taken for it."""


class Condition(StrEnum):
    """Condition types in the status of an InferenceCluster or an InferenceFlip."""

    ACCEPTED = "Accepted"
    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    COMPLETE = "Complete"


class Outcome(StrEnum):
    """How a flip ended: `status.outcome` of an InferenceFlip."""

    SUCCEEDED = "Succeeded"
    ROLLED_BACK = "RolledBack"
    REPLACED = "Replaced"
    REFUSED = "Refused"


class FlipStep(StrEnum):
    """Where an open flip stands: `status.activeFlips[].step`."""

    RESERVED = "Reserved"
    LABELLED = "Labelled"
    DRAINING = "Draining"
    SWITCHING = "Switching"
    ROLLING_BACK = "RollingBack"
    SWITCHED = "Switched"
    RELABELLED = "Relabelled"


class Reason(StrEnum):
    """Reasons in conditions, Events and metrics of the operator."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    TEMPLATE_REFUSED = "TemplateRefused"
    TEMPLATE_CONFLICT = "TemplateConflict"

    ALL_READY = "AllReady"
    WORKERS_NOT_READY = "WorkersNotReady"
    GATEWAY_NOT_READY = "GatewayNotReady"

    STABLE = "Stable"
    SCALING = "Scaling"
    ROLLING_OUT = "RollingOut"
    FLIPPING = "Flipping"
    FLIP_ADVISED = "FlipAdvised"

    HEALTHY = "Healthy"
    PODS_FAILING = "PodsFailing"
    PODS_UNSCHEDULABLE = "PodsUnschedulable"
    FOREIGN_BUDGET = "ForeignDisruptionBudget"
    METRICS_UNKNOWN = "MetricsUnknown"
    REFUSED_BY_API = "RefusedByAPI"

    SCALE_UP = "ScaleUp"
    SCALE_DOWN = "ScaleDown"
    POOL_REMOVED = "PoolRemoved"
    POD_FAILED = "PodFailed"
    OUT_OF_DATE = "OutOfDate"
    ADOPTED = "Adopted"
    ROLE_REPAIRED = "RoleRepaired"

    FLIP_RESERVED = "FlipReserved"
    FLIP_DROPPED = "FlipDropped"
    FLIP_REBUILT = "FlipRebuilt"
    FLIPPED = "Flipped"
    WORKER_ROLLED_BACK = "WorkerRolledBack"
    DEADLINE_PASSED = "DeadlinePassed"
    CONTAINER_RESTARTED = "ContainerRestarted"
    POOL_GONE = "PoolGone"
    POD_GONE = "PodGone"
    WORKER_FAILED = "WorkerFailed"
    WORKER_SILENT = "WorkerSilent"
    WORKER_STUCK = "WorkerStuck"
    SHAPE_DIFFERS = "ShapeDiffers"

    WAITING_FOR_ANOTHER_FLIP = "WaitingForAnotherFlip"
    WAITING_FOR_WORKER = "WaitingForWorker"
    FLIPS_FORBIDDEN = "FlipsForbidden"
    CLUSTER_NOT_FOUND = "ClusterNotFound"
    POD_NOT_FOUND = "PodNotFound"
    POOL_NOT_FOUND = "PoolNotFound"
    POOL_NOT_ELASTIC = "PoolNotElastic"
    SAME_ROLE = "SameRole"
    BELOW_MINIMUM = "BelowMinimum"
    ABOVE_MAXIMUM = "AboveMaximum"
    COOLING_DOWN = "CoolingDown"
    OVER_HOURLY_BUDGET = "OverHourlyBudget"
    WORKER_NOT_READY = "WorkerNotReady"


class Env:
    """Environment variables that the operator sets on the containers it makes."""

    CLUSTER: Final = "HEADRACE_CLUSTER"
    NAMESPACE: Final = "HEADRACE_NAMESPACE"
    POD_NAME: Final = "HEADRACE_POD_NAME"
    POD_UID: Final = "HEADRACE_POD_UID"
    POD_IP: Final = "HEADRACE_POD_IP"
    ROLE: Final = "HEADRACE_ROLE"
    """The role that the pod was made for; the role it has later is known from the worker alone."""
    MODEL: Final = "HEADRACE_MODEL"
    MODEL_REVISION: Final = "HEADRACE_MODEL_REVISION"
    SERVED_NAME: Final = "HEADRACE_SERVED_NAME"
    MAX_MODEL_LEN: Final = "HEADRACE_MAX_MODEL_LEN"
    TENSOR_PARALLEL: Final = "HEADRACE_TENSOR_PARALLEL"
    PIPELINE_PARALLEL: Final = "HEADRACE_PIPELINE_PARALLEL"
    ENGINE_ARGS: Final = "HEADRACE_ENGINE_ARGS"
    """JSON list of `{"name", "value"}`, in the shape of `spec.engine.args`."""
    TOKEN_FILE: Final = "HEADRACE_TOKEN_FILE"  # noqa: S105 - a file's name
    PORT: Final = "HEADRACE_PORT"


TOKEN_SECRET_KEY: Final = "token"  # noqa: S105 - a key's name
TOKEN_MOUNT_PATH: Final = "/var/run/headrace"  # noqa: S105 - a path
TOKEN_PATH: Final = f"{TOKEN_MOUNT_PATH}/{TOKEN_SECRET_KEY}"


def token_secret_name(cluster: str) -> str:
    """Name of the Secret that holds a cluster's bearer token."""
    return f"{cluster}-token"


def gateway_name(cluster: str) -> str:
    """Name of a cluster's gateway: its Deployment, Service, ServiceAccount, Role and RoleBinding."""
    return f"{cluster}-gateway"


def worker_name(cluster: str) -> str:
    """Name of a cluster's workers' ServiceAccount."""
    return f"{cluster}-worker"


def worker_pod_name(cluster: str, slot: int) -> str:
    """Name of the worker pod in a slot. It says nothing of the role, which can change."""
    return f"{cluster}-w{slot}"


def budget_name(cluster: str, role: Role) -> str:
    """Name of the PodDisruptionBudget of a role."""
    return f"{cluster}-{role}"


class Metric:
    """Names of Headrace's own metrics, without the suffix that prometheus-client adds."""

    WORKER_ROLE: Final = "headrace_worker_role"
    WORKER_EPOCH: Final = "headrace_worker_epoch"
    WORKER_BUSY_SECONDS: Final = "headrace_worker_busy_seconds"
    """Counter: seconds in which the worker had at least one request queued, running or being received."""
    WORKER_DRAIN_SECONDS: Final = "headrace_worker_drain_seconds"
    WORKER_SWITCH_SECONDS: Final = "headrace_worker_switch_seconds"
    WORKER_HELD_KV_BLOCKS: Final = "headrace_worker_held_kv_blocks"
    WORKER_KV_SENT_BYTES: Final = "headrace_worker_kv_sent_bytes"
    WORKER_KV_RECEIVED_BYTES: Final = "headrace_worker_kv_received_bytes"
    WORKER_KV_RECEIVES: Final = "headrace_worker_kv_receives"
    WORKER_KV_RECEIVE_FAILURES: Final = "headrace_worker_kv_receive_failures"
    WORKER_PREFILLED_TOKENS: Final = "headrace_worker_prefilled_tokens"
    """Counter: prompt tokens that this worker's engine computed itself."""
    WORKER_REFUSED: Final = "headrace_worker_refused_requests"
    GATEWAY_REQUESTS: Final = "headrace_gateway_requests"
    GATEWAY_RETRIED: Final = "headrace_gateway_retried_requests"
    GATEWAY_LOST: Final = "headrace_gateway_lost_requests"
    GATEWAY_TTFT_SECONDS: Final = "headrace_gateway_ttft_seconds"
    GATEWAY_TPOT_SECONDS: Final = "headrace_gateway_tpot_seconds"
    GATEWAY_STAGE_SECONDS: Final = "headrace_gateway_stage_seconds"
    GATEWAY_WORKERS: Final = "headrace_gateway_workers"
    OPERATOR_FLIPS: Final = "headrace_operator_flips"
    OPERATOR_DRAIN_SECONDS: Final = "headrace_operator_flip_drain_seconds"
    OPERATOR_SWITCH_SECONDS: Final = "headrace_operator_flip_switch_seconds"
    OPERATOR_PODS: Final = "headrace_operator_pods"
    OPERATOR_RECONCILE_SECONDS: Final = "headrace_operator_reconcile_seconds"
    OPERATOR_PROMETHEUS_AGE_SECONDS: Final = "headrace_operator_prometheus_age_seconds"
    OPERATOR_DECISIONS: Final = "headrace_operator_decisions"
    OPERATOR_LEADER: Final = "headrace_operator_leader"
    OPERATOR_API_REQUESTS: Final = "headrace_operator_api_requests"
