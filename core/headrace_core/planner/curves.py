"""Follows a deployment over a range of rates: attainment, tokens a GPU, tokens a user, cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from headrace_core.planner.deployment import Deployment, trial_of
from headrace_core.planner.goodput import Interval, interval
from headrace_core.planner.question import Question
from headrace_core.planner.runner import Runner
from headrace_core.planner.space import Space

FACTORS: Final = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)
"""Rates over the goodput."""
RUNS: Final = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A deployment at one rate."""

    rate_per_s: float
    attainment: Interval
    output_tokens_per_gpu_s: float
    output_tokens_per_user_s: float | None
    """1 over the mean TPOT. None: no request has one."""
    cost_per_million_tokens: float | None
    """Of output tokens. None: no price was given."""


def curve_of(
    question: Question, space: Space, deployment: Deployment, goodput_per_s: float, runner: Runner
) -> tuple[Point, ...]:
    """The deployment at FACTORS times its goodput; nothing for one without goodput."""
    if goodput_per_s <= 0:
        return ()
    rates = [factor * goodput_per_s for factor in FACTORS]
    trials = [
        replace(trial_of(question, space, deployment, rate), to_the_end=True, replication=number)
        for rate in rates
        for number in range(RUNS)
    ]
    verdicts = runner.run(trials)
    points: list[Point] = []
    for place, rate in enumerate(rates):
        own = verdicts[place * RUNS : (place + 1) * RUNS]
        tpots_ms = [verdict.mean_tpot_ms for verdict in own if verdict.mean_tpot_ms]
        tokens_per_s = rate * (question.work.decode_tokens + 1.0)
        price = deployment.price_per_hour
        points.append(
            Point(
                rate_per_s=rate,
                attainment=interval([verdict.share for verdict in own]),
                output_tokens_per_gpu_s=tokens_per_s / deployment.gpus,
                output_tokens_per_user_s=1000.0 * len(tpots_ms) / sum(tpots_ms) if tpots_ms else None,
                cost_per_million_tokens=price / 3600.0 / tokens_per_s * 1e6 if price else None,
            )
        )
    return tuple(points)
