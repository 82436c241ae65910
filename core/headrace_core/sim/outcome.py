"""What came of a simulation: one column a fact, one row a request, and what each worker did."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import final

from headrace_core.sim.scenario import Duty


class Status(IntEnum):
    """How a request ended."""

    UNFINISHED = 0
    """The simulation ended first."""
    FINISHED = 1
    REJECTED = 2
    """It can never fit into a worker's KV cache."""


@final
@dataclass(slots=True)
class WorkerTotals:
    """One worker over the whole run."""

    pool: str
    gpus: int
    price_per_hour: float
    kv_blocks: int
    busy_ms: float = 0.0
    """With a pass or a step under way."""
    steps: int = 0
    """Passes and decode steps."""
    block_ms: float = 0.0
    """KV blocks held, integrated over time."""
    peak_blocks: int = 0
    from_ms: float = 0.0
    """When it was started: pod start-up is paid for."""
    to_ms: float = 0.0
    """When it was removed, or the run ended."""


@final
@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker begins a duty, or drains (None)."""

    at_ms: float
    worker: int
    duty: Duty | None


@final
@dataclass(slots=True)
class Outcome:
    """Columns by request, in the workload's order; times in ms since the start, nan where the thing did not happen."""

    arrival_ms: list[float]
    prefill_start_ms: list[float]
    first_token_ms: list[float]
    admitted_ms: list[float]
    """When a decode worker took it: its KV blocks are reserved, and the transfer can begin."""
    transferred_ms: list[float]
    """When its KV was there."""
    second_token_ms: list[float]
    last_token_ms: list[float]
    largest_gap_ms: list[float]
    """Between two of its tokens, the wait for the second one included."""
    prompt_tokens: list[int]
    output_tokens: list[int]
    cached_tokens: list[int]
    slo_class: list[int]
    prefill_worker: list[int]
    """Where its prompt was computed: a decode worker for a deflected one. -1: nowhere."""
    decode_worker: list[int]
    preemptions: list[int]
    deflected: list[bool]
    status: list[int]
    """Of `Status`."""
    workers: list[WorkerTotals] = field(default_factory=list)
    role_changes: list[RoleChange] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    """When the queues were sampled (each report), with the two columns below."""
    queued_prefill: list[int] = field(default_factory=list)
    queued_decode: list[int] = field(default_factory=list)
    end_ms: float = 0.0
    events: int = 0
    stopped_early: bool = False
    """Ended by `Scenario.stop_after_misses`."""
    transfer_bytes: float = 0.0
