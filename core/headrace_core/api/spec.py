"""The spec of an InferenceCluster: every field that a user may set, its default, its bounds and its rules."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from headrace_core.api import engine_args, names
from headrace_core.api.parts import LabelName, Model
from headrace_core.api.schema import Extra, Rule, checked, items_by, open_object, rules
from headrace_core.api.values import Duration, Percent, duration_s, share

MAX_POOLS: Final = 8
MAX_REPLICAS: Final = 1000
"""Of one pool. Ten pools' worth of pods (10,000) is what the operator's cache was measured with."""
MAX_GPUS_PER_WORKER: Final = 16
"""A worker is one pod on one node, and nodes have at most 16 GPUs."""

Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Degree = Annotated[int, Field(ge=1, le=MAX_GPUS_PER_WORKER)]


class PoolRole(StrEnum):
    """`spec.pools[].role`."""

    PREFILL = "Prefill"
    DECODE = "Decode"

    @property
    def worker(self) -> names.Role:
        """The role as workers and labels spell it."""
        return names.Role(self.value.lower())


class Scaling(StrEnum):
    """`spec.pools[].scaling`."""

    ELASTIC = "Elastic"
    STATIC = "Static"


class ElasticityMode(StrEnum):
    """`spec.elasticity.mode`."""

    OFF = "Off"
    ADVISE = "Advise"
    AUTO = "Auto"


class ElasticityPolicy(StrEnum):
    """`spec.elasticity.policy`."""

    IDLE_THRESHOLD = "IdleThreshold"


class FlipsMode(StrEnum):
    """`spec.elasticity.flips.mode`."""

    ALLOWED = "Allowed"
    FORBIDDEN = "Forbidden"


class GatewayMode(StrEnum):
    """`spec.gateway.mode`."""

    MANAGED = "Managed"
    NONE = "None"


class ModelSource(Model):
    """The model that all workers of the cluster load."""

    model_config = rules(
        Rule(
            "!has(self.revision) || self.revision == '' || self.uri.startsWith('hf://')",
            "revision applies to hf:// models only: remove it, or give the uri as hf://ORG/NAME",
            field=".revision",
        ),
    )

    uri: Annotated[
        str,
        StringConstraints(
            pattern=r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*|file://(/[A-Za-z0-9._@+=-]+)+)$",
            max_length=512,
        ),
    ]
    """Where the weights are: hf://ORG/NAME on the Hugging Face Hub, or file:///PATH inside the worker's container."""
    served_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$|^$", max_length=128)] = ""
    """The model's name in requests. Empty: the last part of the uri."""
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]*$", max_length=128)] = ""
    """Branch, tag or commit of an hf:// model. Empty: the default branch."""
    max_model_len: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Most tokens of prompt and answer together. Absent: what the model's own configuration says."""

    @property
    def name(self) -> str:
        """The model's name in requests, default filled in."""
        return self.served_name or self.uri.rsplit("/", 1)[-1]


class EngineArg(Model):
    """One argument of the engine (vLLM), beyond those that Headrace sets itself."""

    name: Annotated[
        str,
        StringConstraints(pattern=engine_args.NAME_PATTERN, min_length=1, max_length=engine_args.MAX_NAME_LENGTH),
        checked(*(owned.rule() for owned in engine_args.OWNED)),
    ]
    """vLLM's own name of the argument without leading dashes, such as max-num-seqs. Arguments that Headrace sets are
    refused in every spelling."""
    value: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Its value. Empty for a flag without a value."""


class EnvVar(Model):
    """One environment variable of the worker container."""

    name: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", min_length=1, max_length=128),
        checked(
            Rule("!self.startsWith('HEADRACE_')", "variables that start with HEADRACE_ are the operator's own"),
            Rule(
                f"!(self in {engine_args.cel_list(engine_args.OWNED_ENVIRONMENT)})",
                "Headrace sets this variable itself: remove it",
            ),
        ),
    ]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Its value. For a value from a Secret use the pool's template."""


class Engine(Model):
    """How the engine is started. The same for all pools, so that a worker fits either role."""

    image: Annotated[str, StringConstraints(pattern=r"^\S*$", max_length=512)] = ""
    """Image of the worker container. Empty: the operator's default."""
    args: Annotated[tuple[EngineArg, ...], Field(max_length=64), items_by("name")] = ()
    """Further engine arguments."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64), items_by("name")] = ()
    """Further environment variables of the worker container."""


class Parallelism(Model):
    """How one worker spreads the model over its GPUs. A flip needs the same shape on both sides."""

    model_config = rules(
        Rule(
            f"self.tensor * self.pipeline <= {MAX_GPUS_PER_WORKER}",
            f"tensor times pipeline is the GPUs of one pod, at most {MAX_GPUS_PER_WORKER}: lower one of them",
        ),
    )

    tensor: Degree = 1
    """Tensor-parallel degree."""
    pipeline: Degree = 1
    """Pipeline-parallel degree."""


Template = Annotated[dict[str, Any], open_object("metadata", "spec")]


class Pool(Model):
    """A set of equal workers that start in one role."""

    model_config = rules(
        Rule(
            "self.scaling != 'Elastic' || self.minReplicas <= self.maxReplicas",
            "minReplicas must not exceed maxReplicas",
            field=".minReplicas",
        ),
        Rule(
            "self.scaling != 'Elastic' || self.replicas >= self.minReplicas && self.replicas <= self.maxReplicas",
            "replicas must lie between minReplicas and maxReplicas",
            field=".replicas",
        ),
    )

    name: LabelName
    """Name of the pool."""
    role: PoolRole
    """Role in which the pool's workers start: Prefill or Decode."""
    scaling: Scaling = Scaling.ELASTIC
    """Elastic: flips may move workers into and out of the pool. Static: it keeps its replicas."""
    replicas: Replicas = 1
    """Workers wanted, before flips."""
    min_replicas: Replicas = 1
    """Fewest workers that flips leave in an Elastic pool."""
    max_replicas: Replicas = 8
    """Most workers that flips bring into an Elastic pool."""
    parallelism: Parallelism = Parallelism()
    """Shape of one worker."""
    template: Template = Field(default_factory=dict)
    """Partial pod template (metadata, spec) that is merged over the operator's own by server-side apply."""

    @property
    def elastic(self) -> bool:
        """Whether flips may move workers into and out of the pool."""
        return self.scaling is Scaling.ELASTIC


def bounded(least: str, most: str) -> Extra:
    """A rule on a duration: it lies between two others, bounds included."""
    return checked(
        Rule(
            f"duration(self) >= duration('{least}') && duration(self) <= duration('{most}')",
            f"must lie between {least} and {most}",
        )
    )


class Flips(Model):
    """When a worker may change its role in place."""

    mode: FlipsMode = FlipsMode.ALLOWED
    """Allowed, or Forbidden: then neither the policy nor an InferenceFlip changes a role."""
    cooldown: Annotated[Duration, bounded("0s", "24h")] = "2m"
    """Time after a worker's flip in which the policy does not flip it again."""
    drain_timeout: Annotated[Duration, bounded("1s", "1h")] = "2m"
    """Time that a worker has to finish what it holds; then it keeps its role."""
    max_concurrent: Annotated[int, Field(ge=1, le=100)] = 1
    """Flips of the cluster that may be under way at once."""
    max_per_hour: Annotated[int, Field(ge=0, le=1000)] = 20
    """Flips that the policy may begin within an hour."""
    idle_below: Percent = "10%"
    """A worker is idle while it is busy for less than this share of the time (TetriInfer: 10%)."""
    idle_for: Annotated[Duration, bounded("1s", "1h")] = "1m"
    """Time over which that share is taken (TetriInfer: one minute)."""

    @property
    def cooldown_s(self) -> float:
        """Seconds after a worker's flip in which the policy does not flip it again."""
        return duration_s(self.cooldown)

    @property
    def drain_timeout_s(self) -> float:
        """Seconds that a worker has to finish what it holds."""
        return duration_s(self.drain_timeout)

    @property
    def idle_below_share(self) -> float:
        """Share of busy time, 0 to 1, under which a worker is idle."""
        return share(self.idle_below)

    @property
    def idle_for_s(self) -> float:
        """Seconds over which the share of busy time is taken."""
        return duration_s(self.idle_for)


class Elasticity(Model):
    """Who moves workers between the pools, and how eagerly."""

    mode: ElasticityMode = ElasticityMode.AUTO
    """Off: the policy does not run. Advise: it publishes what it would do. Auto: it does it."""
    policy: ElasticityPolicy = ElasticityPolicy.IDLE_THRESHOLD
    """The rule that decides. IdleThreshold: an idle worker goes to the role whose workers are all busy."""
    interval: Annotated[Duration, bounded("1s", "1h")] = "15s"
    """Time between two decisions."""
    flips: Flips = Flips()
    """Limits of role changes."""

    @property
    def interval_s(self) -> float:
        """Seconds between two decisions."""
        return duration_s(self.interval)


class Gateway(Model):
    """The front door that takes OpenAI requests."""

    mode: GatewayMode = GatewayMode.MANAGED
    """Managed: the operator runs a Deployment and a Service. None: it runs neither."""
    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Gateway pods."""
    template: Template = Field(default_factory=dict)
    """Partial pod template (metadata, spec) of the gateway, merged as a pool's."""

    @property
    def managed(self) -> bool:
        """Whether the operator runs the gateway."""
        return self.mode is GatewayMode.MANAGED


class Rollout(Model):
    """How a change of the pod template reaches the workers."""

    max_unavailable: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Workers that may be away at once while a change rolls out."""


ROLE_OF_EACH: Final = "self.exists(p, p.role == '{role}')"
EQUAL_SHAPES: Final = (
    "self.elasticity.mode == 'Off' || self.elasticity.flips.mode == 'Forbidden' || "
    "self.pools.all(a, a.scaling != 'Elastic' || self.pools.all(b, b.scaling != 'Elastic' || "
    "a.parallelism.tensor == b.parallelism.tensor && a.parallelism.pipeline == b.parallelism.pipeline))"
)


class ClusterSpec(Model):
    """What an InferenceCluster should be."""

    model_config = rules(
        Rule(
            EQUAL_SHAPES,
            "a flip needs equal parallelism in all Elastic pools: make it equal, make a pool Static, "
            "or set elasticity.flips.mode to Forbidden",
            field=".pools",
        ),
    )

    model: ModelSource
    """The model."""
    engine: Engine = Engine()
    """The engine."""
    pools: Annotated[
        tuple[Pool, ...],
        Field(min_length=2, max_length=MAX_POOLS),
        items_by("name"),
        checked(
            *(Rule(ROLE_OF_EACH.format(role=role), f"at least one pool must have the role {role}") for role in PoolRole)
        ),
    ]
    """The pools: two to eight, at least one of each role."""
    elasticity: Elasticity = Elasticity()
    """Moves between the pools."""
    gateway: Gateway = Gateway()
    """The front door."""
    rollout: Rollout = Rollout()
    """How changes reach the workers."""
