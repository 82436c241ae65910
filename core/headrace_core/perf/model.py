"""Counts what a pass computes, reads and sends, and turns the counts into step times by an accelerator's datasheet.

The counts follow DistServe (OSDI 2024, appendix A), where work falls as one over the tensor degree, since only one side
of each matrix is cut. Grouped KV heads, latent attention, sliding windows, experts and all-reduce are ours. Each
operation takes as long as its arithmetic or its bytes need, whichever is more; the shares of the peaks that are really
reached are in `Efficiency`, and were set on Vidur's kernel timings (A100, H100), not on any whole step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from headrace_core.perf.accelerators import Accelerator
from headrace_core.perf.costs import NEVER_LARGE, StepCosts, squares
from headrace_core.perf.fit import Line, Residual, Step, fit_decode, fit_prefill
from headrace_core.perf.shape import (
    Dtype,
    ModelShape,
    check_degrees,
    dtype_bytes,
    layer_count,
    local_kv_heads,
    output_parameters,
)

_KERNELS: Final = 10
"""Of a layer beside attention: four products, two norms, rotation, activation, the write to the cache, a sum."""
_ATTENTION_KERNELS: Final = 3
_SOFTNESS: Final = 3
"""Arithmetic and reading overlap but for this: time^3 = arithmetic^3 + reading^3. Vidur's A100 products lie at 2 to 3,
its H100 ones at 3 to 5."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the datasheet's peaks that are reached, and fixed times."""

    matmul: float = 0.7
    """Of the arithmetic peak, by large products (Vidur: 0.65 to 0.8)."""
    grouped_matmul: float = 0.5
    """The same for experts, whose products are small and uneven (an assumption)."""
    attention: float = 0.4
    """By prefill attention (an assumption: FlashAttention-2, arXiv 2307.08691, shows 0.5 to 0.7 for long prompts; the
    kernels that DistServe and Vidur timed reached 0.1 to 0.3)."""
    memory: float = 0.82
    """Of the memory bandwidth, by reading weights (Vidur: 0.75 to 0.9)."""
    kv_memory: float = 0.65
    """By decode attention (Vidur: 0.6 to 0.75 for large batches)."""
    elementwise: float = 0.55
    """By norms, activations and sums (Vidur)."""
    link: float = 0.6
    """Of the bandwidth between GPUs, by all-reduce (Vidur: 0.55 on A100, 0.6 to 0.8 on H100)."""
    kernel_ms: float = 0.004
    """Each kernel, whatever it does (Vidur's smallest take this long)."""
    all_reduce_ms: float = 0.015
    """Each all-reduce, whatever its size."""
    hop_ms: float = 0.05
    """From one pipeline stage to the next."""
    scheduler_ms: float = 1.0
    """The engine's own work between two steps (an assumption; `--calibrate` replaces it all)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model on accelerators."""

    shape: ModelShape
    accelerator: Accelerator
    tensor: int = 1
    pipeline: int = 1
    gpus_per_node: int = 8
    """A tensor group larger than this reduces over the network, and stages beyond it hop over it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Step times that nobody measured, and how well their linear form follows what was counted."""

    costs: StepCosts
    prefill: Residual
    """Of the linear form against the counts: says nothing of the counts against a real GPU."""
    decode: Residual


@functools.lru_cache(maxsize=4096)
def estimate(placement: Placement, efficiency: Efficiency | None = None) -> Estimate:
    """The coefficients that follow from counts and datasheet.

    They are fitted as measured ones are, to counted passes: prompts and chunks of 128 to 8192 tokens, some behind up to
    16384 computed ones; batches of 1 to 512 with contexts of 256 to 8192.

    Raises:
        PerfError: degrees that no engine runs.
    """
    check_degrees(placement.shape, placement.tensor, placement.pipeline)
    efficiency = efficiency or Efficiency()
    prefill = fit_prefill(
        [
            Step(
                measured_ms=prefill_pass_ms(placement, [piece] * pieces, efficiency),
                tokens=piece[1] * pieces,
                squares=squares(piece[0], piece[1]) * pieces,
            )
            for piece, pieces in _PREFILL_GRID
        ]
    )
    small, large, large_from = _fit_decode_in_two(placement, efficiency)
    costs = StepCosts(
        prefill_base_ms=prefill.base_ms,
        prefill_token_ms=prefill.first_ms,
        prefill_square_ms=prefill.second_ms,
        decode_base_ms=small.base_ms,
        decode_kv_token_ms=small.first_ms,
        decode_request_ms=small.second_ms,
        large_decode_base_ms=large.base_ms,
        large_decode_kv_token_ms=large.first_ms,
        large_decode_request_ms=large.second_ms,
        large_decode_from=large_from,
        stages=placement.pipeline,
        hop_ms=efficiency.hop_ms if placement.pipeline > 1 else 0.0,
        scheduler_ms=efficiency.scheduler_ms,
    )
    return Estimate(costs=costs, prefill=prefill.residual, decode=_joined(small.residual, large.residual))


def prefill_pass_ms(placement: Placement, pieces: Sequence[tuple[int, int]], efficiency: Efficiency) -> float:
    """One prefill pass over all stages, without hops and scheduler. `pieces`: (tokens computed before, tokens)."""
    shape, tensor = placement.shape, placement.tensor
    tokens = sum(piece[1] for piece in pieces)
    window = shape.window
    windowed = window.layers if window else 0
    attention = (shape.layers - windowed) * _prefill_attention_ms(placement, pieces, 0, efficiency)
    if window:
        attention += windowed * _prefill_attention_ms(placement, pieces, window.tokens, efficiency)
    if shape.latent:
        # The cached vectors of earlier chunks are expanded to keys and values once more.
        expand = 2 * shape.latent.kv_rank * (shape.latent.nope_dim + shape.latent.value_dim) * shape.heads / tensor
        earlier = sum(piece[0] for piece in pieces)
        attention += shape.layers * earlier * expand / (placement.accelerator.flops_per_ms * efficiency.matmul)
    return attention + _layers_ms(placement, tokens, efficiency) + _output_ms(placement, len(pieces), efficiency)


def decode_pass_ms(placement: Placement, requests: int, context_tokens: int, efficiency: Efficiency) -> float:
    """One decode step over all stages, hops included, without scheduler; each request has `context_tokens`."""
    shape = placement.shape
    window = shape.window
    windowed = window.layers if window else 0
    attention = (shape.layers - windowed) * _decode_attention_ms(placement, requests * context_tokens, efficiency)
    if window:
        seen = requests * min(context_tokens, window.tokens)
        attention += windowed * _decode_attention_ms(placement, seen, efficiency)
    hops = placement.pipeline * efficiency.hop_ms if placement.pipeline > 1 else 0.0
    return attention + _layers_ms(placement, requests, efficiency) + _output_ms(placement, requests, efficiency) + hops


def active_experts(count: int, per_token: int, tokens: int) -> float:
    """Experts that at least one of `tokens` goes to, if each token's are drawn evenly. Real routers are less even, so
    that fewer are read."""
    return count * (1 - (1 - per_token / count) ** tokens)


def visible_pairs(offset: int, tokens: int, window: int) -> float:
    """Pairs of a token and one that it attends to, itself included. `window` 0: all before it."""
    end = offset + tokens
    if window <= 0 or end <= window:
        return (end * (end + 1) - offset * (offset + 1)) / 2
    growing = max(0, window - offset)
    return visible_pairs(offset, growing, 0) + (tokens - growing) * window


def _layers_ms(placement: Placement, tokens: int, efficiency: Efficiency) -> float:
    shape, tensor, gpu = placement.shape, placement.tensor, placement.accelerator
    experts = shape.experts
    sparse = experts.layers if experts else 0
    dense_count = layer_count(shape, tensor, with_experts=False)
    plain = (shape.layers - sparse) * dense_count.mlp + shape.layers * dense_count.attention
    width = 3 * shape.intermediate / tensor
    total = 0.0
    if experts:
        sparse_count = layer_count(shape, tensor, with_experts=True)
        plain += sparse * sparse_count.mlp
        active = active_experts(experts.count, experts.per_token, tokens)
        total += sparse * _product_ms(
            2
            * tokens
            * experts.per_token
            * sparse_count.expert
            / (_flops(gpu, shape.expert_dtype) * efficiency.grouped_matmul),
            active * sparse_count.expert * dtype_bytes(shape.expert_dtype) / (gpu.hbm_bytes_per_ms * efficiency.memory),
        )
        routed = 3 * (experts.per_token * experts.intermediate + experts.shared_intermediate) / tensor
        width = (
            width * (shape.layers - sparse) + (routed + 2 * experts.per_token * shape.hidden) * sparse
        ) / shape.layers
    total += _product_ms(
        2 * tokens * plain / (_flops(gpu, shape.weight_dtype) * efficiency.matmul),
        plain * dtype_bytes(shape.weight_dtype) / (gpu.hbm_bytes_per_ms * efficiency.memory),
    )
    # Two norms with their sums, the rotation of queries and keys, the activation.
    rotated = 2 * (shape.heads / tensor + local_kv_heads(shape, tensor)) * shape.head_dim
    moved = tokens * (11 * shape.hidden + rotated + width) * dtype_bytes(shape.activation_dtype)
    total += shape.layers * moved / (gpu.hbm_bytes_per_ms * efficiency.elementwise)
    return total + shape.layers * (_KERNELS * efficiency.kernel_ms + _reduce_ms(placement, tokens, efficiency))


def _output_ms(placement: Placement, rows: int, efficiency: Efficiency) -> float:
    shape, gpu = placement.shape, placement.accelerator
    numbers = output_parameters(shape) / placement.tensor
    return _product_ms(
        2 * rows * numbers / (gpu.flops_per_ms * efficiency.matmul),
        numbers * dtype_bytes(shape.activation_dtype) / (gpu.hbm_bytes_per_ms * efficiency.memory),
    )


def _prefill_attention_ms(
    placement: Placement, pieces: Sequence[tuple[int, int]], window: int, efficiency: Efficiency
) -> float:
    shape, tensor, gpu = placement.shape, placement.tensor, placement.accelerator
    latent = shape.latent
    per_pair = 4 * shape.head_dim
    if latent:
        per_pair = 2 * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    pairs = math.fsum(visible_pairs(offset, tokens, window) for offset, tokens in pieces)
    read = sum(offset + tokens if not window else min(offset, window) + tokens for offset, tokens in pieces)
    arithmetic = pairs * per_pair * shape.heads / tensor / (gpu.flops_per_ms * efficiency.attention)
    reading = read * _kv_bytes(shape, tensor) / (gpu.hbm_bytes_per_ms * efficiency.kv_memory)
    return max(arithmetic, reading) + _ATTENTION_KERNELS * efficiency.kernel_ms


def _decode_attention_ms(placement: Placement, kv_tokens: int, efficiency: Efficiency) -> float:
    shape, tensor, gpu = placement.shape, placement.tensor, placement.accelerator
    per_pair = 4 * shape.head_dim
    if shape.latent:
        # Queries are carried into the latent space, and all heads read the same vector.
        per_pair = 2 * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
    arithmetic = kv_tokens * per_pair * shape.heads / tensor / (gpu.flops_per_ms * efficiency.attention)
    reading = kv_tokens * _kv_bytes(shape, tensor) / (gpu.hbm_bytes_per_ms * efficiency.kv_memory)
    return max(arithmetic, reading) + _ATTENTION_KERNELS * efficiency.kernel_ms


def _kv_bytes(shape: ModelShape, tensor: int) -> float:
    """Of one token and layer on one GPU."""
    if shape.latent:
        return (shape.latent.kv_rank + shape.latent.rope_dim) * dtype_bytes(shape.kv_dtype)
    return 2 * local_kv_heads(shape, tensor) * shape.head_dim * dtype_bytes(shape.kv_dtype)


def _reduce_ms(placement: Placement, tokens: int, efficiency: Efficiency) -> float:
    """Two all-reduces of a layer, and its share of what goes from stage to stage."""
    shape, gpu, tensor = placement.shape, placement.accelerator, placement.tensor
    sent = tokens * shape.hidden * dtype_bytes(shape.activation_dtype)
    total = 0.0
    if tensor > 1:
        inside = tensor <= placement.gpus_per_node
        speed = (gpu.link_bytes_per_ms if inside else gpu.nic_bytes_per_ms) * efficiency.link
        total = 2 * (efficiency.all_reduce_ms + 2 * (tensor - 1) / tensor * sent / speed)
    if placement.pipeline > 1:
        inside = tensor * placement.pipeline <= placement.gpus_per_node
        speed = (gpu.link_bytes_per_ms if inside else gpu.nic_bytes_per_ms) * efficiency.link
        total += (placement.pipeline - 1) / shape.layers * sent / speed
    return total


def _product_ms(arithmetic_ms: float, reading_ms: float) -> float:
    return float((arithmetic_ms**_SOFTNESS + reading_ms**_SOFTNESS) ** (1 / _SOFTNESS))


def _flops(gpu: Accelerator, dtype: Dtype) -> float:
    """FP8 weights are multiplied as they are; narrower integers are widened to 16 bits first."""
    return gpu.flops_8bit_per_ms if dtype is Dtype.FP8 else gpu.flops_per_ms


_PREFILL_GRID: Final = (
    *(((0, tokens), 1) for tokens in (128, 256, 512, 1024, 2048, 4096, 8192)),
    *(((0, 256), pieces) for pieces in (2, 8, 16)),
    *(((offset, tokens), 1) for tokens in (512, 2048) for offset in (2048, 8192, 16384)),
)
"""((tokens computed before, tokens), how many such pieces in the pass)."""
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CONTEXTS: Final = (256, 1024, 8192)
_FEWEST_BATCHES: Final = 3
_WORTH_IT: Final = 0.9
"""Two fits must have less than this share of the error of one."""


def _fit_decode_in_two(placement: Placement, efficiency: Efficiency) -> tuple[Line, Line, int]:
    """Small and large batches apart, where that pays: reading the weights bounds the small ones, arithmetic
    the large ones, and a mixture of experts reads more of them the larger the batch."""
    steps = [
        [
            Step(
                measured_ms=decode_pass_ms(placement, batch, context, efficiency),
                requests=batch,
                kv_tokens=batch * context,
            )
            for context in _CONTEXTS
        ]
        for batch in _BATCHES
    ]
    whole = fit_decode([step for row in steps for step in row])
    best, best_error = (whole, whole, NEVER_LARGE), whole.residual.mape * _WORTH_IT
    for cut in range(_FEWEST_BATCHES, len(_BATCHES) - _FEWEST_BATCHES + 1):
        small = fit_decode([step for row in steps[:cut] for step in row])
        large = fit_decode([step for row in steps[cut:] for step in row])
        error = _joined(small.residual, large.residual).mape
        if error < best_error:
            best, best_error = (small, large, _BATCHES[cut]), error
    return best


def _joined(small: Residual, large: Residual) -> Residual:
    samples = small.samples + large.samples
    mape = (small.mape * small.samples + large.mape * large.samples) / samples
    return Residual(mape, max(small.p95, large.p95), samples)
