"""Decides which requests of a run met their SLO, and which stage made the others miss it.

How it counts (see "How the simulator counts" in the design): TTFT runs from arrival to the first token, TPOT from the
first token to the last, over all tokens but the first; the wait for the second token is in it. A rejected or unfinished
request is a miss. An answer of one token has no TPOT, so its TTFT alone decides.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.scenario import Scenario


class Stage(StrEnum):
    """Where a request lost the time that made it miss its SLO."""

    QUEUE = "Queue"
    """It waited for prefill."""
    PREFILL = "Prefill"
    """Its prefill alone took longer than the TTFT SLO."""
    ADMISSION = "Admission"
    """It waited for a decode worker to take it, or fits into none; or it waited for prefill while the prefill worker
    stood still, full of KV that waited to be fetched."""
    TRANSFER = "Transfer"
    """Its KV was on its way."""
    DECODE = "Decode"
    """The decode steps alone took longer than the TPOT SLO."""
    PREEMPTION = "Preemption"
    """It lost its KV while decoding and was computed again."""


@final
@dataclass(slots=True)
class Verdicts:
    """Per request of a run, in the workload's order."""

    ttft_ms: list[float]
    """nan: no first token."""
    tpot_ms: list[float]
    """nan: not finished, or an answer of one token."""
    ttft_met: list[bool]
    tpot_met: list[bool]
    met: list[bool]
    """Both, and the request finished."""
    stood_still_ms: list[float]
    """See `stood_still`; empty until a miss asks for it."""


def judge(scenario: Scenario, outcome: Outcome) -> Verdicts:
    """Holds each request against the SLO of its class.

    Raises:
        IndexError: a request's `slo_class` has no entry in `scenario.slos`.
    """
    verdicts = Verdicts([], [], [], [], [], [])
    shorter = 1 if scenario.prefill_gives_first_token else 0
    for index in range(len(outcome.arrival_ms)):
        slo = scenario.slos[outcome.slo_class[index]]
        first_ms = outcome.first_token_ms[index]
        gaps = outcome.output_tokens[index] - shorter
        ttft_ms = first_ms - outcome.arrival_ms[index]
        tpot_ms = (outcome.last_token_ms[index] - first_ms) / gaps if gaps > 0 else float("nan")
        finished = outcome.status[index] == Status.FINISHED
        # A comparison with nan is false, so a missing first token is a miss.
        ttft_met = ttft_ms <= slo.ttft_ms
        tpot_met = finished and (gaps == 0 or tpot_ms <= slo.tpot_ms)
        verdicts.ttft_ms.append(ttft_ms)
        verdicts.tpot_ms.append(tpot_ms)
        verdicts.ttft_met.append(ttft_met)
        verdicts.tpot_met.append(tpot_met)
        verdicts.met.append(ttft_met and tpot_met)
    return verdicts


def blame(scenario: Scenario, outcome: Outcome, verdicts: Verdicts, index: int) -> Stage:
    """The stage that made a request miss its SLO (the attribution is ours).

    A request that did not get to its end is held up by the stage in which it stopped. Else the earlier SLO decides. A
    missed TTFT is the prefill's doing if the prefill alone takes longer than the SLO; admission's if the time in which
    the prefill worker had no room to work made the difference, or was most of the wait; and else the queue's. A missed
    TPOT is the decode steps' doing if what is left without waiting for admission, transfer and recomputation still
    breaks the SLO, and else that of the longest of the three.
    """
    if outcome.status[index] != Status.FINISHED:
        return _stopped_in(outcome, index)
    slo = scenario.slos[outcome.slo_class[index]]
    first_ms = outcome.first_token_ms[index]
    if not verdicts.ttft_met[index]:
        if first_ms - outcome.prefill_start_ms[index] > slo.ttft_ms:
            return Stage.PREFILL
        if not verdicts.stood_still_ms:
            verdicts.stood_still_ms = stood_still(outcome)
        still_ms = verdicts.stood_still_ms[index]
        waited_ms = outcome.prefill_start_ms[index] - outcome.arrival_ms[index]
        enough = verdicts.ttft_ms[index] - still_ms <= slo.ttft_ms or still_ms > waited_ms / 2
        return Stage.ADMISSION if enough else Stage.QUEUE
    admission_ms = _span(first_ms, outcome.admitted_ms[index])
    transfer_ms = _span(outcome.admitted_ms[index], outcome.transferred_ms[index])
    recomputed_ms = _recomputed_ms(outcome, index, slo.tpot_ms)
    gaps = outcome.output_tokens[index] - (1 if scenario.prefill_gives_first_token else 0)
    steps_ms = outcome.last_token_ms[index] - first_ms - admission_ms - transfer_ms - recomputed_ms
    if steps_ms > slo.tpot_ms * gaps:
        return Stage.DECODE
    if recomputed_ms >= max(admission_ms, transfer_ms):
        return Stage.PREEMPTION
    return Stage.ADMISSION if admission_ms >= transfer_ms else Stage.TRANSFER


def stood_still(outcome: Outcome) -> list[float]:
    """For each request the time in ms that it waited for prefill while its worker computed no prompt.

    A worker with a queue stands still only when its KV memory is full, of prompts whose KV waits to be fetched by
    decode workers: so that wait counts against decode.
    """
    still_ms = [0.0] * len(outcome.arrival_ms)
    by_worker: dict[int, list[int]] = {}
    for index in range(len(outcome.arrival_ms)):
        if not math.isnan(outcome.prefill_start_ms[index]):
            by_worker.setdefault(outcome.prefill_worker[index], []).append(index)
    for rows in by_worker.values():
        rows.sort(key=outcome.prefill_start_ms.__getitem__)
        starts_ms, ends_ms, before_ms = _busy(outcome, rows)
        for index in rows:
            arrival_ms, start_ms = outcome.arrival_ms[index], outcome.prefill_start_ms[index]
            worked_ms = _worked_until(start_ms, starts_ms, ends_ms, before_ms)
            worked_ms -= _worked_until(arrival_ms, starts_ms, ends_ms, before_ms)
            still_ms[index] = max(0.0, start_ms - arrival_ms - worked_ms)
    return still_ms


def _busy(outcome: Outcome, rows: list[int]) -> tuple[list[float], list[float], list[float]]:
    """When a worker computed prompts: begin and end of each stretch, and the sum of the stretches before it."""
    starts_ms: list[float] = []
    ends_ms: list[float] = []
    before_ms: list[float] = []
    for index in rows:
        start_ms, first_ms = outcome.prefill_start_ms[index], outcome.first_token_ms[index]
        end_ms = outcome.end_ms if math.isnan(first_ms) else first_ms
        if ends_ms and start_ms <= ends_ms[-1]:
            ends_ms[-1] = max(ends_ms[-1], end_ms)
        else:
            before_ms.append(before_ms[-1] + ends_ms[-1] - starts_ms[-1] if ends_ms else 0.0)
            starts_ms.append(start_ms)
            ends_ms.append(end_ms)
    return starts_ms, ends_ms, before_ms


def _worked_until(at_ms: float, starts_ms: list[float], ends_ms: list[float], before_ms: list[float]) -> float:
    stretch = bisect_right(starts_ms, at_ms) - 1
    if stretch < 0:
        return 0.0
    return before_ms[stretch] + min(at_ms, ends_ms[stretch]) - starts_ms[stretch]


def _stopped_in(outcome: Outcome, index: int) -> Stage:
    if outcome.status[index] == Status.REJECTED:
        return Stage.ADMISSION
    if math.isnan(outcome.prefill_start_ms[index]):
        return Stage.QUEUE
    if math.isnan(outcome.first_token_ms[index]):
        return Stage.PREFILL
    if math.isnan(outcome.admitted_ms[index]):
        return Stage.ADMISSION
    if math.isnan(outcome.transferred_ms[index]):
        return Stage.TRANSFER
    return Stage.PREEMPTION if outcome.preemptions[index] else Stage.DECODE


def _recomputed_ms(outcome: Outcome, index: int, tpot_ms: float) -> float:
    """Time lost to preemption: its longest pause, less the token's own share. The wait for the second token is none."""
    if not outcome.preemptions[index]:
        return 0.0
    pause_ms = outcome.largest_gap_ms[index]
    if pause_ms <= outcome.second_token_ms[index] - outcome.first_token_ms[index]:
        return 0.0
    return max(0.0, pause_ms - tpot_ms)


def _span(from_ms: float, to_ms: float) -> float:
    """The time between two moments; 0 where either did not happen (a deflected request has no transfer)."""
    span_ms = to_ms - from_ms
    return span_ms if span_ms > 0 else 0.0
