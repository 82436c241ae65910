"""What a report of a simulation holds: frozen, versioned, with the sample behind each number.

`reporting` makes it, `report_json` writes and reads it.

A number that is not known is None, never 0. Times are ms, shares 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from headrace_core.sim.attainment import Stage
from headrace_core.sim.statistics import Estimate, Thirds

SCHEMA_VERSION: Final = 1
"""Raised when a field changes its meaning or goes away; a new field leaves it."""


class ProfileKind(StrEnum):
    """Where step times come from."""

    MEASURED = "Measured"
    ESTIMATED = "Estimated"
    """Computed from an accelerator's datasheet."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileUse:
    """The step times of one pool and how far they can be trusted."""

    pool: str
    model: str
    accelerator: str
    tensor: int
    pipeline: int
    kind: ProfileKind
    source: str
    assumed: str
    """What of a measured profile was not measured; empty: nothing."""
    prefill_error: float | None
    """Mean absolute relative error of the fitted prefill times against the measured ones (against the counted ones
    where the profile is estimated). None: not known."""
    decode_error: float | None
    prefill_factor: float = 1.0
    """What the prefill times were multiplied with, to show observed latencies. 1: nothing observed was given."""
    decode_factor: float = 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the numbers are drawn from: the requests after the warm-up, the tail included."""

    requests: int
    """Of the whole workload."""
    warmup_share: float
    warmup_requests: int
    """Left out at the start."""
    measured_requests: int
    arrival_rate_per_s: float | None
    """Of the measured requests; None: they span no time."""
    window_s: float
    """From the first measured arrival to the last."""
    drain_s: float
    """From the last arrival to the end of the run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """One percentile of a time."""

    percent: float
    value_ms: float
    half_width_ms: float | None
    """Half of the 95 % interval, by batch means. None: the sample is too small."""
    enough: bool
    """Whether at least 100 samples lie beyond it. If not, it is a hint."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The distribution of one time over the measured requests that have it."""

    samples: int
    missing: int
    """Measured requests without it: rejected, unfinished, or (TPOT, gaps) with an answer of one token."""
    mean_ms: float | None
    mean_half_width_ms: float | None
    percentiles: tuple[Percentile, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAttainment:
    """How many measured requests of one SLO class met it."""

    name: str
    ttft_slo_ms: float
    tpot_slo_ms: float
    requests: int
    both: Estimate | None
    """Share of requests that met both SLOs. None: the class has no measured request."""
    ttft_share: float | None
    tpot_share: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Measured requests that missed their SLO because of one stage."""

    stage: Stage
    requests: int
    share: float
    """Of all measured requests."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What became of the measured requests."""

    finished: int
    rejected: int
    unfinished: int
    deflected: int
    preempted: int
    """Requests that lost their KV at least once."""
    preemptions: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """What a pool's workers did over the whole run, warm-up and tail included."""

    name: str
    workers: int
    """That existed at any time."""
    utilisation: float | None
    """Share of their time with a pass or a step under way. None: they existed for no time."""
    kv_mean_share: float | None
    """KV blocks held, mean over time, of those they have."""
    kv_peak_share: float
    """The fullest that any of them was."""
    gpu_hours: float
    cost: float | None
    """In the currency of the prices. None: no price was given."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Work and cost of the whole run, warm-up and tail included."""

    duration_s: float
    resource_s: float
    """Busy time, summed over workers (TetriInfer's resource usage time)."""
    gpu_hours: float
    """GPUs times the time for which they were held."""
    output_tokens: int
    """Of finished requests."""
    output_tokens_per_s: float | None
    output_tokens_per_gpu_s: float | None
    transferred_bytes: float
    cost: float | None
    """None: a pool has no price."""
    cost_per_million_output_tokens: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """Whether the run was in a steady state: else its numbers depend on how long it was."""

    stable: bool | None
    """None: too few requests to tell."""
    attainment: Thirds | None
    in_system: Thirds | None
    """Requests between arrival and last token."""


class Caution(StrEnum):
    """Why a report's numbers may not be what they seem."""

    UNSTABLE = "Unstable"
    TOO_FEW_REQUESTS = "TooFewRequests"
    ESTIMATED_PROFILE = "EstimatedProfile"
    UNKNOWN_PROFILE = "UnknownProfile"
    PROFILE_ERROR = "ProfileError"
    STOPPED_EARLY = "StoppedEarly"
    REJECTED = "Rejected"
    UNFINISHED = "Unfinished"
    KV_FULL = "KvFull"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A caution, in words."""

    caution: Caution
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a simulation came to."""

    schema_version: int
    seed: int
    workload: str
    """Where the requests come from."""
    workload_sha256: str
    scenario_sha256: str
    profiles: tuple[ProfileUse, ...]
    sample: Sample
    ttft: Times
    """Arrival to first token."""
    second_token_wait: Times
    """First token to second: admission, transfer and one step. It is part of the TPOT."""
    tpot: Times
    """First token to last, over all tokens but the first."""
    largest_gap: Times
    """Between two tokens of a request."""
    jct: Times
    """Arrival to last token."""
    attainment: Estimate
    """Share of measured requests that met both SLOs of their class."""
    classes: tuple[ClassAttainment, ...]
    misses: tuple[Misses, ...]
    """By stage, most first; stages without any left out."""
    ends: Ends
    goodput_per_s: float | None
    """Measured requests within both SLOs, a second. None: they span no time."""
    goodput_per_gpu_s: float | None
    pools: tuple[PoolUse, ...]
    totals: Totals
    stability: Stability
    warnings: tuple[Warned, ...]
