"""Scenarios of other systems to compare with: colocated serving (D10), and what DistServe's simulator simulates."""

from __future__ import annotations

import math
from typing import Final

from headrace_core.policy.admission import Admission
from headrace_core.policy.chunking import Batching
from headrace_core.policy.prefill_order import Order
from headrace_core.sim.scenario import (
    Colocation,
    DecodeRules,
    Duty,
    Instance,
    Pool,
    PrefillRules,
    Scenario,
    Slo,
)

ENDLESS_BLOCKS: Final = 1 << 40
DISTSERVE_BATCH_TOKENS: Final = 50_000
"""Context tokens of one decode step in DistServe's simulator (simdistserve/base/worker.py)."""


def vllm_like(instance: Instance, workers: int, slos: tuple[Slo, ...], *, seed: int = 0) -> Scenario:
    """Continuous batching as DistServe compares with it: prompts run alone and first, admission is greedy.

    With the parallelism searched over, it is the paper's "vLLM++".
    """
    return _colocated(instance, workers, slos, how=Colocation.PREFILL_FIRST, token_budget=2048, seed=seed)


def sarathi_like(
    instance: Instance, workers: int, slos: tuple[Slo, ...], *, token_budget: int = 512, seed: int = 0
) -> Scenario:
    """Chunks of prompts ride on decode steps, `token_budget` tokens to a step in all."""
    return _colocated(instance, workers, slos, how=Colocation.MIXED, token_budget=token_budget, seed=seed)


def _colocated(
    instance: Instance, workers: int, slos: tuple[Slo, ...], *, how: Colocation, token_budget: int, seed: int
) -> Scenario:
    return Scenario(
        pools=(Pool(name="colocated", duty=Duty.COLOCATED, instance=instance, workers=workers),),
        slos=slos,
        colocation=how,
        prefill=PrefillRules(limit_tokens=16_384),
        decode=DecodeRules(admission=Admission.GREEDY, token_budget=token_budget),
        seed=seed,
    )


def as_distserve_simulates(
    prefill: Instance, decode: Instance, slos: tuple[Slo, ...], *, most_prefill_tokens: int, seed: int = 0
) -> Scenario:
    """One worker of each kind by the rules of DistServe's simulator, in its single-stage case.

    A prefill pass takes the whole queue up to `most_prefill_tokens`; KV memory has no end, and moves in no time; a
    decode step holds at most 50,000 tokens of context, and residents beyond take turns; decode makes all tokens.
    """
    return Scenario(
        pools=(
            Pool(name="prefill", duty=Duty.PREFILL, instance=_endless(prefill), workers=1),
            Pool(name="decode", duty=Duty.DECODE, instance=_endless(decode), workers=1),
        ),
        slos=slos,
        network=None,
        prefill=PrefillRules(
            order=Order.FCFS, sched_batch=1, batching=Batching.WHOLE_QUEUE, limit_tokens=most_prefill_tokens
        ),
        decode=DecodeRules(
            admission=Admission.GREEDY, max_running=ENDLESS_BLOCKS, max_batch_tokens=DISTSERVE_BATCH_TOKENS
        ),
        report_interval_ms=math.inf,
        prefill_gives_first_token=False,
        seed=seed,
    )


def _endless(instance: Instance) -> Instance:
    return Instance(
        costs=instance.costs, kv_blocks=ENDLESS_BLOCKS, block_tokens=instance.block_tokens, gpus=instance.gpus
    )
