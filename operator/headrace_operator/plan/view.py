"""What the planners see of a cluster: its spec, its pods, its journal and its flips, as plain immutable values.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_core.api.names import COMPONENT_WORKER, ROLE_DRAINING, FlipStep, Role
from headrace_core.api.wire import RoleState


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One entry of `spec.pools`, defaults filled in."""

    name: str
    role: Role
    elastic: bool
    replicas: int
    min_replicas: int
    max_replicas: int
    tensor: int = 1
    pipeline: int = 1
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Tensor and pipeline degree: a flip needs them equal on both sides."""
        return (self.tensor, self.pipeline)

    def desired(self, flipped: int) -> int:
        """Workers that the pool should have, given the net number flipped into it."""
        if not self.elastic:
            return self.replicas
        return max(self.min_replicas, min(self.max_replicas, self.replicas + flipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipRules:
    """`spec.elasticity.flips`, and when the policy runs. Durations in seconds."""

    automatic: bool
    """Mode Auto: the policy's decisions are carried out."""
    advised: bool
    """Mode Advise: the policy's decisions are published only."""
    allowed: bool
    cooldown_s: float
    drain_timeout_s: float
    max_concurrent: int
    max_per_hour: int
    idle_below: float
    """Share of time, 0 to 1."""
    idle_for_s: float
    interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`spec.model`."""

    uri: str
    served_name: str
    revision: str = ""
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """`spec.gateway`."""

    managed: bool = True
    replicas: int = 1
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """An InferenceCluster's identity and spec."""

    namespace: str
    name: str
    uid: str
    generation: int
    model: ModelSpec
    pools: tuple[PoolSpec, ...]
    flips: FlipRules
    gateway: GatewaySpec
    engine_image: str = ""
    engine_args: tuple[Mapping[str, str], ...] = ()
    engine_env: tuple[Mapping[str, str], ...] = ()
    max_unavailable: int = 1

    def pool(self, name: str) -> PoolSpec | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of a cluster, as the reflector keeps it."""

    namespace: str
    name: str
    uid: str
    resource_version: int
    cluster: str
    component: str
    pool: str = ""
    role: str = ""
    """Value of the role label: prefill, decode or draining."""
    revision: str = ""
    epoch: int = 0
    origin_pool: str = ""
    owner_uid: str = ""
    """UID of the controller owner; empty: an orphan."""
    phase: str = "Pending"
    reason: str = ""
    ready: bool = False
    terminating: bool = False
    created: float = 0.0
    address: str = ""
    node: str = ""
    unschedulable: str = ""
    """The scheduler's message, where the pod could not be bound."""
    waiting: str = ""
    """Reason for which the worker container waits, such as CrashLoopBackOff."""
    flip: FlipMarks | None = None

    @property
    def failed(self) -> bool:
        """Whether the pod has ended: it will never serve again."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def alive(self) -> bool:
        """Whether the pod counts: a terminating or a failed one is gone."""
        return not self.terminating and not self.failed

    @property
    def draining(self) -> bool:
        """Whether the role label says that a flip is in flight."""
        return self.role == ROLE_DRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipMarks:
    """Annotations of a pod whose flip is in flight: enough to rebuild the journal entry from."""

    flip: str
    from_role: str
    to_role: str
    to_pool: str
    deadline: float
    boot_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the journal, `status.activeFlips`."""

    name: str
    pod: str
    pod_uid: str
    from_pool: str
    to_pool: str
    epoch: int
    """The worker's epoch before the flip."""
    boot_id: str
    fence: int
    """The Lease's transitions when the entry was written: who reserved it."""
    started: float
    deadline: float
    step: FlipStep = FlipStep.RESERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipObject:
    """An InferenceFlip."""

    name: str
    uid: str
    cluster: str
    pod: str
    to_pool: str
    reason: str
    created: float
    generation: int = 1
    outcome: str = ""
    finished: float | None = None
    owned: bool = True
    """Whether the cluster is among its owners."""
    by_operator: bool = False
    waiting_for: str = ""
    """Reason of its Accepted condition while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """`status.flipWindow`: the hour in which flips are counted."""

    started: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Pods that ended by themselves, for the back-off of their replacements."""

    count: int = 0
    last: float = 0.0

    def retry_at(self) -> float:
        """Time from which the next pod may be made: 10 s, doubled each time, at most 5 minutes."""
        return self.last + min(300.0, 10.0 * 2 ** max(0, self.count - 1)) if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A worker that was asked for its role and gave no usable answer."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that one reconcile decides from."""

    cluster: ClusterSpec
    now: float
    fence: int
    pods: tuple[Pod, ...] = ()
    roles: Mapping[str, RoleState | Silent] = field(default_factory=dict)
    """By pod UID. A pod that was not asked is absent: unknown."""
    journal: tuple[Entry, ...] = ()
    flipped: Mapping[str, int] = field(default_factory=dict)
    """By pool: net number of workers flipped into it."""
    window: Window | None = None
    flips: tuple[FlipObject, ...] = ()
    revisions: Mapping[str, str] = field(default_factory=dict)
    """By pool: hash of its pod template. Without an entry the pool's template was refused."""
    failures: Failures = field(default_factory=Failures)
    cordoned: frozenset[str] = frozenset()

    @property
    def workers(self) -> tuple[Pod, ...]:
        """Worker pods that this cluster controls and that count, by name."""
        return tuple(
            pod
            for pod in self.pods
            if pod.component == COMPONENT_WORKER and pod.owner_uid == self.cluster.uid and pod.alive
        )

    def pool_of(self, pod: Pod) -> str:
        """The pool that a pod counts in: while its flip is open, the one that it came from."""
        for entry in self.journal:
            if entry.pod_uid == pod.uid:
                return entry.from_pool
        return pod.pool

    def members(self, pool: str) -> tuple[Pod, ...]:
        """The workers that count in a pool."""
        return tuple(pod for pod in self.workers if self.pool_of(pod) == pool)

    def desired(self, pool: PoolSpec) -> int:
        """Workers that a pool should have."""
        return pool.desired(self.flipped.get(pool.name, 0))
