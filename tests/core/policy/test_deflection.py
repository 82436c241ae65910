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
    time, chunks = 0.0, list[int]()
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


Case = tuple[PrefillPath, list[DecodePath], int, float, float, DeflectionSettings]


def literal(case: Case) -> int:
    """K3 word by word: the position of the decode worker, or -1."""
    path, paths, prompt, slo, class_tbt, settings = case
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


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_it_decides_as_the_literal_search(part: int) -> None:
    """100,000 states in four parts."""
    source = random.Random(part)
    chosen = 0
    for _ in range(25_000):
        case = random_case(source)
        decision = decide(case)
        assert decision.index == literal(case), case
        chosen += decision.index >= 0
    assert chosen > 5000, "the states say too little"


@pytest.mark.parametrize("rule", PrefillRule)
def test_the_prefill_path_is_the_literal_sum_over_passes(rule: PrefillRule) -> None:
    source = random.Random(rule.value)
    for _ in range(5000):
        path, _, prompt, *_ = random_case(source)
        path.costs.stages = 1
        expected = literal_prefill(path, prompt, rule)
        assert deflection.prefill_ttft_ms(path, prompt, rule) == pytest.approx(expected, rel=1e-9)


def test_passes_follow_one_another_by_a_stage() -> None:
    """Four equal passes on two stages of a pipeline, with a cost that the square does not make unequal."""
    costs = copy.copy(COSTS)
    costs.stages, costs.hop_ms, costs.prefill_square_ms = 2, 1.0, 0.0
    path = prefill(queued=3 * 2048, queued_squares=0.0, transfer=0.0, costs=costs)
    stage = costs.stage_ms(2048, 0.0, 0, 0)
    expected = 3 * stage + costs.prefill_ms(2048, 0.0)
    assert deflection.prefill_ttft_ms(path, 2048, PrefillRule.OURS) == pytest.approx(expected, rel=1e-12)


def test_each_part_of_the_prefill_path_counts_and_the_printed_rule_leaves_two_out() -> None:
    plain = prefill(queued=0, queued_squares=0.0, transfer=0.0)
    later = prefill(queued=0, queued_squares=0.0, transfer=5.0, link=7.0, admission=11.0)
    ours, printed = (
        deflection.prefill_ttft_ms(later, 1000, rule) - deflection.prefill_ttft_ms(plain, 1000, rule)
        for rule in (PrefillRule.OURS, PrefillRule.KAIROS_EQ1)
    )
    assert ours == pytest.approx(23.0)
    assert printed == 0.0


def test_the_chunks_shrink_as_the_prompt_grows() -> None:
    """Limits at which one rung after the other stops being safe; the sum is that of the literal steps."""
    costs = copy.copy(COSTS)
    costs.prefill_square_ms = 2e-5
    path = decode(tbt=130.0, costs=costs)
    time, chunks = literal_decode(path, 16_000, 1.0, math.inf, deflection.CHUNK_LADDER)
    assert sorted(set(chunks[:-1]), reverse=True) == [1024, 512, 256, 128]
    assert deflection.decode_ttft_ms(path, 16_000, 1.0, math.inf) == pytest.approx(time, rel=1e-12)
    assert deflection.summed_ttft_ms(path, 16_000, 1.0, math.inf) == time


IDLE = decode(requests=0, kv=0, tbt=math.inf)
DECODE_EDGES: dict[str, tuple[DecodePath, int, float, float]] = {
    "one token": (IDLE, 1, 100.0, COSTS.prefill_ms(1, 1.0)),
    "a prompt over the largest chunk": (
        IDLE,
        2049,
        math.inf,
        COSTS.prefill_ms(2048, 2048.0**2) + COSTS.prefill_ms(1, 2049.0**2 - 2048.0**2),
    ),
    "the whole prompt is cached: its last token is computed": (
        decode(requests=0, kv=0, tbt=math.inf, cached=600),
        600,
        100.0,
        COSTS.prefill_ms(1, 600.0**2 - 599.0**2),
    ),
    "no resident: the arriving class counts": (IDLE, 4096, 10.0, math.inf),
    "no chunk is safe": (decode(tbt=15.0), 4096, 100.0, math.inf),
    "a deflected prompt is there": (decode(deflecting=True), 4096, 100.0, math.inf),
    "it does not accept": (decode(accepting=False), 4096, 100.0, math.inf),
    "residents use up the budget": (decode(budget=8), 4096, 100.0, math.inf),
}


@pytest.mark.parametrize("case", DECODE_EDGES)
def test_edges_of_the_decode_path(case: str) -> None:
    path, prompt, class_tbt, expected = DECODE_EDGES[case]
    assert deflection.decode_ttft_ms(path, prompt, 1.0, class_tbt) == pytest.approx(expected, rel=1e-12)
    assert deflection.summed_ttft_ms(path, prompt, 1.0, class_tbt) == pytest.approx(expected, rel=1e-12)


BUSY, QUIET = prefill(queued=40_000), prefill(queued=0, queued_squares=0.0, transfer=0.0)
CASES: dict[str, tuple[PrefillPath, list[DecodePath], float, int, Reason]] = {
    "no decode worker": (BUSY, [], math.inf, -1, Reason.NONE_ELIGIBLE),
    "all have a deflected prompt": (BUSY, [decode(deflecting=True)] * 2, math.inf, -1, Reason.NONE_ELIGIBLE),
    "none has a safe chunk": (BUSY, [decode(tbt=1.0)], math.inf, -1, Reason.PREFILL_IS_FASTER),
    "the prefill pool is idle": (QUIET, [decode()], math.inf, -1, Reason.PREFILL_IS_FASTER),
    "the prefill pool is busy": (BUSY, [decode(kv=90_000), decode()], math.inf, 1, Reason.DECODE_IS_FASTER),
    "equal loads: the first": (BUSY, [decode(tbt=1.0), decode(), decode()], math.inf, 1, Reason.DECODE_IS_FASTER),
    "equal times, other limits: the first": (
        BUSY,
        [decode(tbt=401.0), decode(tbt=400.0)],
        math.inf,
        0,
        Reason.DECODE_IS_FASTER,
    ),
    "no path meets the SLO": (BUSY, [decode()], 200.0, -1, Reason.OVER_SLO),
    "a prefix that is cached there wins": (BUSY, [decode(), decode(cached=2000)], math.inf, 1, Reason.DECODE_IS_FASTER),
}


@pytest.mark.parametrize("case", CASES)
def test_the_decision(case: str) -> None:
    path, paths, slo, index, reason = CASES[case]
    before = repr((path, paths))
    decision = decide((path, paths, 4000, slo, 100.0, SETTINGS))
    assert (decision.index, decision.reason) == (index, reason)
    assert repr((path, paths)) == before, "a policy does not change its view"
    if index >= 0:
        assert decision.decode_ms == pytest.approx(deflection.summed_ttft_ms(paths[index], 4000, 1.0, 100.0), rel=1e-12)
    assert f"{decision.prefill_ms:.1f} ms" in deflection.explain(decision, paths, 4000, slo, SETTINGS)


def test_at_the_very_limit_the_steps_are_summed() -> None:
    """The SLO is the literal sum, or the next float under it: only the sum itself can tell the two apart."""
    source = random.Random(9)
    seen = 0
    while seen < 2000:
        path, paths, prompt, _, class_tbt, settings = random_case(source)
        times = [literal_decode(one, prompt, settings.beta, class_tbt, settings.ladder)[0] for one in paths]
        best = min(times, default=math.inf)
        if math.isinf(best) or best > settings.alpha * deflection.prefill_ttft_ms(path, prompt, settings.rule):
            continue
        seen += 1
        assert decide((path, paths, prompt, best, class_tbt, settings)).index == times.index(best)
        below = math.nextafter(best, 0.0)
        assert decide((path, paths, prompt, below, class_tbt, settings)).index == -1


BAD_SETTINGS = {
    "alpha": {"alpha": 0.0},
    "beta": {"beta": -1.0},
    "ladder": {"ladder": (128, 256)},
    "chunk sizes": {"ladder": ()},
    "in tokens": {"ladder": (128, 0)},
}


@pytest.mark.parametrize("said", BAD_SETTINGS)
def test_bad_settings_name_the_field(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DeflectionSettings(**BAD_SETTINGS[said])  # type: ignore[arg-type]
