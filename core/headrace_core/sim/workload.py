"""What arrives when: a workload's columns, their check, their digest, and its changes of rate, window and length."""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from dataclasses import dataclass
from itertools import chain
from typing import final

_KIND_REAL = "d"
_KIND_INT = "q"


class WorkloadError(ValueError):
    """A workload that cannot be simulated: the message names the field and the remedy."""


@final
@dataclass(slots=True)
class Workload:
    """Requests in the order of their arrival, one list a column. Nothing changes a workload once it is made."""

    arrival_ms: list[float]
    """From the start of the run; never falls."""
    prompt_tokens: list[int]
    """At least 1 each."""
    output_tokens: list[int]
    """True lengths, at least 1 each. A policy never sees them: it sees a prediction."""
    slo_class: list[int]
    """Index into the SLO classes of the report. Empty: all of class 0."""
    prefix: list[tuple[int, ...]]
    """Hashes of a prompt's leading KV blocks, each of `prefix_block_tokens`; an equal hash is an equal prefix up to
    there. Empty: no prompt shares anything."""
    prefix_block_tokens: int
    """Tokens of one hashed block; 0 where there are no hashes."""
    source: str
    """Where it comes from, in words: file or distribution, and what was done to it."""

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.arrival_ms)

    def rate_per_s(self) -> float:
        """Arrivals a second between the first and the last; infinite where all come at once."""
        span_ms = self.arrival_ms[-1] - self.arrival_ms[0]
        return (len(self) - 1) * 1000.0 / span_ms if span_ms > 0 else math.inf

    def class_of(self, index: int) -> int:
        """The SLO class of a request."""
        return self.slo_class[index] if self.slo_class else 0

    def digest(self) -> str:
        """SHA-256 of the columns in hex: equal on every machine, and whatever the source is called."""
        state = hashlib.sha256()
        _add_column(state, array(_KIND_REAL, self.arrival_ms))
        for column in (self.prompt_tokens, self.output_tokens, self.slo_class, [self.prefix_block_tokens]):
            _add_column(state, array(_KIND_INT, column))
        _add_column(state, array(_KIND_INT, [len(hashes) for hashes in self.prefix]))
        _add_column(state, array(_KIND_INT, chain.from_iterable(self.prefix)))
        return state.hexdigest()


def checked(workload: Workload) -> Workload:
    """The workload itself, once it is known to be sound.

    Raises:
        WorkloadError: it is empty or unsorted, a column has another length, or a number is out of range.
    """
    count = len(workload.arrival_ms)
    if count == 0:
        raise WorkloadError("arrival_ms: the workload holds no request; give a trace or a count of at least 1")
    columns = {"prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens}
    optional = {"slo_class": len(workload.slo_class), "prefix": len(workload.prefix)}
    for name, length in [(name, len(column)) for name, column in columns.items()] + [
        (name, length) for name, length in optional.items() if length
    ]:
        if length != count:
            raise WorkloadError(f"{name}: {length} entries for {count} arrivals; give one a request")
    _check_arrivals(workload.arrival_ms)
    for name, column in columns.items():
        for index, tokens in enumerate(column):
            if tokens < 1:
                raise WorkloadError(f"{name}: request {index} has {tokens}; each request needs at least 1 token")
    for index, number in enumerate(workload.slo_class):
        if number < 0:
            raise WorkloadError(f"slo_class: request {index} has {number}; classes count from 0")
    _check_prefix(workload)
    return workload


def scale_rate(workload: Workload, factor: float) -> Workload:
    """The same requests `factor` times as fast (2: twice the rate, half the time).

    Raises:
        WorkloadError: the factor is not a positive number.
    """
    if not 0 < factor < math.inf:
        raise WorkloadError(f"rate factor: {factor:g} is not a positive number; 1 leaves the rate as it is")
    return _copy(
        workload,
        [arrival_ms / factor for arrival_ms in workload.arrival_ms],
        list(range(len(workload))),
        f"{workload.source}, rate times {factor:g}",
    )


def cut_time(workload: Workload, from_ms: float, until_ms: float) -> Workload:
    """The requests that arrive in [from_ms, until_ms), with `from_ms` as the new start.

    Raises:
        WorkloadError: the window is empty.
    """
    kept = [index for index, arrival_ms in enumerate(workload.arrival_ms) if from_ms <= arrival_ms < until_ms]
    if not kept:
        raise WorkloadError(
            f"window: no request arrives from {from_ms / 1000:g} to {until_ms / 1000:g} s; the workload spans "
            f"{workload.arrival_ms[0] / 1000:g} to {workload.arrival_ms[-1] / 1000:g} s"
        )
    return _copy(
        workload,
        [workload.arrival_ms[index] - from_ms for index in kept],
        kept,
        f"{workload.source}, from {from_ms / 1000:g} to {until_ms / 1000:g} s",
    )


def first(workload: Workload, count: int) -> Workload:
    """The first `count` requests; all of them where it has no more.

    Raises:
        WorkloadError: `count` is under 1.
    """
    if count < 1:
        raise WorkloadError(f"requests: {count} leaves nothing to simulate; give at least 1")
    if count >= len(workload):
        return workload
    return _copy(
        workload, workload.arrival_ms[:count], list(range(count)), f"{workload.source}, first {count} requests"
    )


def repeat(workload: Workload, times: int) -> Workload:
    """The workload played `times` times in a row, a mean gap between the last arrival and the next first one.

    Prefix hashes stay the same, so a later round finds what the earlier ones left in the prefix caches.

    Raises:
        WorkloadError: `times` is under 1.
    """
    if times < 1:
        raise WorkloadError(f"times: {times} leaves nothing to simulate; give at least 1")
    start_ms, end_ms = workload.arrival_ms[0], workload.arrival_ms[-1]
    period_ms = end_ms - start_ms + (end_ms - start_ms) / max(1, len(workload) - 1)
    return _copy(
        workload,
        [arrival_ms + number * period_ms for number in range(times) for arrival_ms in workload.arrival_ms],
        list(range(len(workload))) * times,
        f"{workload.source}, {times} times over",
    )


def _copy(workload: Workload, arrival_ms: list[float], rows: list[int], source: str) -> Workload:
    return Workload(
        arrival_ms,
        [workload.prompt_tokens[row] for row in rows],
        [workload.output_tokens[row] for row in rows],
        [workload.slo_class[row] for row in rows] if workload.slo_class else [],
        [workload.prefix[row] for row in rows] if workload.prefix else [],
        workload.prefix_block_tokens,
        source,
    )


def _check_arrivals(arrival_ms: list[float]) -> None:
    before_ms = 0.0
    for index, now_ms in enumerate(arrival_ms):
        if not 0 <= now_ms < math.inf:
            raise WorkloadError(f"arrival_ms: request {index} arrives at {now_ms:g}; give a time from 0 on")
        if now_ms < before_ms:
            raise WorkloadError(
                f"arrival_ms: request {index} arrives at {now_ms:g} ms, before its predecessor at {before_ms:g} ms; "
                "sort the trace by arrival"
            )
        before_ms = now_ms


def _check_prefix(workload: Workload) -> None:
    if not workload.prefix:
        return
    block_tokens = workload.prefix_block_tokens
    if block_tokens < 1:
        raise WorkloadError(f"prefix_block_tokens: {block_tokens} with prefix hashes; give the tokens of one block")
    for index, hashes in enumerate(workload.prefix):
        most = -(-workload.prompt_tokens[index] // block_tokens)
        if len(hashes) > most:
            raise WorkloadError(
                f"prefix: request {index} has {len(hashes)} hashes, but its prompt of {workload.prompt_tokens[index]} "
                f"tokens has {most} blocks of {block_tokens}; check prefix_block_tokens"
            )


def _add_column(state: hashlib._Hash, column: array[float] | array[int]) -> None:
    if sys.byteorder == "big":
        column.byteswap()
    state.update(len(column).to_bytes(8, "little"))
    state.update(column.tobytes())
