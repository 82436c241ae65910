"""Decides what becomes of a request after a failed attempt or when nobody accepts: go on, after which wait, or end.

Only failures before the client's first byte come here. A stream that breaks off later is not taken up again: that
would need its tokens replayed to another worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace_gateway.errors import Final, NobodyAccepts, NoWorkers, Retryable, WorkersFailed

FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.25
TRIES_WITHOUT_WAIT = 2
"""A refusal or a dead worker sends a request on at once; more in a row mean that the view of the workers is old."""


class Recovery(StrEnum):
    """What to do."""

    AGAIN = "again"
    OUT_OF_PATIENCE = "out_of_patience"
    """It has waited as long as it may for somebody who accepts."""
    OUT_OF_ATTEMPTS = "out_of_attempts"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long to go on: seconds of waiting in sum, and failed attempts."""

    worker_wait_s: float
    max_attempts: int


@dataclass(slots=True)
class Progress:
    """What has happened to a request so far."""

    failed_attempts: int = 0
    tries: int = 0
    """Attempts of any kind that came to nothing, refusals included."""
    waited_s: float = 0.0
    """Time spent waiting between tries: time in which a worker had the request does not count."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, and after how many seconds."""

    recovery: Recovery
    wait_s: float = 0.0


def recover(progress: Progress, bounds: Bounds, failure: Retryable, chance: float) -> Plan:
    """What to do after a failure that is already counted in `progress`; `chance` in [0, 1) spreads the waits."""
    if progress.failed_attempts >= bounds.max_attempts:
        return Plan(Recovery.OUT_OF_ATTEMPTS)
    if progress.waited_s >= bounds.worker_wait_s:
        return Plan(Recovery.OUT_OF_PATIENCE)
    if progress.tries <= TRIES_WITHOUT_WAIT and not isinstance(failure, NobodyAccepts):
        return Plan(Recovery.AGAIN)
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(progress.tries - 1, 8))
    return Plan(Recovery.AGAIN, longest * (0.5 + chance / 2))


def error_of(recovery: Recovery, failure: Retryable) -> Final:
    """The answer that ends the request."""
    if recovery is Recovery.OUT_OF_ATTEMPTS:
        return WorkersFailed(f"too many attempts failed, the last one because {failure}")
    return NoWorkers(f"{failure}: try again shortly")
