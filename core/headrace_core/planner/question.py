"""What a plan is asked for: traffic, SLOs, a rate or a number of GPUs, and the rules that the workers will follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, final

from headrace_core.planner.caps import Work, work_of
from headrace_core.planner.errors import PlanError
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.policy.dispatch import Dispatching
from headrace_core.sim.scenario import Colocation, DecodeRules, Prediction, PrefillRules, Slo
from headrace_core.sim.traffic import Traffic

BUDGETS: Final = (2048, 1024, 512, 256)
"""Tokens of a step, tried for colocated workers that mix prompts with decodes, the largest within the TPOT first."""


class Layout(StrEnum):
    """How prefill and decode stand to one another."""

    APART = "Apart"
    """Workers of either role anywhere; KV goes over the network (DistServe's Algorithm 1)."""
    PAIRED = "Paired"
    """A prefill and a decode worker share their nodes stage by stage; KV stays within a node (its Algorithm 2)."""
    MIXED = "ColocatedMixed"
    """Every worker does both, chunks of prompts riding on decode steps (Sarathi, vLLM)."""
    PREFILL_FIRST = "ColocatedPrefillFirst"
    """Every worker does both, prompts first (vLLM as it began)."""

    @property
    def colocation(self) -> Colocation | None:
        """How a colocated worker shares its steps; None where the roles are apart."""
        if self is Layout.MIXED:
            return Colocation.MIXED
        return Colocation.PREFILL_FIRST if self is Layout.PREFILL_FIRST else None


DISAGGREGATED: Final = (Layout.APART, Layout.PAIRED)
COLOCATED: Final = (Layout.MIXED, Layout.PREFILL_FIRST)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the workers and the gateway will do, in every plan alike."""

    prefill: PrefillRules = field(default_factory=PrefillRules)
    decode: DecodeRules = field(default_factory=DecodeRules)
    dispatching: Dispatching = Dispatching.DEFAULT
    prediction: Prediction = field(default_factory=Prediction)
    deflection: DeflectionSettings | None = None
    """None: prompts are computed by prefill workers only."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked for.

    Raises:
        PlanError: a field is out of its range, or neither a rate nor a number of GPUs is given.
    """

    traffic: Traffic
    slos: tuple[Slo, ...]
    target: float = 0.9
    """Share of all requests that must meet both SLOs of their class, above 0 and under 1."""
    rate_per_s: float | None = None
    """Requests/s to be served, as cheaply as can be. None: as many as `gpus` can serve."""
    gpus: int | None = None
    """GPUs that there are, over all accelerators. None: as many as it takes."""
    layouts: tuple[Layout, ...] = DISAGGREGATED
    """Disaggregated layouts to search. Colocated workers are searched in any case, to compare with."""
    rules: Rules = field(default_factory=Rules)
    work: Work = field(init=False)
    """The means of the traffic's lengths."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", work_of(self.traffic.lengths, self.rules.prefill))
        for message, bad in _checks(self):
            if bad:
                raise PlanError(message)

    @property
    def tpot_ms(self) -> float:
        """The TPOT that the most patient class allows."""
        return max(slo.tpot_ms for slo in self.slos)


def _checks(question: Question) -> list[tuple[str, bool]]:
    rate, gpus, slos = question.rate_per_s, question.gpus, question.slos
    outputs = question.traffic.lengths.output_tokens
    return [
        ("rate: give a rate to be served, or a number of GPUs to be used, or both", rate is None and gpus is None),
        (
            f"rate: {rate} requests/s is not a positive number; give the mean arrival rate",
            rate is not None and not 0 < rate < math.inf,
        ),
        (f"gpus: {gpus} leaves nothing to serve with; give at least 1", gpus is not None and gpus < 1),
        (
            f"target: {question.target:g} is no share to aim at; give a number above 0 and under 1, such as 0.9",
            not 0 < question.target < 1,
        ),
        ("slos: give at least one", not slos),
        (
            "slo: ttft and tpot must be above 0 ms",
            not all(slo.ttft_ms > 0 and slo.tpot_ms > 0 for slo in slos),
        ),
        (
            f"class_shares: {len(question.traffic.class_shares)} for {len(slos)} SLO classes; give one for each",
            len(question.traffic.class_shares) != len(slos),
        ),
        (
            "lengths: no answer has a second token, so there is nothing to decode; give lengths with longer answers",
            max(outputs) < 2,  # noqa: PLR2004 - the second token
        ),
        (
            "layouts: name Apart, Paired or both",
            not question.layouts or any(layout.colocation for layout in question.layouts),
        ),
    ]
