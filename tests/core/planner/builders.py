"""Shapes, questions and runners for the planner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.costs import StepCosts
from headrace_core.perf.hf_config import known
from headrace_core.perf.profiles import Kind, Profile, Provenance
from headrace_core.planner.question import Question, Rules
from headrace_core.planner.space import Nodes, Offer, Shape, Space
from headrace_core.planner.trial import Trial, Verdict
from headrace_core.sim.lengths import Lengths, fixed
from headrace_core.sim.scenario import Instance, Slo
from headrace_core.sim.traffic import Traffic

A100 = Offer(accelerator=accelerator("A100-80G"))


def costs(**changes: Any) -> StepCosts:
    """Round numbers: prefill 10 ms + 0.1 ms a token, decode 10 ms + 0.1 ms a request."""
    values: dict[str, Any] = {
        "prefill_base_ms": 10.0,
        "prefill_token_ms": 0.1,
        "prefill_square_ms": 0.0,
        "decode_base_ms": 10.0,
        "decode_kv_token_ms": 0.0,
        "decode_request_ms": 0.1,
        "large_decode_base_ms": 10.0,
        "large_decode_kv_token_ms": 0.0,
        "large_decode_request_ms": 0.1,
    }
    return StepCosts(**(values | changes))


def instance(*, kv_blocks: int = 10_000, gpus: int = 1, price: float = 0.0, **changes: Any) -> Instance:
    return Instance(costs=costs(**changes), kv_blocks=kv_blocks, gpus=gpus, price_per_hour=price)


def shape(tensor: int = 1, pipeline: int = 1, *, offer: Offer = A100, kv_blocks: int = 10_000, **changes: Any) -> Shape:
    gpus = tensor * pipeline
    own = instance(kv_blocks=kv_blocks, gpus=gpus, price=offer.price_per_hour * gpus, stages=pipeline, **changes)
    provenance = Provenance(kind=Kind.MEASURED, source="a test", assumed="", prefill=None, decode=None)
    profile = Profile(
        model="model",
        accelerator=offer.accelerator.name,
        tensor=tensor,
        pipeline=pipeline,
        engine="",
        costs=own.costs,
        provenance=provenance,
    )
    return Shape(offer=offer, tensor=tensor, pipeline=pipeline, instance=own, profile=profile)


def space(*shapes: Shape, nodes: Nodes | None = None) -> Space:
    return Space(model=known("facebook/opt-13b"), nodes=nodes or Nodes(), shapes=shapes or (shape(),), refused=())


def question(
    *, lengths: Lengths | None = None, ttft_ms: float = 1000.0, tpot_ms: float = 15.0, **changes: Any
) -> Question:
    values: dict[str, Any] = {
        "traffic": Traffic(lengths=lengths or fixed(400, 101)),
        "slos": (Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms),),
        "rate_per_s": 10.0,
        "rules": Rules(),
    }
    return Question(**(values | changes))


class Known:
    """A runner that knows each scenario's goodput, and simulates nothing: shares fall around it, without noise."""

    def __init__(self, goodput: Callable[[Trial], float]) -> None:
        self._goodput = goodput
        self.trials = 0
        self.seen: list[Trial] = []

    def run(self, trials: Sequence[Trial]) -> list[Verdict]:
        self.trials += len(trials)
        self.seen.extend(trials)
        return [self._verdict(trial) for trial in trials]

    def _verdict(self, trial: Trial) -> Verdict:
        goodput = self._goodput(trial)
        measured = 100_000
        over = trial.rate_per_s / goodput - 1 if goodput > 0 else 10.0
        share = max(0.0, min(1.0, trial.target - over))
        met = round(share * measured)
        return Verdict(
            measured=measured,
            met=met,
            ttft_met=met,
            tpot_met=measured,
            target=trial.target,
            stopped_early=share < trial.target - 0.25 and not trial.to_the_end,
        )


def priced(name: str, price: float) -> Offer:
    return replace(A100, accelerator=accelerator(name), price_per_hour=price)
