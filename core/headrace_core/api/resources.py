"""The custom resources InferenceCluster and InferenceFlip: the source of the CRDs and of all defaults.

Attribute docstrings become the descriptions in the CRD. Rules across fields are CEL, beside the fields they read:
the API server enforces them, and what it has accepted is not checked a second time here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from headrace_core.api import names
from headrace_core.api.parts import (
    Condition,
    Conditions,
    ConditionStatus,
    Count,
    Generation,
    LabelName,
    Metadata,
    Model,
    ObjectName,
    Sequence,
    Text,
)
from headrace_core.api.schema import Rule, items_by, rules
from headrace_core.api.spec import (
    ClusterSpec,
    Elasticity,
    ElasticityMode,
    ElasticityPolicy,
    Engine,
    EngineArg,
    EnvVar,
    Flips,
    FlipsMode,
    Gateway,
    GatewayMode,
    ModelSource,
    Parallelism,
    Pool,
    PoolRole,
    Rollout,
    Scaling,
)

__all__ = [
    "ActiveFlip", "ClusterSpec", "ClusterStatus", "Condition", "ConditionStatus", "Elasticity", "ElasticityMode",
    "ElasticityPolicy", "Engine", "EngineArg", "EnvVar", "FlipSpec", "FlipStatus", "FlipWindow", "Flips", "FlipsMode",
    "Gateway", "GatewayMode", "InferenceCluster", "InferenceFlip", "Metadata", "ModelSource", "Parallelism", "Pool",
    "PoolRole", "PoolStatus", "Rollout", "Scaling",
]  # fmt: skip


class PoolStatus(Model):
    """How many workers a pool has, and in which state."""

    name: LabelName
    """Name of the pool."""
    desired: Count = 0
    """Workers that the pool should have: replicas plus flipped, within its minimum and maximum."""
    ready: Count = 0
    """Workers whose pod is ready."""
    draining: Count = 0
    """Workers that are leaving the pool by a flip."""
    updated: Count = 0
    """Workers made from the present template."""
    flipped: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Net number of workers that flips brought into the pool; negative where they took some away."""


class ActiveFlip(Model):
    """A flip under way: an entry of the journal from which the next leader carries on."""

    name: ObjectName
    """Name of its InferenceFlip."""
    pod: ObjectName
    """The worker's pod."""
    pod_uid: Annotated[str, Field(alias="podUID", max_length=64)]
    """UID of that pod, so that a new pod of the same name is not taken for it."""
    from_pool: Annotated[str, Field(alias="from", max_length=40)]
    """Pool that the worker leaves."""
    to_pool: Annotated[str, Field(alias="to", max_length=40)]
    """Pool that the worker joins."""
    step: names.FlipStep
    """Step that is done or under way."""
    epoch: Sequence = 0
    """The worker's epoch before the flip."""
    boot_id: Annotated[str, Field(alias="bootID", max_length=64)] = ""
    """The worker process that was asked."""
    fence: Sequence = 0
    """Transition count of the Lease under which the flip was reserved."""
    started: AwareDatetime
    """When the flip was reserved."""
    deadline: AwareDatetime
    """When the drain ends."""


class FlipWindow(Model):
    """The hour in which flips are counted against maxPerHour."""

    started: AwareDatetime
    """Begin of the hour."""
    count: Count = 0
    """Flips begun in it."""


class ClusterStatus(Model):
    """What an InferenceCluster is."""

    observed_generation: Generation = -1
    """Generation of the spec that this status is about; -1 until the operator has seen the object."""
    conditions: Conditions = ()
    """Accepted, Ready, Progressing, Degraded."""
    pools: Annotated[tuple[PoolStatus, ...], Field(max_length=64), items_by("name")] = ()
    """Workers by pool."""
    prefill: Annotated[str, StringConstraints(max_length=32)] = ""
    """Ready and desired workers of all Prefill pools, such as 2/3."""
    decode: Annotated[str, StringConstraints(max_length=32)] = ""
    """Ready and desired workers of all Decode pools, such as 1/1."""
    active_flips: Annotated[tuple[ActiveFlip, ...], Field(max_length=100), items_by("name")] = ()
    """Flips under way."""
    flip_window: FlipWindow | None = None
    """Flips of the present hour."""


class InferenceCluster(Model):
    """A model served by elastic pools of prefill and decode workers."""

    api_version: str = names.API_VERSION
    kind: str = names.Kind.CLUSTER
    metadata: Metadata
    spec: ClusterSpec
    """What the cluster should be."""
    status: ClusterStatus = ClusterStatus()
    """What the cluster is."""


class FlipSpec(Model):
    """Which worker should go to which pool. Immutable: a second thought is a second object."""

    model_config = rules(Rule("self == oldSelf", "an InferenceFlip does not change: delete it and create another"))

    cluster_name: LabelName
    """The InferenceCluster, in the same namespace."""
    pod_name: ObjectName
    """The worker's pod."""
    target_pool: LabelName
    """The pool that the worker should join."""
    reason: Text = ""
    """Why, for people."""


class FlipStatus(Model):
    """What became of it."""

    observed_generation: Generation = -1
    """Generation of the spec that this status is about; -1 until the operator has seen the object."""
    conditions: Conditions = ()
    """Accepted, Complete."""
    from_pool: Annotated[str, StringConstraints(max_length=40)] = ""
    """Pool that the worker left."""
    drain_seconds: Annotated[float, Field(ge=0)] | None = None
    """From the first word of the drain until the worker held nothing, as the worker measured it."""
    switch_milliseconds: Annotated[float, Field(ge=0)] | None = None
    """From the end of the drain until the engine's scheduler had read the new epoch, as the worker measured it."""
    started: AwareDatetime | None = None
    """When the flip was reserved."""
    finished: AwareDatetime | None = None
    """When its outcome was known."""
    outcome: names.Outcome | None = None
    """Succeeded; RolledBack: the worker kept its role; Replaced: its pod was replaced; Refused: nothing was done."""


class InferenceFlip(Model):
    """A worker's change of role: asked for by a person or by the policy, and the record of it afterwards."""

    api_version: str = names.API_VERSION
    kind: str = names.Kind.FLIP
    metadata: Metadata
    spec: FlipSpec
    """Which worker should go to which pool."""
    status: FlipStatus = FlipStatus()
    """What became of it."""
