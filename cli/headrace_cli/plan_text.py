"""Puts a plan into words: tables for the terminal, and the reasons behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import yaml

from headrace_cli.render import table
from headrace_core.planner.caps import Resource
from headrace_core.planner.goodput import Interval
from headrace_core.planner.headroom import Case, Surprise
from headrace_core.planner.question import Layout
from headrace_core.planner.result import Plan, PlanResult, PoolPlan
from headrace_core.planner.schedule import Schedule
from headrace_core.sim.scenario import Duty

PLAN_COLUMNS: Final = ("PLAN", "LAYOUT", "WORKERS", "GPUS", "COST/H", "GOODPUT/S", "A GPU", "IN TIME", "SPARE", "BINDS")
CASE_COLUMNS: Final = ("IF", "RATE/S", "IN TIME", "HOLDS")
WINDOW_COLUMNS: Final = ("FROM", "RATE/S", "WORKERS", "IN TIME", "HOLDS")
MOST_WINDOWS: Final = 48
"""Windows that are shown; the JSON has all."""
_LAYOUTS: Final = {
    Layout.APART: "apart",
    Layout.PAIRED: "paired on a node",
    Layout.MIXED: "colocated, mixed steps",
    Layout.PREFILL_FIRST: "colocated, prefill first",
}
_SURPRISES: Final = {
    Surprise.NONE: "all is as planned",
    Surprise.MEAN: "the trace's mean rate",
    Surprise.PEAK: "the trace's peak rate",
    Surprise.RATE_UP: "rate 20 % higher",
    Surprise.RATE_DOWN: "rate 20 % lower",
    Surprise.PROMPTS_UP: "prompts 20 % longer",
    Surprise.ANSWERS_UP: "answers 20 % longer",
    Surprise.LENGTHS_DOWN: "prompts and answers 20 % shorter",
    Surprise.ALL_UP: "rate and lengths 20 % up",
    Surprise.PREFILL_LOST: "a prefill worker is lost",
    Surprise.DECODE_LOST: "a decode worker is lost",
    Surprise.WORKER_LOST: "a worker is lost",
    Surprise.PAIR_LOST: "a pair is lost",
}
_BINDS: Final = {
    Resource.PREFILL_COMPUTE: "prefill compute",
    Resource.TRANSFER: "KV transfer",
    Resource.DECODE_STEP: "decode step time",
    Resource.DECODE_KV: "KV memory",
    Resource.DECODE_SLOTS: "batch slots",
}
_REMEDIES: Final = {
    Resource.PREFILL_COMPUTE: "more or faster prefill workers, shorter prompts, or a looser TTFT",
    Resource.TRANSFER: "more bandwidth between the workers, or pairs on one node",
    Resource.DECODE_STEP: "more decode workers or a higher tensor degree, or a looser TPOT",
    Resource.DECODE_KV: "GPUs with more memory, more GPUs a decode worker, or KV in 8 bits",
    Resource.DECODE_SLOTS: "a higher --max-running, or more decode workers",
}


def plan_text(result: PlanResult) -> str:
    """The result for a terminal."""
    sections = [_head(result)]
    if result.plans:
        rows = [_plan_row(str(place + 1) + _mark(plan), plan) for place, plan in enumerate(result.plans)]
        sections.append(table(PLAN_COLUMNS, rows))
        if any(plan.tied_with_best for plan in result.plans):
            sections.append("= ties with plan 1: the same cost, and goodputs that cannot be told apart")
    if result.headroom:
        sections.append(f"{_subject(result)}:\n" + table(CASE_COLUMNS, map(_case_row, result.headroom)))
    if result.current is not None:
        current = table(PLAN_COLUMNS, [_plan_row("now", result.current)])
        sections.append(f"What there is:\n{current}")
        if result.current_headroom:
            sections.append(table(CASE_COLUMNS, map(_case_row, result.current_headroom)))
    if result.schedule is not None:
        sections.append(_schedule_text(result.schedule))
    if result.patch is not None:
        sections.append(
            f"Patch of {_subject(result).lower()}:\n" + yaml.safe_dump(result.patch, sort_keys=False).rstrip()
        )
    if result.patch_note:
        sections.append(f"Patch: {result.patch_note}")
    sections.extend(f"Warning: {warning}" for warning in result.warnings)
    return "\n\n".join(sections)


def explanation(result: PlanResult) -> str:
    """Why the result says what it says: what binds, what the sides can do alone, what was left out."""
    lines = ["Why:"]
    for name, plan in _named(result):
        lines.append(f"- {name}: {_binding_line(plan)}")
    for one in result.alone:
        lines.append(
            f"- one {one.duty.lower()} worker of {one.accelerator} tp{one.tensor} pp{one.pipeline} alone: "
            f"{_interval(one.goodput_per_s)}/s, {one.goodput_per_gpu_s:.3g}/s a GPU"
        )
    for layout in result.without:
        lines.append(f"- {_LAYOUTS[layout]}: no plan serves it with the GPUs that there are")
    pools = {(pool.accelerator, pool.tensor, pool.pipeline): pool for _, plan in _named(result) for pool in plan.pools}
    lines.extend(_profile_line(pool) for pool in pools.values())
    lines.extend(f"- {text}" for text in result.left_out)
    lines.append(f"- {result.simulations} simulations; intervals are of 95 % over replications with other arrivals")
    return "\n".join(lines)


def _named(result: PlanResult) -> list[tuple[str, Plan]]:
    named = [(f"plan {place + 1}", plan) for place, plan in enumerate(result.plans)]
    return [*named, ("what there is", result.current)] if result.current is not None else named


def _subject(result: PlanResult) -> str:
    return "Plan" if result.subject is None else f"Plan {result.subject + 1}"


def _head(result: PlanResult) -> str:
    asked = result.asked
    slos = ", ".join(f"{slo.name} TTFT {slo.ttft_ms:g} ms TPOT {slo.tpot_ms:g} ms" for slo in asked.slos)
    wanted = f"{asked.rate_per_s:.4g} requests/s" if asked.rate_per_s else f"as much as {asked.gpus} GPUs can serve"
    arrivals = "Poisson arrivals" if asked.variation == 1 else f"gaps that vary by {asked.variation:.2g} of their mean"
    return (
        f"{asked.model}: {wanted}, {asked.target:.4g} of them within {slos}\n"
        f"{asked.traffic}: {asked.mean_prompt_tokens:.0f} prompt and {asked.mean_output_tokens:.0f} output tokens on "
        f"the mean, {arrivals}"
    )


def _mark(plan: Plan) -> str:
    return "=" if plan.tied_with_best else ""


def _plan_row(name: str, plan: Plan) -> tuple[str, ...]:
    return (
        name,
        _LAYOUTS[plan.layout],
        " + ".join(map(_pool_text, plan.pools)),
        str(plan.gpus),
        "" if plan.price_per_hour is None else f"{plan.price_per_hour:.2f}",
        _interval(plan.goodput_per_s),
        f"{plan.goodput_per_gpu_s:.3g}",
        _share(plan.attainment) if plan.attainment or plan.spare is None else "too few",
        "" if plan.spare is None else f"{plan.spare:+.0%}",
        _BINDS[plan.binding.resource],
    )


def _pool_text(pool: PoolPlan) -> str:
    role = "" if pool.duty is Duty.COLOCATED else f" {pool.duty.lower()}"
    return f"{pool.workers}{role} {_degrees(pool)}"


def _case_row(case: Case) -> tuple[str, ...]:
    if case.share is not None:
        share = _share(case.share)
    elif case.cap_per_s == 0:
        share = "none: no such worker is left"
    elif case.rate_per_s > case.cap_per_s:
        share = f"falls: over the {case.cap_per_s:.3g}/s that can be kept up"
    else:
        share = "far too few"
    return (_SURPRISES[case.surprise], f"{case.rate_per_s:.4g}", share, "yes" if case.holds else "no")


def _schedule_text(schedule: Schedule) -> str:
    shown = schedule.windows[:MOST_WINDOWS]
    rows = [
        (
            _clock(window.from_s),
            f"{window.rate_per_s:.3g}",
            " + ".join(map(str, window.workers)),
            "" if window.share is None else f"{window.share:.3f}",
            "yes" if window.holds else "no",
        )
        for window in shown
    ]
    rest = len(schedule.windows) - len(shown)
    lines = [
        "Workers over the trace (they have to be there when the window begins):",
        table(WINDOW_COLUMNS, rows),
        *([f"and {rest} windows more (--json has all)"] if rest else []),
        f"{schedule.gpu_hours:.1f} GPU-hours; with the most workers all the time {schedule.gpu_hours_at_peak:.1f}",
    ]
    return "\n".join(lines)


def _binding_line(plan: Plan) -> str:
    binding = plan.binding
    misses = ", ".join(f"{share:.1%} in {stage.value.lower()}" for stage, share in binding.misses if share > 0)
    loads = ", ".join(f"{_BINDS[load.resource]} {load.share:.0%}" for load in binding.loads)
    return (
        f"{_BINDS[binding.resource]} gives way first (just past its goodput these miss: {misses or 'none'}); it would "
        f"take {_REMEDIES[binding.resource]}. Of what could be kept up for ever it takes: {loads or 'nothing known'}"
    )


def _profile_line(pool: PoolPlan) -> str:
    error = "" if pool.profile_error is None else f", mean error {pool.profile_error:.1%}"
    assumed = f"; assumed: {pool.profile_assumed}" if pool.profile_assumed else ""
    return f"- {_degrees(pool)}: {pool.profile.value}, {pool.profile_source}{error}{assumed}"


def _degrees(pool: PoolPlan) -> str:
    return f"{pool.accelerator} tp{pool.tensor} pp{pool.pipeline}"


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.3g} ± {interval.half_width:.1g}"


def _share(share: Interval | None) -> str:
    return "" if share is None else f"{share.mean:.3f} ± {share.half_width:.3f}"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


def schedule_columns(schedule: Schedule) -> tuple[Sequence[float], list[list[int]]]:
    """Hours at which windows begin, and the workers of each side from then on."""
    sides = len(schedule.windows[0].workers)
    hours = [window.from_s / 3600.0 for window in schedule.windows]
    return hours, [[window.workers[side] for window in schedule.windows] for side in range(sides)]
