"""Puts a simulation's report into words: a table for the terminal, and the reasons behind it."""

from __future__ import annotations

from typing import Final

from headrace_core.sim.attainment import Stage
from headrace_core.sim.report import PoolUse, ProfileUse, Report, Times

REMEDIES: Final = {
    Stage.QUEUE: "prompts waited for a prefill worker: add prefill workers, deflect prompts, or lower the rate",
    Stage.PREFILL: "the prefill of the prompt alone took longer than the TTFT SLO: raise the tensor degree of prefill "
    "workers, take a faster accelerator, or raise the SLO",
    Stage.ADMISSION: "requests waited for a decode worker with room, or for a prefill worker that was full of KV which "
    "waited to be fetched: add decode workers or KV memory",
    Stage.TRANSFER: "KV was on its way: more bandwidth between the workers, or workers on one node",
    Stage.DECODE: "the decode steps alone took longer than the TPOT SLO: add decode workers to make batches smaller, "
    "or raise their tensor degree",
    Stage.PREEMPTION: "KV memory ran out while decoding: reserve more at admission, or add decode workers",
}
_MARK: Final = "*"


def report_text(report: Report) -> str:
    """The report for a terminal."""
    sections = [
        _head(report),
        _table(["", "mean", "p50", "p90", "p95", "p99", "requests"], _time_rows(report)),
        *_marked(report),
        _table(["SLO class", "TTFT", "TPOT", "both met", "TTFT met", "TPOT met", "requests"], _class_rows(report)),
        _table(["pool", "workers", "busy", "KV mean", "KV peak", "GPU-hours", "cost"], _pool_rows(report)),
        _totals(report),
        *_warnings(report),
    ]
    return "\n\n".join(sections)


def explanation(report: Report) -> str:
    """Why the report says what it says: what missed where and what would help, and how far the numbers carry."""
    lines = ["Why:"]
    for miss in report.misses:
        lines.append(
            f"- {miss.requests} requests ({_percent(miss.share)}) missed in {miss.stage}: {REMEDIES[miss.stage]}"
        )
    if not report.misses:
        lines.append("- no request missed its SLO")
    ends = report.ends
    lines.append(
        f"- of {report.sample.measured_requests} measured requests {ends.finished} finished, {ends.rejected} were "
        f"rejected, {ends.unfinished} did not finish; {ends.deflected} were deflected; {ends.preempted} were "
        f"preempted, {ends.preemptions} times in all"
    )
    stability = report.stability
    if stability.attainment is not None and stability.in_system is not None:
        shares, present = stability.attainment, stability.in_system
        lines.append(
            f"- {'stable' if stability.stable else 'not stable'}: attainment by thirds {shares.first:.3f}, "
            f"{shares.middle:.3f}, {shares.last:.3f}; requests in the system {present.first:.1f}, "
            f"{present.middle:.1f}, {present.last:.1f}"
        )
    lines.extend(_profile_line(use) for use in report.profiles)
    lines.append(
        f"- the first {report.sample.warmup_requests} requests are left out as warm-up and the last ones are not; "
        "± is half of a 95 % interval by batch means"
    )
    lines.append(
        f"- workload {report.workload_sha256[:12]}, scenario {report.scenario_sha256[:12]}, seed {report.seed}"
    )
    return "\n".join(lines)


def _head(report: Report) -> str:
    sample, stable = report.sample, report.stability.stable
    rate = "" if sample.arrival_rate_per_s is None else f", {sample.arrival_rate_per_s:.3g} requests/s"
    state = {True: "stable", False: "NOT STABLE", None: "stability unknown"}[stable]
    share = _with_half_width(report.attainment.value * 100, _times(report.attainment.half_width, 100), " %")
    return (
        f"{report.workload}\n"
        f"{sample.measured_requests} of {sample.requests} requests measured{rate}; {state}\n"
        f"Attainment {share}, goodput {_number(report.goodput_per_s)} requests/s "
        f"({_number(report.goodput_per_gpu_s)} a GPU)"
    )


def _time_rows(report: Report) -> list[list[str]]:
    named = {
        "TTFT ms": report.ttft,
        "second token ms": report.second_token_wait,
        "TPOT ms": report.tpot,
        "largest gap ms": report.largest_gap,
        "JCT ms": report.jct,
    }
    return [[name, *_time_cells(times)] for name, times in named.items()]


def _time_cells(times: Times) -> list[str]:
    if times.mean_ms is None:
        return ["-"] * 5 + ["0"]
    mean = _with_half_width(times.mean_ms, times.mean_half_width_ms, "")
    marks = ["" if one.enough else _MARK for one in times.percentiles]
    cells = [
        _with_half_width(one.value_ms, one.half_width_ms, mark)
        for one, mark in zip(times.percentiles, marks, strict=True)
    ]
    return [mean, *cells, str(times.samples)]


def _marked(report: Report) -> list[str]:
    times = (report.ttft, report.second_token_wait, report.tpot, report.largest_gap, report.jct)
    if all(one.enough for time in times for one in time.percentiles):
        return []
    return [f"{_MARK} fewer than 100 requests lie beyond it: a hint. More requests (--count) give a number."]


def _class_rows(report: Report) -> list[list[str]]:
    rows = []
    for one in report.classes:
        both = (
            "-" if one.both is None else _with_half_width(one.both.value * 100, _times(one.both.half_width, 100), " %")
        )
        slo = [f"{one.ttft_slo_ms:g} ms", f"{one.tpot_slo_ms:g} ms"]
        rows.append([one.name, *slo, both, _percent(one.ttft_share), _percent(one.tpot_share), str(one.requests)])
    return rows


def _pool_rows(report: Report) -> list[list[str]]:
    return [_pool_row(one) for one in report.pools]


def _pool_row(one: PoolUse) -> list[str]:
    shares = [_percent(one.utilisation), _percent(one.kv_mean_share), _percent(one.kv_peak_share)]
    return [one.name, str(one.workers), *shares, f"{one.gpu_hours:.3g}", _number(one.cost)]


def _totals(report: Report) -> str:
    totals = report.totals
    lines = [
        f"{_number(totals.output_tokens_per_s)} output tokens/s ({_number(totals.output_tokens_per_gpu_s)} a GPU), "
        f"{totals.gpu_hours:.3g} GPU-hours, {totals.resource_s:.4g} resource-seconds, "
        f"{totals.transferred_bytes / 1e9:.3g} GB of KV moved"
    ]
    if totals.cost_per_million_output_tokens is not None:
        lines.append(
            f"Cost {_number(totals.cost)}, {_number(totals.cost_per_million_output_tokens)} a million output tokens"
        )
    return "\n".join(lines)


def _warnings(report: Report) -> list[str]:
    if not report.warnings:
        return []
    return ["\n".join(f"warning: {one.text} [{one.caution}]" for one in report.warnings)]


def _profile_line(use: ProfileUse) -> str:
    errors = ", ".join(
        f"{name} {_percent(error)}"
        for name, error in (("prefill", use.prefill_error), ("decode", use.decode_error))
        if error is not None
    )
    factors = ""
    if (use.prefill_factor, use.decode_factor) != (1.0, 1.0):
        factors = f"; calibrated: prefill times {use.prefill_factor:.3g}, decode times {use.decode_factor:.3g}"
    return (
        f"- pool {use.pool}: {use.model} on {use.accelerator} tp{use.tensor} pp{use.pipeline}, {use.kind.lower()} "
        f"({use.source})"
        + (f"; mean error of the fit: {errors}" if errors else "")
        + (f"; assumed: {use.assumed}" if use.assumed else "")
        + factors
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _with_half_width(value: float, half_width: float | None, unit: str) -> str:
    shown = _number(value)
    return f"{shown}{unit}" if half_width is None else f"{shown} ± {_half_width(half_width)}{unit}"


def _half_width(value: float) -> str:
    """Two digits: an interval's own error is larger than the third."""
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):.0f}"  # noqa: PLR2004 - no exponent from there on


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004 - four digits are enough


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.4g} %"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
