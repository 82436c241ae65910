"""What is simulated: pools of workers, the rules they follow, the network between them. No traffic: see `workload`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, final

from headrace_core.perf.costs import StepCosts
from headrace_core.policy.admission import Admission, Bound
from headrace_core.policy.chunking import Batching
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.policy.dispatch import Dispatching
from headrace_core.policy.prefill_order import Order


class ScenarioError(ValueError):
    """A scenario that cannot be simulated; the message names the field and the remedy."""


class Duty(StrEnum):
    """What a worker does."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    COLOCATED = "Colocated"
    """Both, on the same GPUs: the baselines."""


class Colocation(StrEnum):
    """How a colocated worker shares its steps between prefill and decode (DistServe, section 2.3)."""

    PREFILL_FIRST = "PrefillFirst"
    """Waiting prompts run alone, whole, before any decode step: continuous batching as vLLM began with."""
    MIXED = "Mixed"
    """Chunks of prompts ride on decode steps, up to the token budget: Sarathi, and vLLM since."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A kind of worker: one copy of the model on one or more GPUs."""

    costs: StepCosts
    kv_blocks: int
    """Blocks of KV cache that fit beside weights and activations."""
    block_tokens: int = 16
    gpus: int = 1
    price_per_hour: float = 0.0
    """Of all its GPUs together, in any currency. 0: costs are not reported."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers of one kind and one duty."""

    name: str
    duty: Duty
    instance: Instance
    workers: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRules:
    """How a prefill worker orders and cuts its queue (T3, T5, D6)."""

    order: Order = Order.FCFS
    sched_batch: int = 16
    batching: Batching = Batching.CHUNKED
    limit_tokens: int = 2048
    """Tokens of one pass: ChunkSize, L_m or the cap of the whole queue, by `batching`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRules:
    """How a decode worker admits and batches (T8)."""

    admission: Admission = Admission.RESERVE_DYNAMIC
    bound: Bound = Bound.UPPER
    max_running: int = 256
    token_budget: int = 2048
    """Tokens of a step that also carries prompt tokens: deflected, colocated or recomputed ones."""
    max_batch_tokens: int = 0
    """Context tokens of one step; residents beyond it take turns. 0: no limit. DistServe's simulator has 50,000."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How good the length prediction is (T4)."""

    accuracy: float = 1.0
    """Share of requests whose bucket is predicted right; the others get a neighbouring one."""
    granularity: int = 200
    """Tokens of a bucket."""
    quantile: float = 0.9
    """How far into the bucket `Bound.QUANTILE` reaches, 0 to 1."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The way of the KV from prefill to decode worker (T10).

    Each worker has one link for what it sends and one for what it receives. A transfer occupies both for as long as
    its bytes take, one transfer after the other: the same throughput as sharing them, and the same last finish.
    """

    kv_bytes_per_token: float
    bytes_per_ms: float
    """Of one worker's link."""
    latency_ms: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """One service class: a request meets it when both times are within."""

    ttft_ms: float
    tpot_ms: float
    name: str = "default"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker as an elasticity policy sees it: state as reported, never live."""

    worker: int
    duty: Duty
    accepting: bool
    """False while it drains, switches or starts."""
    queued_tokens: int
    """Prompt tokens waiting or being computed."""
    queued_requests: int
    """Requests that wait for admission to decode."""
    running_requests: int
    free_kv_blocks: int
    total_kv_blocks: int
    busy_share: float
    """Of the time since the policy was asked last, 0 to 1."""


class Lever(StrEnum):
    """What an elasticity policy can do."""

    FLIP = "Flip"
    """Drain a worker, then change its duty from prefill to decode or back."""
    START = "Start"
    """Start one more worker of the kind and duty of `worker`."""
    STOP = "Stop"
    """Drain a worker and remove it."""


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One act; `worker` is an index in the reports."""

    lever: Lever
    worker: int


class ElasticityPolicy(Protocol):
    """Decides about roles and replicas while the simulation runs."""

    def decide(self, now_ms: float, reports: Sequence[WorkerReport]) -> Sequence[Action]:
        """What to do now; an empty sequence holds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Flips and pod start-up, closed over a policy."""

    policy: ElasticityPolicy
    interval_ms: float = 15_000.0
    switch_ms: float = 7.0
    """From the end of a drain until the worker takes requests of its new duty (TetriInfer: 5 to 7 ms)."""
    start_ms: float = 120_000.0
    """From the start of a pod until the model is loaded."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole cluster, and the seed of all that is drawn while it runs.

    Raises:
        ScenarioError: there is no worker for a duty, or a field is out of its range.
    """

    pools: tuple[Pool, ...]
    slos: tuple[Slo, ...]
    """By the workload's `slo_class`."""
    network: Network | None = None
    """None: KV arrives at once."""
    prefill: PrefillRules = field(default_factory=PrefillRules)
    decode: DecodeRules = field(default_factory=DecodeRules)
    colocation: Colocation = Colocation.MIXED
    dispatching: Dispatching = Dispatching.DEFAULT
    prediction: Prediction = field(default_factory=Prediction)
    deflection: DeflectionSettings | None = None
    elasticity: Elasticity | None = None
    prefix_cache_tokens: int = 0
    """Tokens of prompt prefixes that a prefill worker remembers. 0: none."""
    report_interval_ms: float = 100.0
    """How old the state is, at most, that routing and dispatch see."""
    prefill_gives_first_token: bool = True
    """False: the first token comes with prefill all the same, and decode still makes as many as the request has (how
    DistServe's simulator counts)."""
    stop_after_misses: int | None = None
    """End as soon as more requests than this have missed their SLO: the verdict is certain then."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, bad in _checks(self):
            if bad:
                raise ScenarioError(name)


def _checks(scenario: Scenario) -> list[tuple[str, bool]]:
    duties = {pool.duty for pool in scenario.pools if pool.workers > 0}
    colocated = Duty.COLOCATED in duties
    prediction, decode = scenario.prediction, scenario.decode
    network = scenario.network
    return [
        (
            "pools: a Prefill and a Decode pool with at least one worker each are needed, or a Colocated one alone",
            duties not in ({Duty.COLOCATED}, {Duty.PREFILL, Duty.DECODE}),
        ),
        ("pools: workers must be 0 or more", any(pool.workers < 0 for pool in scenario.pools)),
        (
            "pools: kv_blocks and block_tokens must be 1 or more",
            any(pool.instance.kv_blocks < 1 or pool.instance.block_tokens < 1 for pool in scenario.pools),
        ),
        ("slos: give at least one", not scenario.slos),
        (
            "slos: ttft_ms and tpot_ms must be above 0",
            any(slo.ttft_ms <= 0 or slo.tpot_ms <= 0 for slo in scenario.slos),
        ),
        ("prefill.limit_tokens must be 1 or more", scenario.prefill.limit_tokens < 1),
        ("prefill.sched_batch must be 1 or more", scenario.prefill.sched_batch < 1),
        ("decode.max_running must be 1 or more", decode.max_running < 1),
        ("decode.token_budget must be 1 or more", decode.token_budget < 1),
        ("prediction.accuracy must be between 0 and 1", not 0 <= prediction.accuracy <= 1),
        ("prediction.granularity must be a positive number of tokens", prediction.granularity < 1),
        ("prediction.quantile must be between 0 and 1", not 0 <= prediction.quantile <= 1),
        (
            "network: bytes_per_ms must be above 0, and the others 0 or more",
            network is not None
            and (network.bytes_per_ms <= 0 or network.kv_bytes_per_token < 0 or network.latency_ms < 0),
        ),
        (
            "deflection needs Prefill and Decode pools: a Colocated pool has nothing to deflect",
            scenario.deflection is not None and colocated,
        ),
        ("elasticity needs Prefill and Decode pools", scenario.elasticity is not None and colocated),
        ("prefix_cache_tokens must be 0 or more", scenario.prefix_cache_tokens < 0),
        (
            "report_interval_ms must be above 0 (infinite: never)",
            not scenario.report_interval_ms > 0 or math.isnan(scenario.report_interval_ms),
        ),
    ]
