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
    costs = instance.costs
    fixed_ms = costs.stage_ms(0, 0.0, 0, 0)
    token_ms = costs.stage_ms(1, 0.0, 0, 0) - fixed_ms
    square_ms = costs.prefill_square_ms / costs.stages
    request_ms = token_ms * work.prompt_tokens + square_ms * work.prompt_squares + fixed_ms * work.passes
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
    return _batch_caps(instance, rules, work, tpot_ms if _tpot_binds(work, target) else math.inf, 0.0)


def colocated_caps(
    instance: Instance, rules: DecodeRules, work: Work, *, tpot_ms: float, target: float, mixed: bool
) -> list[Cap]:
    """Of one colocated worker, by each resource alone: prompts take their time out of the decode steps.

    `mixed`: chunks ride on the steps, else they run alone.
    """
    costs = instance.costs
    base_ms = costs.prefill_ms(0, 0.0)
    prompt_ms = (
        costs.prefill_ms(1, 0.0) - base_ms
    ) * work.prompt_tokens + costs.prefill_square_ms * work.prompt_squares
    if not mixed:
        prompt_ms += base_ms * work.passes
    caps = _batch_caps(instance, rules, work, tpot_ms if _tpot_binds(work, target) else math.inf, prompt_ms)
    if prompt_ms > 0:
        caps.append(Cap(1000.0 * costs.stages / prompt_ms, Resource.PREFILL_COMPUTE))
    return caps


def _tpot_binds(work: Work, target: float) -> bool:
    return target > MAJORITY and 1.0 - work.decoding_share < target


def _batch_caps(instance: Instance, rules: DecodeRules, work: Work, tpot_ms: float, prompt_ms: float) -> list[Cap]:
    """Little's law over the decode batch: rate = batch / (tokens a request * time a step), for the largest batch.

    A worker has a lane for each pipeline stage, each with a batch of its own. `prompt_ms` of prompt work comes with
    each request that ends.
    """
    if work.decode_tokens == 0:
        return [Cap(math.inf, Resource.DECODE_STEP)]
    lanes = instance.costs.stages
    kv_tokens = instance.kv_blocks * instance.block_tokens
    if rules.max_batch_tokens:
        kv_tokens = min(kv_tokens, rules.max_batch_tokens * lanes)
    steps = _Steps(instance.costs, work, prompt_ms, rules.max_running / lanes)
    bounds = [
        (steps.batch_within(tpot_ms), Resource.DECODE_STEP),
        (kv_tokens / work.context_tokens / lanes, Resource.DECODE_KV),
        (rules.max_running / lanes, Resource.DECODE_SLOTS),
    ]
    return [Cap(lanes * steps.best_per_ms(batch) / work.decode_tokens * 1000.0, resource) for batch, resource in bounds]


@final
class _Steps:
    """The times in which each request of a lane gains one token, by the size of the batch."""

    def __init__(self, costs: StepCosts, work: Work, prompt_ms: float, most: float) -> None:
        self._most = most
        share_ms = prompt_ms / work.decode_tokens
        self._step_ms = [
            costs.decode_ms(size, round(size * work.context_tokens)) + share_ms * size
            for size in range(1, math.ceil(most) + 2)
        ]

    def at(self, batch: float) -> float:
        """Of a mean batch of 1 or more: linear between two sizes."""
        lower = math.floor(batch)
        below_ms = self._step_ms[lower - 1]
        return below_ms + (batch - lower) * (self._step_ms[lower] - below_ms)

    def batch_within(self, limit_ms: float) -> float:
        """The largest mean batch whose step is within a time, at most what may run; 0 where one request is too many."""
        largest = 0.0
        for size in range(1, math.ceil(self._most) + 1):
            step_ms, next_ms = self._step_ms[size - 1], self._step_ms[size]
            if step_ms <= limit_ms:
                largest = size + (min(1.0, (limit_ms - step_ms) / (next_ms - step_ms)) if next_ms > limit_ms else 0.0)
        return min(largest, self._most)

    def best_per_ms(self, batch: float) -> float:
        """The most tokens a ms of any mean batch up to `batch`: where a profile changes to its fit for large batches,
        more may be slower."""
        batch = min(batch, self._most)
        if batch < 1:
            return batch / self._step_ms[0]
        sizes: list[float] = [batch, *range(1, math.floor(batch) + 1)]
        return max(size / self.at(size) for size in sizes)


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
