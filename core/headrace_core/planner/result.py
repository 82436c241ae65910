"""What a plan holds: frozen, versioned, with the interval behind each number, and its JSON.

A number that is not known is None, never 0. Rates are requests/s, shares 0 to 1, prices per hour in the currency that
was given. This module stays interpreted: pydantic reads the classes' field types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from headrace_core.perf.profiles import Kind
from headrace_core.planner.binding import Binding
from headrace_core.planner.curves import Point
from headrace_core.planner.errors import PlanError
from headrace_core.planner.goodput import Interval
from headrace_core.planner.headroom import Case
from headrace_core.planner.question import Layout
from headrace_core.planner.schedule import Schedule
from headrace_core.sim.json_form import JsonForm
from headrace_core.sim.scenario import Duty, Slo

SCHEMA_VERSION: Final = 1
"""Raised when a field changes its meaning or goes away; a new field leaves it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for."""

    model: str
    traffic: str
    """Where the lengths come from."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    variation: float
    """Standard deviation of a gap between arrivals over its mean. 1: Poisson."""
    slos: tuple[Slo, ...]
    target: float
    rate_per_s: float | None
    """None: as many as the GPUs can serve."""
    gpus: int | None
    """None: as many as it takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Workers of one kind."""

    duty: Duty
    workers: int
    accelerator: str
    tensor: int
    pipeline: int
    gpus: int
    """Of all these workers."""
    kv_tokens: int
    """That one worker holds."""
    price_per_hour: float | None
    """Of all these workers. None: no price was given."""
    profile: Kind
    """Whether the step times are measured or estimated."""
    profile_source: str
    profile_assumed: str
    """What of the step times nobody measured; empty: all is measured, or all is estimated."""
    profile_error: float | None
    """Mean absolute error of the fit, relative. None: not known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A deployment and what it can do."""

    layout: Layout
    pools: tuple[PoolPlan, ...]
    token_budget: int | None
    """Tokens of a step that carries prompts with decodes. None: prompts run in passes of their own."""
    gpus: int
    price_per_hour: float | None
    goodput_per_s: Interval
    """The highest rate at which the target share of the requests is in time."""
    goodput_per_gpu_s: float
    cost_per_million_tokens: float | None
    """Of output tokens, at the rate asked for or at the goodput. None: no price was given."""
    attainment: Interval | None
    """Share of the requests in time at the rate asked for. None: no rate was asked for."""
    holds: bool
    """Whether it serves what was asked for."""
    spare: float | None
    """Goodput over the rate asked for, less 1. None: no rate was asked for."""
    binding: Binding
    curve: tuple[Point, ...]
    """Over a range of rates. Empty: not asked for."""
    tied_with_best: bool
    """Whether it costs the same as the first plan, or its goodput cannot be told apart."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AloneGoodput:
    """What one worker serves as one side of a plan (Algorithm 1)."""

    duty: Duty
    accelerator: str
    tensor: int
    pipeline: int
    goodput_per_s: Interval
    goodput_per_gpu_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The answer to a question."""

    schema_version: int
    asked: Asked
    plans: tuple[Plan, ...]
    """Best first, disaggregated and colocated alike. Empty: nothing that was looked at serves what was asked for."""
    subject: int | None
    """The place in `plans` of the plan that headroom, schedule and patch are of: the best disaggregated one, which an
    InferenceCluster can be, or the best where there is none. None: there is no plan."""
    headroom: tuple[Case, ...]
    current: Plan | None
    """The deployment that there is. None: none was named."""
    current_headroom: tuple[Case, ...]
    schedule: Schedule | None
    """Workers over the trace, of the subject or else of the current deployment. None: not asked for."""
    alone: tuple[AloneGoodput, ...]
    without: tuple[Layout, ...]
    """Layouts of which no plan serves what was asked for with the GPUs that there are."""
    left_out: tuple[str, ...]
    """Shapes that were not looked at, and why."""
    patch: dict[str, Any] | None
    """A merge patch of an InferenceCluster. None: the plan cannot be one, see `patch_note`."""
    patch_note: str
    warnings: tuple[str, ...]
    simulations: int


PLANS: Final = JsonForm(PlanResult, SCHEMA_VERSION, "headrace plan", PlanError)
to_json = PLANS.write
from_json = PLANS.read
json_schema = PLANS.schema
