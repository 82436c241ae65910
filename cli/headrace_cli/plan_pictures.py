"""Draws pictures of plans: the end of a file's name says which, its ending the format.

| name | picture |
| --- | --- |
| `...attainment.svg` | attainment against rate, of each plan |
| `...tokens.svg` | output tokens/s a GPU against output tokens/s a user |
| `...cost.svg` | cost of a million output tokens (GPUs a request/s where no price is known) against attainment |
| `...schedule.svg` | workers over the trace |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_cli.errors import CliError
from headrace_cli.figures import panels, save
from headrace_cli.plan_text import schedule_columns
from headrace_core.planner.result import Plan, PlanResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlanPicture(StrEnum):
    """What a picture shows."""

    ATTAINMENT = "attainment"
    TOKENS = "tokens"
    COST = "cost"
    SCHEDULE = "schedule"


def needs_curves(wanted: Sequence[tuple[Path, PlanPicture]]) -> bool:
    """Whether plans have to be followed over a range of rates."""
    return any(picture is not PlanPicture.SCHEDULE for _, picture in wanted)


def draw(path: Path, picture: PlanPicture, result: PlanResult) -> None:
    """Writes a picture.

    Raises:
        CliError: there is nothing to draw, or the file cannot be written.
    """
    figure, (axes,) = panels(1, 1)
    if picture is PlanPicture.SCHEDULE:
        _schedule(axes, result)
    else:
        plans = [*result.plans, *([result.current] if result.current else [])]
        if not any(plan.curve for plan in plans):
            raise CliError(f"--picture: there is no plan with a goodput to draw {path.name} of")
        for plan in plans:
            _curve(axes, picture, plan, result)
        _label(axes, picture, plans, result)
    axes.legend(fontsize=7)
    save(figure, path, f"{result.asked.model}, {result.asked.traffic}")


def _curve(axes: Axes, picture: PlanPicture, plan: Plan, result: PlanResult) -> None:
    name = " + ".join(f"{pool.workers} {pool.accelerator} tp{pool.tensor} pp{pool.pipeline}" for pool in plan.pools)
    label = f"{'now' if plan is result.current else plan.layout.value}: {name}"
    attainment = [100 * point.attainment.mean for point in plan.curve]
    if picture is PlanPicture.ATTAINMENT:
        widths = [100 * point.attainment.half_width for point in plan.curve]
        axes.errorbar(
            [point.rate_per_s for point in plan.curve], attainment, widths, marker="o", capsize=2, label=label
        )
    elif picture is PlanPicture.TOKENS:
        known = [point for point in plan.curve if point.output_tokens_per_user_s is not None]
        per_user = [point.output_tokens_per_user_s or 0.0 for point in known]
        axes.plot(per_user, [point.output_tokens_per_gpu_s for point in known], marker="o", label=label)
    else:
        costs = [point.cost_per_million_tokens or plan.gpus / point.rate_per_s for point in plan.curve]
        axes.plot(attainment, costs, marker="o", label=label)


def _label(axes: Axes, picture: PlanPicture, plans: Sequence[Plan], result: PlanResult) -> None:
    target = 100 * result.asked.target
    if picture is PlanPicture.ATTAINMENT:
        axes.axhline(target, color="black", linestyle="--", linewidth=0.8)
        if result.asked.rate_per_s is not None:
            axes.axvline(result.asked.rate_per_s, color="black", linestyle="--", linewidth=0.8)
        axes.set(xlabel="requests/s", ylabel="requests within their SLO, %", ylim=(0, 102), xlim=(0, None))
    elif picture is PlanPicture.TOKENS:
        axes.set(xlabel="output tokens/s a user", ylabel="output tokens/s a GPU", xlim=(0, None), ylim=(0, None))
    else:
        axes.axvline(target, color="black", linestyle="--", linewidth=0.8)
        priced = all(plan.price_per_hour is not None for plan in plans)
        cost = "cost of a million output tokens" if priced else "GPUs for a request/s"
        axes.set(xlabel="requests within their SLO, %", ylabel=cost, xlim=(0, 102), yscale="log")


def _schedule(axes: Axes, result: PlanResult) -> None:
    schedule = result.schedule
    if schedule is None:
        raise CliError("--picture: there is no schedule to draw; add --trace FILE --schedule TIME")
    hours, sides = schedule_columns(schedule)
    end = schedule.windows[-1].until_s / 3600.0
    names = ("prefill workers", "decode workers") if len(sides) > 1 else ("workers",)
    for name, counts in zip(names, sides, strict=True):
        axes.stairs(counts, [*hours, end], label=name)
    rates = [window.rate_per_s for window in schedule.windows]
    axes.stairs(rates, [*hours, end], label="requests/s", linestyle=":", color="black")
    axes.set(xlabel="hours", xlim=(0, end), ylim=(0, None))
