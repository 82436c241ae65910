"""Bounds the rate that a worker can keep up with for ever, from its step times and memory alone, without a simulation.

A run of a few thousand requests flatters a worker whose queue grows slowly: 0.97 of the requests in time after 3,000
where it is 0.74 after 10,000. No such rate passes here. The bounds are ours: each leaves out whatever would lower it
(waiting, uneven load, KV that is reserved and not used), so a stable rate never lies above them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from headrace_core.perf.costs import StepCosts
from headrace_core.policy.chunking import Batching
from headrace_core.sim.lengths import Lengths
from headrace_core.sim.scenario import DecodeRules, Instance, Network, PrefillRules

MAJORITY: Final = 0.5
"""With a target above it, the mean decode batch must be within the TPOT: about half the requests see a larger one."""


class Resource(StrEnum):
    """What a rate runs up against."""

    PREFILL_COMPUTE = "PrefillCompute"
    """Prompts come faster than passes compute them."""
    TRANSFER = "Transfer"
    """KV comes faster than the links carry it."""
    DECODE_STEP = "DecodeStep"
    """A larger decode batch would take longer for a step than the TPOT allows."""
    DECODE_KV = "DecodeKv"
    """The KV cache is full."""
    DECODE_SLOTS = "DecodeSlots"
    """The batch has as many requests as the engine runs at once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks for on the mean over a table of lengths."""

    prompt_tokens: float
    prompt_squares: float
    """Mean of the squared prompt lengths: t2 of a request."""
    decode_tokens: float
    """Tokens made by decode steps: all but the first."""
    context_tokens: float
    """Mean context of a decode step, the token computed in it included. 0: no answer has a second token."""
    decoding_share: float
    """Share of the requests with a second token."""
    passes: float
    """Prefill passes of which a request is the whole load, at least: a fraction where several fit into one."""
    longest_request: int
    """Prompt and answer together."""


def work_of(lengths: Lengths, rules: PrefillRules) -> Work:
    """The means over a table of at least one pair, for workers that fill their passes by `rules`."""
    count = len(lengths)
    chunked = rules.batching is Batching.CHUNKED
    steps = contexts = decoding = longest = 0
    passes = 0.0
    for prompt, output in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True):
        steps += output - 1
        # The first decode step reads the prompt and the first token, and computes one more.
        contexts += (output - 1) * prompt + (output - 1) * (output + 2) // 2
        decoding += output > 1
        longest = max(longest, prompt + output)
        share = prompt / rules.limit_tokens
        passes += share if chunked else min(1.0, share)
    return Work(
        prompt_tokens=sum(lengths.prompt_tokens) / count,
        prompt_squares=math.fsum(float(prompt * prompt) for prompt in lengths.prompt_tokens) / count,
        decode_tokens=steps / count,
        context_tokens=contexts / steps if steps else 0.0,
        decoding_share=decoding / count,
        passes=passes / count,
        longest_request=longest,
    )


@final
@dataclass(frozen=True, slots=True)
class Cap:
    """A rate that no stable system passes, in requests/s, and what stands in the way. Infinite: nothing does."""

    rate_per_s: float
    resource: Resource


def lowest(caps: list[Cap]) -> Cap:
    """The first of at least one cap that no other undercuts."""
    return min(caps, key=lambda cap: cap.rate_per_s)


def prefill_cap(instance: Instance, work: Work) -> Cap:
    """Of one prefill worker: passes as full as the rules allow, one entering as soon as the last has left a stage."""
    request_ms = _prefill_request_ms(instance.costs, work)
    return Cap(1000.0 / request_ms if request_ms > 0 else math.inf, Resource.PREFILL_COMPUTE)


def transfer_cap(network: Network | None, work: Work) -> Cap:
    """Of one worker's link."""
    if network is None or network.kv_bytes_per_token == 0 or work.decoding_share == 0:
        return Cap(math.inf, Resource.TRANSFER)
    request_ms = work.decoding_share * (
        network.latency_ms + work.prompt_tokens * network.kv_bytes_per_token / network.bytes_per_ms
    )
    return Cap(1000.0 / request_ms, Resource.TRANSFER)


def decode_caps(instance: Instance, rules: DecodeRules, work: Work, tpot_ms: float, target: float) -> list[Cap]:
    """Of one decode worker, by each resource alone.

    `tpot_ms` is the loosest TPOT of the classes; it binds for targets above MAJORITY, and only if the requests of one
    token, which have no TPOT, are too few to meet the target by themselves.
    """
    return _batch_caps(instance, rules, work, tpot_ms if _tpot_binds(work, target) else math.inf, request_ms=0.0)


def colocated_caps(
    instance: Instance, rules: DecodeRules, work: Work, *, tpot_ms: float, target: float, mixed: bool
) -> list[Cap]:
    """Of one colocated worker, by each resource alone: prompts take their time out of the decode steps.

    `mixed`: chunks ride on the steps, else they run alone.
    """
    request_ms = _prefill_request_ms(instance.costs, work, rides=mixed)
    caps = _batch_caps(instance, rules, work, tpot_ms if _tpot_binds(work, target) else math.inf, request_ms)
    if request_ms > 0:
        caps.append(Cap(1000.0 / request_ms, Resource.PREFILL_COMPUTE))
    return caps


def _tpot_binds(work: Work, target: float) -> bool:
    return target > MAJORITY and 1.0 - work.decoding_share < target


def _prefill_request_ms(costs: StepCosts, work: Work, *, rides: bool = False) -> float:
    """Time of a stage that a request takes at least, its share of the fixed cost of passes included.

    `rides`: the prompts come with decode steps, which pay that fixed cost.
    """
    fixed_ms = costs.stage_ms(0, 0.0, 0, 0)
    token_ms = costs.stage_ms(1, 0.0, 0, 0) - fixed_ms
    square_ms = costs.prefill_square_ms / costs.stages
    own_ms = token_ms * work.prompt_tokens + square_ms * work.prompt_squares
    return own_ms if rides else own_ms + fixed_ms * work.passes


def _batch_caps(instance: Instance, rules: DecodeRules, work: Work, tpot_ms: float, request_ms: float) -> list[Cap]:
    """Little's law over the decode batch: rate = batch / (tokens a request * time a step), for the largest batch."""
    if work.decode_tokens == 0:
        return [Cap(math.inf, Resource.DECODE_STEP)]
    kv_tokens = instance.kv_blocks * instance.block_tokens
    context_tokens = work.context_tokens
    if rules.max_batch_tokens:
        kv_tokens = min(kv_tokens, rules.max_batch_tokens * instance.costs.stages)
    bounds = [
        (_batch_within(instance.costs, work, tpot_ms, request_ms, rules.max_running), Resource.DECODE_STEP),
        (kv_tokens / context_tokens, Resource.DECODE_KV),
        (float(rules.max_running), Resource.DECODE_SLOTS),
    ]
    return [
        Cap(_best_rate(instance.costs, work, min(batch, rules.max_running), request_ms), resource)
        for batch, resource in bounds
    ]


def _batch_within(costs: StepCosts, work: Work, tpot_ms: float, request_ms: float, most: int) -> float:
    """The largest batch whose step, with the prompts that ride on it, is within `tpot_ms`; a fraction between two."""
    if tpot_ms == math.inf:
        return float(most)
    largest = 0.0
    before_ms = _step_ms(costs, work, 1, request_ms)
    if before_ms > tpot_ms:
        return 0.0
    for batch in range(1, most + 1):
        step_ms = _step_ms(costs, work, batch, request_ms)
        if step_ms <= tpot_ms:
            largest = float(batch)
        elif before_ms <= tpot_ms:
            largest = batch - 1 + (tpot_ms - before_ms) / (step_ms - before_ms)
        before_ms = step_ms
    return largest


def _best_rate(costs: StepCosts, work: Work, batch: float, request_ms: float) -> float:
    """The highest rate of any batch up to `batch`: where the profile changes to its large fit, more may be slower."""
    best = 0.0
    for size in range(1, math.floor(batch) + 1):
        best = max(best, size / _step_ms(costs, work, size, request_ms))
    rest = batch - math.floor(batch)
    if rest > 0:
        lower, upper = math.floor(batch), math.floor(batch) + 1
        upper_ms = _step_ms(costs, work, upper, request_ms)
        lower_ms = _step_ms(costs, work, lower, request_ms) if lower else upper_ms
        best = max(best, batch / (lower_ms + rest * (upper_ms - lower_ms)))
    return best / work.decode_tokens * 1000.0


def _step_ms(costs: StepCosts, work: Work, batch: int, request_ms: float) -> float:
    """Time in which each request of a worker's batch gains one token.

    The batch is spread over as many lanes as there are stages. The lanes follow one another by a stage each, and none
    starts its next step before it has passed through all of them. `request_ms` of prompt work comes with each request
    that ends, one in `decode_tokens` steps of each.
    """
    lane, fuller_lanes = divmod(batch, costs.stages)
    stages_ms = fuller_lanes * _lane_ms(costs, work, lane + 1)
    longest_ms = costs.decode_ms(lane + 1, round((lane + 1) * work.context_tokens)) if fuller_lanes else 0.0
    if lane:
        stages_ms += (costs.stages - fuller_lanes) * _lane_ms(costs, work, lane)
        longest_ms = max(longest_ms, costs.decode_ms(lane, round(lane * work.context_tokens)))
    return max(stages_ms, longest_ms) + request_ms * batch / work.decode_tokens


def _lane_ms(costs: StepCosts, work: Work, requests: int) -> float:
    return costs.stage_ms(0, 0.0, requests, round(requests * work.context_tokens))


def floor_tpot_ms(costs: StepCosts, work: Work) -> float:
    """What one decode step takes with one request of mean context: no TPOT is met under it."""
    return costs.decode_ms(1, round(work.context_tokens))


def floor_ttft_ms(costs: StepCosts, rules: PrefillRules, lengths: Lengths, target: float) -> float:
    """The TTFT that `target` of the requests can meet with nothing ahead of them: alone in their passes, no wait."""
    alone_ms = sorted(alone_ttft_ms(costs, rules, prompt) for prompt in lengths.prompt_tokens)
    return alone_ms[max(0, math.ceil(target * len(alone_ms)) - 1)]


def alone_ttft_ms(costs: StepCosts, rules: PrefillRules, prompt_tokens: int) -> float:
    """Prefill of one prompt by itself: its chunks follow one another by a stage, the last goes through all."""
    if rules.batching is not Batching.CHUNKED or prompt_tokens <= rules.limit_tokens:
        return costs.prefill_ms(prompt_tokens, float(prompt_tokens * prompt_tokens))
    total_ms, offset = 0.0, 0
    while prompt_tokens - offset > rules.limit_tokens:
        end = offset + rules.limit_tokens
        total_ms += costs.stage_ms(rules.limit_tokens, float(end * end - offset * offset), 0, 0)
        offset = end
    rest = prompt_tokens - offset
    return total_ms + costs.prefill_ms(rest, float(prompt_tokens * prompt_tokens - offset * offset))
