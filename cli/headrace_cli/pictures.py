"""Draws pictures of simulations: the end of a file's name says which, its ending the format.

| name | picture |
| --- | --- |
| `...latency.svg` | distributions of TTFT and TPOT, with the SLOs |
| `...timeline.svg` | queues over time, and each worker's role |
| `...attainment.svg` | attainment against rate, for the same requests at other speeds |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, final

from headrace_cli.figures import panels, save
from headrace_core.sim.attainment import judge
from headrace_core.sim.outcome import Outcome
from headrace_core.sim.report import Report
from headrace_core.sim.scenario import Duty, Scenario

RATE_FACTORS: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Speeds at which the attainment picture plays the requests, over that of the run."""
MOST_LINE_POINTS: Final = 2000
"""Points of a line: more cannot be seen."""
MOST_BINS: Final = 300
"""Stretches of a queue's line."""
MOST_NAMES: Final = 40
"""Workers that are named beside their bar."""
_COLOURS: Final = {Duty.PREFILL: "#d95f02", Duty.DECODE: "#1b9e77", Duty.COLOCATED: "#7570b3", None: "#bbbbbb"}


class Picture(StrEnum):
    """What a picture shows."""

    LATENCY = "latency"
    TIMELINE = "timeline"
    ATTAINMENT = "attainment"


@final
@dataclass(frozen=True, slots=True)
class RatePoint:
    """A run at one rate."""

    rate_per_s: float
    report: Report


def draw_latency(path: Path, scenario: Scenario, outcome: Outcome, report: Report) -> None:
    """Writes the distributions of TTFT and TPOT over the measured requests, each with its SLOs."""
    verdicts = judge(scenario, outcome)
    start = report.sample.warmup_requests
    figure, (left, right) = panels(1, 2)
    for axes, name, values_ms, slos_ms in (
        (left, "TTFT", verdicts.ttft_ms[start:], [slo.ttft_ms for slo in scenario.slos]),
        (right, "TPOT", verdicts.tpot_ms[start:], [slo.tpot_ms for slo in scenario.slos]),
    ):
        known_ms = sorted(value for value in values_ms if not math.isnan(value))
        step = max(1, len(known_ms) // MOST_LINE_POINTS)
        # Percent of all, so that a line that ends below 100 shows what never came.
        axes.plot(known_ms[::step], [100 * (row + 1) / len(values_ms) for row in range(0, len(known_ms), step)])
        for slo, slo_ms in zip(scenario.slos, slos_ms, strict=True):
            axes.axvline(slo_ms, color="black", linestyle="--", linewidth=0.8)
            axes.annotate(f"SLO {slo.name}", (slo_ms, 2), rotation=90, fontsize=7, ha="right")
        axes.set(xscale="log", xlabel=f"{name} in ms", ylabel="requests, % at most that", ylim=(0, 100))
    save(figure, path, report.workload)


def draw_timeline(path: Path, outcome: Outcome, report: Report) -> None:
    """Writes the queues over time, and below them each worker's role; grey: draining, switching or starting."""
    figure, (queues, roles) = panels(2, 1)
    for name, column, waiting_for in (
        ("wait for prefill", outcome.queued_prefill, Duty.PREFILL),
        ("wait for decode", outcome.queued_decode, Duty.DECODE),
    ):
        seconds, means, peaks = _bins(outcome.queue_ms, column)
        queues.plot(seconds, means, color=_COLOURS[waiting_for], label=name)
        queues.fill_between(seconds, means, peaks, color=_COLOURS[waiting_for], alpha=0.3, linewidth=0)
    queues.set(ylabel="requests: mean, and peak above", xlim=(0, outcome.end_ms / 1000), ylim=(0, None))
    queues.legend(fontsize=7)
    for index, worker in enumerate(outcome.workers):
        changes = [change for change in outcome.role_changes if change.worker == index]
        starts = [worker.from_ms, *(change.at_ms for change in changes)]
        duties = [None, *(change.duty for change in changes)]
        for begin_ms, end_ms, duty in zip(starts, [*starts[1:], worker.to_ms], duties, strict=True):
            roles.barh(index, (end_ms - begin_ms) / 1000, left=begin_ms / 1000, height=0.8, color=_COLOURS[duty])
    shown = {change.duty for change in outcome.role_changes if change.duty}
    for duty in (one for one in Duty if one in shown):
        roles.barh(0, 0, color=_COLOURS[duty], label=duty.value)
    names = [f"{worker.pool} {index}" for index, worker in enumerate(outcome.workers)]
    if len(names) <= MOST_NAMES:
        roles.set_yticks(range(len(names)), names, fontsize=7)
    roles.set(xlabel="time in s", xlim=(0, outcome.end_ms / 1000))
    roles.invert_yaxis()
    roles.legend(fontsize=7)
    save(figure, path, report.workload)


def draw_attainment(path: Path, points: list[RatePoint], here: RatePoint) -> None:
    """Writes the attainment at several rates with its 95 % interval, and the share that met each SLO alone."""
    figure, (axes,) = panels(1, 1)
    rates = [point.rate_per_s for point in points]
    both = [100 * point.report.attainment.value for point in points]
    widths = [100 * (point.report.attainment.half_width or 0.0) for point in points]
    axes.errorbar(rates, both, yerr=widths, marker="o", capsize=3, label="both SLOs")
    for name, share in (("TTFT alone", _ttft_share), ("TPOT alone", _tpot_share)):
        axes.plot(rates, [100 * share(point.report) for point in points], linestyle=":", label=name)
    unstable = [(point.rate_per_s, 100 * point.report.attainment.value) for point in points]
    marked = [at for at, point in zip(unstable, points, strict=True) if point.report.stability.stable is False]
    axes.scatter(
        [at[0] for at in marked], [at[1] for at in marked], marker="x", color="red", zorder=3, label="not stable"
    )
    axes.axvline(here.rate_per_s, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="requests/s", ylabel="requests within their SLO, %", ylim=(0, 102), xlim=(0, None))
    axes.legend(fontsize=7)
    save(figure, path, here.report.workload)


def _bins(at_ms: list[float], counts: list[int]) -> tuple[list[float], list[float], list[int]]:
    """Seconds, mean and peak of at most MOST_BINS equal stretches of a sampled queue."""
    size = max(1, len(at_ms) // MOST_BINS)
    parts = [counts[row : row + size] for row in range(0, len(counts), size)]
    seconds = [at_ms[row] / 1000 for row in range(0, len(at_ms), size)]
    return seconds, [sum(part) / len(part) for part in parts], [max(part) for part in parts]


def _ttft_share(report: Report) -> float:
    return sum((one.ttft_share or 0.0) * one.requests for one in report.classes) / report.sample.measured_requests


def _tpot_share(report: Report) -> float:
    return sum((one.tpot_share or 0.0) * one.requests for one in report.classes) / report.sample.measured_requests
