"""How long synthetic requests are: fixed, drawn from a table or a fitted log-normal; TetriInfer's five classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from statistics import NormalDist
from typing import Final, final

from headrace_core.policy.dispatch import HEAVY_DECODE_TOKENS
from headrace_core.sim.workload import WorkloadError

HEAVY_PREFILL_TOKENS: Final = 512
"""A prompt of more tokens is heavy (TetriInfer, section 5.1)."""


class LengthClass(StrEnum):
    """TetriInfer's workloads (section 5.1): heavy or light prefill (P) with heavy or light decode (D)."""

    LPLD = "LPLD"
    LPHD = "LPHD"
    HPLD = "HPLD"
    HPHD = "HPHD"
    MIXED = "Mixed"
    """All of the table, as it comes."""


@final
@dataclass(slots=True)
class Lengths:
    """Pairs of prompt and output tokens, one list a column."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    source: str
    """Where they come from, in words."""

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.prompt_tokens)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Prompt and output tokens whose logarithms are jointly normal, cut at the longest seen."""

    prompt_mean: float
    """Mean of ln(prompt tokens)."""
    prompt_deviation: float
    output_mean: float
    """Mean of ln(output tokens)."""
    output_deviation: float
    correlation: float
    """Of the two logarithms, -1 to 1."""
    most_prompt_tokens: int
    most_output_tokens: int
    source: str


def fixed(prompt_tokens: int, output_tokens: int) -> Lengths:
    """A table of one pair: every request is alike.

    Raises:
        WorkloadError: a length is under 1.
    """
    for name, tokens in (("prompt tokens", prompt_tokens), ("output tokens", output_tokens)):
        if tokens < 1:
            raise WorkloadError(f"{name}: {tokens}; each request needs at least 1 token")
    return Lengths([prompt_tokens], [output_tokens], f"{prompt_tokens} prompt + {output_tokens} output tokens")


def only(table: Lengths, wanted: LengthClass) -> Lengths:
    """The pairs of a class.

    Raises:
        WorkloadError: the table has none.
    """
    if wanted is LengthClass.MIXED:
        return table
    heavy_prefill = wanted is LengthClass.HPLD or wanted is LengthClass.HPHD
    heavy_decode = wanted is LengthClass.LPHD or wanted is LengthClass.HPHD
    rows = [
        row
        for row in range(len(table))
        if (table.prompt_tokens[row] > HEAVY_PREFILL_TOKENS) is heavy_prefill
        and (table.output_tokens[row] > HEAVY_DECODE_TOKENS) is heavy_decode
    ]
    if not rows:
        raise WorkloadError(f"length class: no pair of {table.source} is {wanted.value}; take another class or table")
    return _rows(table, rows, f"{wanted.value} of {table.source}")


def draw(table: Lengths, count: int, randomness: Random, stratified: bool) -> Lengths:
    """`count` pairs from a table, with replacement, in random order.

    Args:
        table: the pairs to draw from.
        count: the number of pairs.
        randomness: where the choices come from.
        stratified: each of `count` equal slices of the ordered table gives one pair, so a sample's mean work stays near
            the table's (ours). Without it the draws are independent.

    Raises:
        WorkloadError: the table is empty or `count` is under 1.
    """
    size = len(table)
    if size == 0:
        raise WorkloadError(f"lengths: {table.source} holds no pair; give at least one")
    _check_count(count)
    if not stratified:
        return _rows(table, [randomness.randrange(size) for _ in range(count)], table.source)
    order = _serpentine(table)
    rows = [order[min(size - 1, int((number + randomness.random()) * size / count))] for number in range(count)]
    randomness.shuffle(rows)
    return _rows(table, rows, table.source)


def fit(table: Lengths) -> LogNormal:
    """The log-normal of a table: moments of the logarithms.

    Raises:
        WorkloadError: the table has fewer than two pairs.
    """
    if len(table) < 2:  # noqa: PLR2004 - a deviation takes two
        raise WorkloadError(f"lengths: a fit needs at least two pairs, {table.source} has {len(table)}")
    prompts = [math.log(tokens) for tokens in table.prompt_tokens]
    outputs = [math.log(tokens) for tokens in table.output_tokens]
    prompt_mean, output_mean = math.fsum(prompts) / len(prompts), math.fsum(outputs) / len(outputs)
    prompt_variance = math.fsum((value - prompt_mean) ** 2 for value in prompts) / len(prompts)
    output_variance = math.fsum((value - output_mean) ** 2 for value in outputs) / len(outputs)
    both = math.fsum((prompts[row] - prompt_mean) * (outputs[row] - output_mean) for row in range(len(prompts)))
    scale = math.sqrt(prompt_variance * output_variance)
    return LogNormal(
        prompt_mean=prompt_mean,
        prompt_deviation=math.sqrt(prompt_variance),
        output_mean=output_mean,
        output_deviation=math.sqrt(output_variance),
        correlation=max(-1.0, min(1.0, both / len(prompts) / scale)) if scale > 0 else 0.0,
        most_prompt_tokens=max(table.prompt_tokens),
        most_output_tokens=max(table.output_tokens),
        source=f"log-normal fit of {table.source}",
    )


def draw_log_normal(law: LogNormal, count: int, randomness: Random, stratified: bool) -> Lengths:
    """`count` pairs from a log-normal.

    Args:
        law: the log-normal.
        count: the number of pairs.
        randomness: where they come from.
        stratified: a Latin hypercube: each of the two normals is drawn once in each of `count` equal slices of its
            probability, and the two orders are shuffled apart. Without it the draws are independent.

    Raises:
        WorkloadError: `count` is under 1.
    """
    _check_count(count)
    own = _normals(count, randomness, stratified)
    other = _normals(count, randomness, stratified)
    rest = math.sqrt(max(0.0, 1.0 - law.correlation * law.correlation))
    prompts: list[int] = []
    outputs: list[int] = []
    for row in range(count):
        prompt = math.exp(law.prompt_mean + law.prompt_deviation * own[row])
        output = math.exp(law.output_mean + law.output_deviation * (law.correlation * own[row] + rest * other[row]))
        prompts.append(max(1, min(law.most_prompt_tokens, round(prompt))))
        outputs.append(max(1, min(law.most_output_tokens, round(output))))
    return Lengths(prompts, outputs, law.source)


def _normals(count: int, randomness: Random, stratified: bool) -> list[float]:
    normal = NormalDist()
    if stratified:
        shares = [(number + randomness.random()) / count for number in range(count)]
        randomness.shuffle(shares)
    else:
        shares = [randomness.random() for _ in range(count)]
    # A share of exactly 0 has no normal quantile; the smallest that random() gives beside it is 2**-53.
    return [normal.inv_cdf(max(share, 2.0**-53)) for share in shares]


def _serpentine(table: Lengths) -> list[int]:
    """Rows in bands of the output length, and to and fro by the prompt length inside the bands.

    Neighbours are alike in both lengths, so equal slices of this order are strata of both.
    """
    by_output = sorted(range(len(table)), key=lambda row: (table.output_tokens[row], table.prompt_tokens[row], row))
    bands = max(1, math.isqrt(len(table)))
    order: list[int] = []
    for band in range(bands):
        rows = by_output[band * len(by_output) // bands : (band + 1) * len(by_output) // bands]
        rows.sort(key=lambda row: (table.prompt_tokens[row], table.output_tokens[row], row), reverse=band % 2 == 1)
        order.extend(rows)
    return order


def _rows(table: Lengths, rows: list[int], source: str) -> Lengths:
    return Lengths([table.prompt_tokens[row] for row in rows], [table.output_tokens[row] for row in rows], source)


def _check_count(count: int) -> None:
    if count < 1:
        raise WorkloadError(f"requests: {count} leaves nothing to simulate; give at least 1")
