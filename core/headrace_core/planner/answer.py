"""Puts the parts of an answer together: search, ranking with its ties, what binds, headroom, schedule and patch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.api.spec import Pool
from headrace_core.perf.profiles import Kind
from headrace_core.planner.binding import binding_of
from headrace_core.planner.caps import lowest
from headrace_core.planner.curves import curve_of
from headrace_core.planner.deployment import Deployment, caps_of, total_weight, trial_of
from headrace_core.planner.goodput import WANTED_HALF_WIDTH
from headrace_core.planner.headroom import Case, Surprise, headroom
from headrace_core.planner.patch import patch_of
from headrace_core.planner.question import DISAGGREGATED, Layout, Question
from headrace_core.planner.result import SCHEMA_VERSION, AloneGoodput, Asked, Plan, PlanResult, PoolPlan
from headrace_core.planner.runner import Runner
from headrace_core.planner.schedule import schedule
from headrace_core.planner.search import Found, Results, measured, search
from headrace_core.planner.settle import Assessment, assess
from headrace_core.planner.space import Space
from headrace_core.sim.scenario import Duty
from headrace_core.sim.workload import Workload

SAME_COST: Final = 0.005
"""Relative difference up to which two costs count as the same."""
POOR_FIT: Final = 0.1
"""Mean error of a profile's fit from which on a warning says so."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is asked beside the plan."""

    current: Deployment | None = None
    """The deployment that there is."""
    pools: tuple[Pool, ...] = ()
    """Its pools in the InferenceCluster, for the patch."""
    rates: tuple[tuple[Surprise, float], ...] = ()
    """Further rates at which the headroom is looked at."""
    trace: Workload | None = None
    """To be scheduled, with `window_s`."""
    window_s: float = 3600.0
    curves: bool = False
    """Follow each plan over a range of rates."""
    only_current: bool = False
    """Look at the current deployment, and search nothing."""


def answer(
    question: Question,
    space: Space,
    runner: Runner,
    extras: Extras,
    announce: Callable[[str], None] = lambda _: None,
) -> PlanResult:
    """The answer. `announce` is told what is being looked at.

    Raises:
        PlanError: an SLO lies under the floor of every shape, or the schedule's window is out of range.
    """
    results = Results(found=(), alone=(), without=())
    if not extras.only_current:
        results = search(question, space, runner, announce)
    announce("what binds")
    plans = _ranked(
        question,
        [_plan(question, space, found, runner, curves=extras.curves) for found in results.found],
        results.found,
    )
    place = _subject(results)
    subject = None if place is None else results.found[place].deployment
    announce("headroom")
    cases = headroom(question, space, subject, runner, extras.rates) if subject else ()
    current, current_cases = _current(question, space, extras, runner)
    announce("schedule")
    timetable, scheduled = None, subject or extras.current
    if extras.trace is not None and scheduled is not None:
        timetable = schedule(question, space, scheduled, extras.trace, runner, window_s=extras.window_s)
    patch, note = patch_of(subject, space.nodes, extras.pools) if subject else (None, "there is no plan to apply")
    return PlanResult(
        schema_version=SCHEMA_VERSION,
        asked=_asked(question, space),
        plans=tuple(plans),
        subject=place,
        headroom=cases,
        current=current,
        current_headroom=current_cases,
        schedule=timetable,
        alone=tuple(_alone_goodputs(results)),
        without=results.without,
        left_out=space.refused,
        patch=patch,
        patch_note=note,
        warnings=tuple(_warnings(question, plans, current)),
        simulations=runner.trials,
    )


def _subject(results: Results) -> int | None:
    """The best plan that an InferenceCluster can be, or else the best."""
    layouts = [one.deployment.layout for one in results.found]
    if not layouts:
        return None
    return next((place for place, layout in enumerate(layouts) if layout in DISAGGREGATED), 0)


def _current(question: Question, space: Space, extras: Extras, runner: Runner) -> tuple[Plan | None, tuple[Case, ...]]:
    deployment = extras.current
    if deployment is None:
        return None, ()
    rate_per_s = question.rate_per_s
    assessment = None
    if rate_per_s is not None:
        if rate_per_s > lowest(caps_of(question, space, deployment)).rate_per_s:
            assessment = Assessment(share=None, holds=False, ttft_share=0.0, tpot_share=0.0)
        else:
            assessment = assess(trial_of(question, space, deployment, rate_per_s), runner)
    found = Found(deployment=deployment, goodput=measured(question, space, deployment, runner), assessment=assessment)
    return _plan(question, space, found, runner, curves=extras.curves), headroom(
        question, space, deployment, runner, extras.rates
    )


def _plan(question: Question, space: Space, found: Found, runner: Runner, *, curves: bool) -> Plan:
    deployment, goodput = found.deployment, found.goodput
    rate_per_s, assessment = question.rate_per_s, found.assessment
    price = deployment.price_per_hour or None
    tokens_per_s = (rate_per_s or goodput.mean) * (question.work.decode_tokens + 1)
    return Plan(
        layout=deployment.layout,
        pools=tuple(_pool(deployment, place) for place in range(len(deployment.sides))),
        token_budget=deployment.token_budget if deployment.layout is Layout.MIXED else None,
        gpus=deployment.gpus,
        price_per_hour=price,
        goodput_per_s=goodput,
        goodput_per_gpu_s=goodput.mean / deployment.gpus,
        cost_per_million_tokens=price / 3600.0 / tokens_per_s * 1e6 if price and tokens_per_s > 0 else None,
        attainment=assessment.share if assessment else None,
        holds=assessment.holds if assessment else goodput.mean > 0,
        spare=goodput.mean / rate_per_s - 1.0 if rate_per_s else None,
        binding=binding_of(question, space, deployment, goodput.mean, runner),
        curve=curve_of(question, space, deployment, goodput.mean, runner) if curves else (),
        tied_with_best=False,
    )


def _pool(deployment: Deployment, place: int) -> PoolPlan:
    side = deployment.sides[place]
    shape, provenance = side.shape, side.shape.profile.provenance
    duties = (Duty.COLOCATED,) if deployment.layout.colocation else (Duty.PREFILL, Duty.DECODE)
    residual = provenance.decode if duties[place] is Duty.DECODE else provenance.prefill
    return PoolPlan(
        duty=duties[place],
        workers=side.workers,
        accelerator=shape.offer.accelerator.name,
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        gpus=side.gpus,
        kv_tokens=shape.instance.kv_blocks * shape.instance.block_tokens,
        price_per_hour=shape.instance.price_per_hour * side.workers or None,
        profile=provenance.kind,
        profile_source=provenance.source,
        profile_assumed=provenance.assumed,
        profile_error=residual.mape if residual and provenance.kind is Kind.MEASURED else None,
    )


def _ranked(question: Question, plans: Sequence[Plan], found: Sequence[Found]) -> list[Plan]:
    """The plans, in the order in which they were found, with those marked that are as good as the first."""
    ranked: list[Plan] = []
    for plan, one in zip(plans, found, strict=True):
        tied = one is not found[0] and _ties(question, found[0], one)
        ranked.append(replace(plan, tied_with_best=tied))
    return ranked


def _ties(question: Question, best: Found, other: Found) -> bool:
    """Whether the goodputs cannot be told apart, and, where a rate is served, the costs are the same."""
    if best.goodput.low > other.goodput.high or other.goodput.low > best.goodput.high:
        return False
    if question.rate_per_s is None:
        return True
    costs = [total_weight(question, one.deployment) for one in (best, other)]
    return abs(costs[1] - costs[0]) <= SAME_COST * costs[0]


def _asked(question: Question, space: Space) -> Asked:
    work, lengths = question.work, question.traffic.lengths
    return Asked(
        model=space.model.name,
        traffic=lengths.source,
        mean_prompt_tokens=work.prompt_tokens,
        mean_output_tokens=work.decode_tokens + 1.0,
        variation=question.traffic.variation,
        slos=question.slos,
        target=question.target,
        rate_per_s=question.rate_per_s,
        gpus=question.gpus,
    )


def _alone_goodputs(results: Results) -> list[AloneGoodput]:
    return [
        AloneGoodput(
            duty=one.duty,
            accelerator=one.shape.offer.accelerator.name,
            tensor=one.shape.tensor,
            pipeline=one.shape.pipeline,
            goodput_per_s=one.goodput,
            goodput_per_gpu_s=one.goodput.mean / one.shape.gpus,
        )
        for one in results.alone
    ]


def _warnings(question: Question, plans: Sequence[Plan], current: Plan | None) -> list[str]:
    warnings: list[str] = []
    looked_at = [*plans, *([current] if current else [])]
    pools = [pool for plan in looked_at for pool in plan.pools]
    estimated = sorted({pool.accelerator for pool in pools if pool.profile is Kind.ESTIMATED})
    if estimated:
        warnings.append(
            f"step times on {', '.join(estimated)} are estimated from datasheets, as of a perfect engine: expect less, "
            "and measure before you buy (--profile), or correct them by what you see (--calibrate)"
        )
    for name, error in sorted({(pool.accelerator, pool.profile_error) for pool in pools if pool.profile_error}):
        if error > POOR_FIT:
            warnings.append(f"the profile on {name} misses its own measurements by {error:.0%} on the mean")
    rough = [
        plan for plan in looked_at if plan.goodput_per_s.half_width > 1.5 * WANTED_HALF_WIDTH * plan.goodput_per_s.mean
    ]
    if rough:
        warnings.append(
            "goodputs with wide intervals did not settle in as many replications as are made: the traffic varies much"
        )
    if question.rate_per_s is not None and not plans and current is None:
        warnings.append("no plan serves the rate: offer more GPUs (--gpus), another accelerator, or relax the SLO")
    return warnings
