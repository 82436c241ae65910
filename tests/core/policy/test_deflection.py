"""Deflection against the literal search, on random states and at the edges."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence

import pytest

from headrace_core.perf.costs import NEVER_LARGE, StepCosts
from headrace_core.policy import deflection
from headrace_core.policy.deflection import (
    DecodePath,
    Deflection,
    DeflectionSettings,
    PrefillPath,
    PrefillRule,
    Reason,
)

COSTS = StepCosts(
    prefill_base_ms=8.0,
    prefill_token_ms=0.08,
    prefill_square_ms=2e-6,
    decode_base_ms=12.0,
    decode_kv_token_ms=5e-5,
    decode_request_ms=0.05,
    large_decode_base_ms=14.0,
    large_decode_kv_token_ms=4e-5,
    large_decode_request_ms=0.04,
    large_decode_from=96,
    scheduler_ms=2.0,
    scheduler_token_ms=1e-4,
)
SETTINGS = DeflectionSettings()


def decode(
    *, requests: int = 8, kv: int = 8000, tbt: float = 100.0, deflecting: bool = False, cached: int = 0,
    budget: int = 4096, accepting: bool = True, costs: StepCosts = COSTS,
) -> DecodePath:  # fmt: skip
    """A decode worker with a few residents."""
    return DecodePath(
        requests=requests,
        kv_tokens=kv,
        strictest_tbt_ms=tbt,
        deflecting=deflecting,
        cached_tokens=cached,
        token_budget=budget,
        accepting=accepting,
        costs=costs,
    )


def prefill(
    *, queued: int = 20_000, queued_squares: float = 4e7, cached: int = 0, chunk: int = 2048, transfer: float = 50.0,
    link: float = 0.0, admission: float = 0.0, costs: StepCosts = COSTS,
) -> PrefillPath:  # fmt: skip
    """A prefill worker with a queue of about two seconds."""
    return PrefillPath(
        queued_tokens=queued,
        queued_squares=queued_squares,
        cached_tokens=cached,
        chunk_tokens=chunk,
        transfer_ms=transfer,
        link_queue_ms=link,
        admission_wait_ms=admission,
        costs=costs,
    )


def literal_decode(
    path: DecodePath, prompt: int, beta: float, class_tbt: float, ladder: Sequence[int]
) -> tuple[float, list[int]]:
    """K2 word by word: the time to the first token, and the chunks."""
    if path.deflecting or not path.accepting:
        return math.inf, []
    limit = beta * (class_tbt if math.isinf(path.strictest_tbt_ms) else path.strictest_tbt_ms)
    done = min(path.cached_tokens, prompt - 1)
    time, chunks = 0.0, []
    while done < prompt:
        for rung in ladder:
            chunk = min(rung, prompt - done, path.token_budget - path.requests)
            if chunk < 1:
                return math.inf, chunks
            squares = float((done + chunk) ** 2 - done**2)
            step = path.costs.mixed_ms(chunk, squares, path.requests, path.kv_tokens + done)
            if step <= limit:
                break
        else:
            return math.inf, chunks
        time += step
        done += chunk
        chunks.append(chunk)
    return time, chunks


def literal_prefill(path: PrefillPath, prompt: int, rule: PrefillRule) -> float:
    """K1 word by word, for one pipeline stage: pass after pass."""
    own = max(1, prompt - path.cached_tokens)
    offset = prompt - own
    costs = path.costs
    if rule is PrefillRule.KAIROS_EQ1:
        half = path.queued_tokens // 2
        step = costs.prefill_ms(path.chunk_tokens, float((half + path.chunk_tokens) ** 2 - half**2))
        time = path.queued_tokens / path.chunk_tokens * step
        while offset < prompt:
            chunk = min(path.chunk_tokens, prompt - offset)
            time += costs.prefill_ms(chunk, float((offset + chunk) ** 2 - offset**2))
            offset += chunk
        return time
    # the queue's squares lie evenly on its tokens: their sum is what counts
    ahead, per_token = path.queued_tokens, path.queued_squares / max(1, path.queued_tokens)
    time = 0.0
    while offset < prompt:
        first = min(ahead, path.chunk_tokens)
        chunk = min(path.chunk_tokens - first, prompt - offset)
        squares = first * per_token + float((offset + chunk) ** 2 - offset**2)
        time += costs.prefill_ms(first + chunk, squares)
        ahead -= first
        offset += chunk
    return time + path.transfer_ms + path.link_queue_ms + path.admission_wait_ms


def literal(
    path: PrefillPath, paths: list[DecodePath], prompt: int, slo: float, class_tbt: float, settings: DeflectionSettings
) -> int:
    """K3 word by word: the position of the decode worker, or -1."""
    times = [literal_decode(one, prompt, settings.beta, class_tbt, settings.ladder)[0] for one in paths]
    if not times or math.isinf(min(times)):
        return -1
    best = min(times)
    within = settings.alpha * deflection.prefill_ttft_ms(path, prompt, settings.rule)
    return times.index(best) if best <= within and best <= slo else -1


def random_costs(source: random.Random) -> StepCosts:
    """Costs of any plausible shape; some coefficients are zero."""

    def some(high: float) -> float:
        return source.choice((0.0, source.uniform(0, high), source.uniform(0, high), source.uniform(0, high)))

    return StepCosts(
        prefill_base_ms=some(20),
        prefill_token_ms=source.uniform(0.005, 0.2),
        prefill_square_ms=some(1e-5),
        decode_base_ms=some(20),
        decode_kv_token_ms=some(2e-4),
        decode_request_ms=some(0.1),
        large_decode_base_ms=some(20),
        large_decode_kv_token_ms=some(2e-4),
        large_decode_request_ms=some(0.1),
        large_decode_from=source.choice((NEVER_LARGE, 16, 96)),
        stages=source.choice((1, 1, 2, 4)),
        hop_ms=some(1),
        scheduler_ms=some(3),
        scheduler_token_ms=some(2e-4),
    )


def random_decode(source: random.Random, costs: StepCosts) -> DecodePath:
    """A decode worker in any state, with limits that often fall inside the ladder."""
    requests = source.choice((0, 0, 1, source.randrange(200)))
    kv = requests + (source.randrange(requests * 2000) if requests else 0)
    return decode(
        requests=requests,
        kv=kv,
        tbt=source.choice((math.inf, source.uniform(5, 60), source.uniform(20, 300))) if requests else math.inf,
        deflecting=source.random() < 0.15,
        cached=source.choice((0, 0, source.randrange(4000))),
        budget=source.choice((64, 512, 2048, 8192)),
        accepting=source.random() < 0.85,
        costs=costs,
    )


Case = tuple[PrefillPath, list[DecodePath], int, float, float, DeflectionSettings]


def random_case(source: random.Random) -> Case:
    """A whole decision. Costs are shared, and some workers are alike, so that ties happen."""
    costs = random_costs(source)
    paths = [random_decode(source, costs) for _ in range(source.choice((0, 1, 2, 3, 4)))]
    if paths and source.random() < 0.3:
        paths += [copy.copy(paths[0]), random_decode(source, random_costs(source))]
    prompt = source.choice((1, source.randrange(1, 300), source.randrange(1, 3000), source.randrange(1, 9000)))
    queued = source.choice((0, source.randrange(1, 20_000)))
    return (
        prefill(queued=queued, queued_squares=queued * source.uniform(1, 4000), transfer=source.uniform(0, 100),
                cached=source.choice((0, source.randrange(4000))), chunk=source.choice((256, 512, 2048)), costs=costs),
        paths,
        prompt,
        source.choice((math.inf, source.uniform(50, 3000))),
        source.choice((math.inf, source.uniform(10, 200))),
        DeflectionSettings(
            rule=source.choice(list(PrefillRule)),
            alpha=source.uniform(0.5, 2),
            beta=source.choice((1.0, 0.8)),
            ladder=source.choice((deflection.CHUNK_LADDER, (1000, 300, 7), (64,), (4096, 4095, 128, 127))),
        ),
    )  # fmt: skip


def decide(case: Case) -> Deflection:
    """The decision of the policy."""
    path, paths, prompt, slo, class_tbt, settings = case
    return deflection.decide(path, paths, prompt, slo_ttft_ms=slo, class_tbt_ms=class_tbt, settings=settings)


@pytest.mark.parametrize("part", range(4))
def test_it_decides_as_the_literal_search(part: int) -> None:
    """100,000 states in four parts."""
    source = random.Random(part)
    chosen = 0
    for _ in range(25_000):
        case = random_case(source)
        decision = decide(case)
        assert decision.index == literal(*case), case
        chosen += decision.index >= 0
    assert chosen > 5000, "the states say too little"
