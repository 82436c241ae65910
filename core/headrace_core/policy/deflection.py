"""Decides whether a prompt is computed on a decode worker instead of waiting for a prefill worker (K1-K3, K5).

Source: Kairos (arXiv 2607.02043): the two times to the first token, the greedy search for chunks that keep the
residents within their SLO, and the comparison. Ours are the prefill path with its transfer and its wait for admission,
prefix-cache hits on both paths, and the search in closed form, which takes the decisions of the literal one.

The closed form: on one rung of the ladder a step's time grows evenly with what is done, so the offset up to which the
rung is safe is one division, put right by the step's own time, and the times of the steps on it are a series. Sums in
closed form differ from sums of steps in the last bits: where 1e-9 would decide, the steps are summed up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from headrace_core.perf.costs import StepCosts, squares

CHUNK_LADDER: Final = (2048, 1024, 512, 256, 128)
"""Tokens of a deflected chunk, tried from the largest (Kairos)."""
ALPHA: Final = 1.0
"""Deflect when the decode path takes at most this share of the prefill path."""
ALPHA_KAIROS: Final = 1.3
"""The paper's alpha, for its own prefill path: it stands in for the transfer, which that path leaves out."""
_CLOSE: Final = 1e-9


class PrefillRule(StrEnum):
    """How the prefill path is estimated."""

    OURS = "Ours"
    """Queue ahead, own chunks, transfer and wait for admission."""
    KAIROS_EQ1 = "KairosEq1"
    """The paper's equation 1 as printed: no transfer and no admission."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeflectionSettings:
    """What an operator may set. Raises ValueError for a share that is not positive or a ladder that does not fall."""

    rule: PrefillRule = PrefillRule.OURS
    alpha: float = ALPHA
    beta: float = 1.0
    """Share of the residents' TBT SLO that a step with a chunk may take."""
    ladder: tuple[int, ...] = CHUNK_LADDER

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and self.beta > 0):
            raise ValueError(f"alpha is {self.alpha} and beta {self.beta}: both must be above 0")
        falls = all(self.ladder[i] > self.ladder[i + 1] for i in range(len(self.ladder) - 1))
        if not self.ladder or not falls or self.ladder[-1] < 1:
            raise ValueError(f"ladder is {self.ladder}: give chunk sizes in tokens, the largest first")


@final
@dataclass(slots=True, kw_only=True)
class DecodePath:
    """A decode worker as last reported, for one prompt."""

    requests: int
    """Residents in the batch; the estimate keeps them fixed."""
    kv_tokens: int
    """Sum of their contexts, the token computed in the step included."""
    strictest_tbt_ms: float
    """The lowest time-between-tokens SLO of the residents; infinite when there is none."""
    deflecting: bool
    """Whether a deflected prompt runs or waits there."""
    cached_tokens: int
    """Tokens of the prompt in its prefix cache."""
    token_budget: int
    """Tokens of one step of its engine, one for each resident included."""
    accepting: bool
    """Whether it takes requests and has KV for this prompt."""
    costs: StepCosts


@final
@dataclass(slots=True, kw_only=True)
class PrefillPath:
    """The prefill worker that would take the prompt, and what comes after it."""

    queued_tokens: int
    """Prompt tokens to compute ahead of this one, those in the running pass included."""
    queued_squares: float
    """Their share of t2, see `perf.costs.squares`."""
    cached_tokens: int
    """Tokens of the prompt in its prefix cache."""
    chunk_tokens: int
    """Tokens of one pass, at least 1."""
    transfer_ms: float
    """The KV's bytes over the measured bandwidth."""
    link_queue_ms: float
    """Wait for the transfers ahead on the link."""
    admission_wait_ms: float
    """Wait for room in the decode worker's batch."""
    costs: StepCosts


class Reason(StrEnum):
    """Why a prompt is deflected (the first) or not."""

    DECODE_IS_FASTER = "DecodeIsFaster"
    PREFILL_IS_FASTER = "PrefillIsFaster"
    """No decode worker has it within alpha times the prefill path."""
    OVER_SLO = "OverSlo"
    """The prefill path misses the TTFT SLO too, but no decode worker meets it."""
    NONE_ELIGIBLE = "NoneEligible"
    """Every decode worker is closed, or has a deflected prompt already."""


@final
@dataclass(slots=True)
class Deflection:
    """The decision: the decode worker's position in the list, -1 for the prefill path, and the estimates."""

    reason: Reason
    index: int
    prefill_ms: float
    """Time to the first token on the prefill path."""
    decode_ms: float
    """The same on the chosen decode worker; infinite where none is chosen."""


def prefill_ttft_ms(path: PrefillPath, prompt_tokens: int, rule: PrefillRule) -> float:
    """Time to the first token on the prefill path, in ms, by either rule (K1)."""
    own = max(1, prompt_tokens - path.cached_tokens)  # a whole hit computes its last token all the same
    own_squares = squares(prompt_tokens - own, own)
    if rule is PrefillRule.KAIROS_EQ1:
        chunk = path.chunk_tokens
        pass_ms = path.costs.prefill_ms(chunk, squares(path.queued_tokens // 2, chunk))
        queue_ms = path.queued_tokens / chunk * pass_ms
        return queue_ms + _passes_ms(path, own, own_squares)
    compute_ms = _passes_ms(path, path.queued_tokens + own, path.queued_squares + own_squares)
    return compute_ms + path.transfer_ms + path.link_queue_ms + path.admission_wait_ms


def _passes_ms(path: PrefillPath, tokens: int, all_squares: float) -> float:
    """Time of a stream of tokens in chunks: passes follow one another by a stage, and the last goes through them all.

    A pass costs evenly, so the sum needs the totals only; of the last pass among several stages no more is known than
    that it is one of them, and it is taken for a mean one.
    """
    costs = path.costs
    passes = (tokens + path.chunk_tokens - 1) // path.chunk_tokens
    whole_ms = (passes - 1) * costs.prefill_ms(0, 0.0) + costs.prefill_ms(tokens, all_squares)
    if costs.stages == 1:
        return whole_ms
    scheduler_ms = passes * costs.scheduler_ms + costs.scheduler_token_ms * tokens
    work_ms = whole_ms - scheduler_ms
    return scheduler_ms + work_ms / costs.stages + work_ms / passes * (1 - 1 / costs.stages)


def decode_ttft_ms(
    path: DecodePath, prompt_tokens: int, beta: float, class_tbt_ms: float, ladder: tuple[int, ...] = CHUNK_LADDER
) -> float:
    """Time to the first token on a decode worker, in ms; infinite where it is not eligible (K2).

    Each step takes the largest chunk of the ladder, cut to what is left and to the engine's budget, with which the
    step stays within beta times the strictest TBT SLO of the residents, or of the arriving class where there is none.
    A step is timed at the residents' KV and what is done of the prompt, and for the residents that are there at first.
    """
    room = path.token_budget - path.requests
    if not path.accepting or path.deflecting or room < 1:
        return math.inf
    limit_ms = _limit_ms(path, beta, class_tbt_ms)
    done = min(path.cached_tokens, prompt_tokens - 1)
    left = prompt_tokens - done
    total_ms = 0.0
    # Chunks of this size and more are not safe any more, or would be cut to what is left.
    upper = min(ladder[0], room)
    for rung in ladder:
        chunk = min(rung, room)
        if left > upper:
            steps = _safe_steps(path, chunk, done, (left - upper + chunk - 1) // chunk, limit_ms)
            if steps > 0:
                first_ms = _step_ms(path, chunk, done)
                total_ms += steps * (first_ms + _step_ms(path, chunk, done + (steps - 1) * chunk)) / 2
                done += steps * chunk
                left -= steps * chunk
        while left <= upper:
            step_ms = _step_ms(path, left, done)
            if step_ms <= limit_ms:
                return total_ms + step_ms
            if left <= chunk:
                break
            step_ms = _step_ms(path, chunk, done)
            if step_ms > limit_ms:
                break
            total_ms += step_ms
            done += chunk
            left -= chunk
        upper = chunk
    return math.inf


def _limit_ms(path: DecodePath, beta: float, class_tbt_ms: float) -> float:
    return beta * (path.strictest_tbt_ms if path.strictest_tbt_ms < math.inf else class_tbt_ms)


def _step_ms(path: DecodePath, chunk: int, done: int) -> float:
    return path.costs.mixed_ms(chunk, squares(done, chunk), path.requests, path.kv_tokens + done)


def _safe_steps(path: DecodePath, chunk: int, done: int, most: int, limit_ms: float) -> int:
    """How many of `most` steps of one chunk size stay within the limit; later steps never cost less."""
    first_ms = _step_ms(path, chunk, done)
    if first_ms > limit_ms:
        return 0
    if most == 1 or _step_ms(path, chunk, done + (most - 1) * chunk) <= limit_ms:
        return most
    # step `safe` is within the limit, step `unsafe` is not; the growth says where to look first
    safe, unsafe = 0, most - 1
    growth_ms = _step_ms(path, chunk, done + chunk) - first_ms
    guess = int((limit_ms - first_ms) / growth_ms) if growth_ms > 0 else unsafe
    while unsafe - safe > 1:
        guess = min(max(guess, safe + 1), unsafe - 1)
        if _step_ms(path, chunk, done + guess * chunk) <= limit_ms:
            safe = guess
            guess = guess + 1
        else:
            unsafe = guess
            guess = guess - 1
    return safe + 1


def decide(
    prefill: PrefillPath,
    decodes: list[DecodePath],
    prompt_tokens: int,
    *,
    slo_ttft_ms: float,
    class_tbt_ms: float,
    settings: DeflectionSettings,
) -> Deflection:
    """Choose between the prefill path and the decode workers for a prompt (K3).

    It is deflected to the decode worker with the shortest time to the first token, the first in the list among equals,
    when that is at most alpha times the prefill path's and at most the TTFT SLO.
    """
    prefill_ms = prefill_ttft_ms(prefill, prompt_tokens, settings.rule)
    within_ms = settings.alpha * prefill_ms
    cap_ms = min(within_ms, slo_ttft_ms)
    beta, ladder = settings.beta, settings.ladder
    best = -1
    best_ms = math.inf
    closed = True
    for index, path in enumerate(decodes):
        if not path.accepting or path.deflecting:
            continue
        closed = False
        if best >= 0 and _same(path, decodes[best]):
            continue
        worth_ms = min(cap_ms, best_ms) * (1 + _CLOSE)
        if _least_ms(path, prompt_tokens, ladder[0]) > worth_ms:
            continue
        ttft_ms = decode_ttft_ms(path, prompt_tokens, beta, class_tbt_ms, ladder)
        if ttft_ms == math.inf or ttft_ms > worth_ms:
            continue
        if ttft_ms > worth_ms * (1 - 2 * _CLOSE):
            summed_ms = summed_ttft_ms(path, prompt_tokens, beta, class_tbt_ms, ladder)
            if summed_ms > cap_ms:
                continue
            if best >= 0 and summed_ms >= summed_ttft_ms(decodes[best], prompt_tokens, beta, class_tbt_ms, ladder):
                continue
        best, best_ms = index, ttft_ms
    if best >= 0:
        return Deflection(Reason.DECODE_IS_FASTER, best, prefill_ms, best_ms)
    if closed:
        return Deflection(Reason.NONE_ELIGIBLE, -1, prefill_ms, math.inf)
    return Deflection(
        Reason.PREFILL_IS_FASTER if within_ms <= slo_ttft_ms else Reason.OVER_SLO, -1, prefill_ms, math.inf
    )


def _least_ms(path: DecodePath, prompt_tokens: int, chunk: int) -> float:
    """No search does better than this: as few steps as the largest chunk allows, with none of the KV they add."""
    done = min(path.cached_tokens, prompt_tokens - 1)
    left = prompt_tokens - done
    kv_tokens = path.kv_tokens + done
    more_steps = (left - 1) // chunk
    work_ms = path.costs.mixed_ms(left, squares(done, left), path.requests, kv_tokens)
    return work_ms + more_steps * path.costs.mixed_ms(0, 0.0, path.requests, kv_tokens)


def _same(one: DecodePath, other: DecodePath) -> bool:
    """Whether two open workers look alike in all that the search reads, as idle ones do: no need to time both."""
    return (
        one.requests == other.requests
        and one.kv_tokens == other.kv_tokens
        and one.strictest_tbt_ms == other.strictest_tbt_ms
        and one.cached_tokens == other.cached_tokens
        and one.token_budget == other.token_budget
        and one.costs is other.costs
    )


def summed_ttft_ms(
    path: DecodePath, prompt_tokens: int, beta: float, class_tbt_ms: float, ladder: tuple[int, ...] = CHUNK_LADDER
) -> float:
    """`decode_ttft_ms` by the literal search, step by step: the paper's greedy algorithm, and the arbiter of ties."""
    room = path.token_budget - path.requests
    if not path.accepting or path.deflecting or room < 1:
        return math.inf
    limit_ms = _limit_ms(path, beta, class_tbt_ms)
    done = min(path.cached_tokens, prompt_tokens - 1)
    total_ms = 0.0
    while done < prompt_tokens:
        step_ms = math.inf
        chunk = 0
        for rung in ladder:
            chunk = min(rung, room, prompt_tokens - done)
            step_ms = _step_ms(path, chunk, done)
            if step_ms <= limit_ms:
                break
        if step_ms > limit_ms:
            return math.inf
        total_ms += step_ms
        done += chunk
    return total_ms


def explain(
    decision: Deflection,
    decodes: list[DecodePath],
    prompt_tokens: int,
    slo_ttft_ms: float,
    settings: DeflectionSettings,
) -> str:
    """The decision in words, for a log."""
    open_workers = sum(1 for path in decodes if path.accepting and not path.deflecting)
    prefill = f"prompt of {prompt_tokens} tokens: {decision.prefill_ms:.1f} ms to the first token on the prefill path"
    limits = f"alpha {settings.alpha:g}, TTFT SLO {slo_ttft_ms:g} ms"
    why = {
        Reason.DECODE_IS_FASTER: f"{decision.decode_ms:.1f} ms on decode worker {decision.index} of {len(decodes)}",
        Reason.PREFILL_IS_FASTER: f"none of {open_workers} open decode workers has it soon enough",
        Reason.OVER_SLO: f"over the SLO, and none of {open_workers} open decode workers meets it",
        Reason.NONE_ELIGIBLE: "no decode worker is open to a deflected prompt",
    }[decision.reason]
    return f"{prefill}, {why} ({limits})"
