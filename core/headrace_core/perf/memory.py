"""Counts what a model holds on each GPU: weights, activations, and the KV that fits beside them.

The one place for it: the simulator, the planner and the worker ask here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from headrace_core.perf.accelerators import Accelerator
from headrace_core.perf.errors import DoesNotFitError, PerfError
from headrace_core.perf.shape import (
    LayerCount,
    ModelShape,
    check_degrees,
    dtype_bytes,
    embedding_parameters,
    layer_count,
    local_kv_heads,
    output_parameters,
)

_GIB: Final = float(1 << 30)
_LOGIT_BYTES: Final = 10
"""A logit in 16 bits, in float32, and once more while it is sampled."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the engine is told about memory. The defaults are vLLM's, and the reserve is ours."""

    utilization: float = 0.9
    """Share of the GPU's memory that the engine may take (vLLM: `gpu_memory_utilization`)."""
    reserve_bytes: int = 1 << 30
    """CUDA context, communication buffers and CUDA graphs: about 1 GiB."""
    batched_tokens: int = 2048
    """Most tokens of one step (vLLM: `max_num_batched_tokens`)."""
    max_running: int = 256
    """Most requests of one step (vLLM: `max_num_seqs`)."""
    block_tokens: int = 16
    context_tokens: int = 0
    """Usual context of a request, for a model with sliding windows: a layer then holds no more of it than the window.
    0: blocks are counted as if every layer kept every token, which is safe and, for long contexts, far too few."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """How the memory of the fullest GPU of a worker is spent. Bytes are of one GPU, tokens of the whole worker."""

    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    kv_bytes: int
    kv_blocks: int
    kv_tokens: int
    """`kv_blocks` times the tokens of a block."""


def kv_bytes_per_token(shape: ModelShape) -> float:
    """KV of one token over the whole model, no copy counted twice: what goes over the wire.

    Layers with a sliding window count as long as the token is in it.
    """
    return shape.layers * _kv_numbers(shape, 1) * dtype_bytes(shape.kv_dtype)


def kv_bytes(shape: ModelShape, tokens: int) -> float:
    """KV of a request of `tokens`: layers with a sliding window hold no more than the window."""
    per_layer = _kv_numbers(shape, 1) * dtype_bytes(shape.kv_dtype)
    return _layer_tokens(shape, tokens) * per_layer


def kv_bytes_per_token_per_gpu(shape: ModelShape, tensor: int, pipeline: int = 1) -> float:
    """KV of one token on the fullest GPU. More GPUs than KV heads hold copies; a latent vector is on every GPU.

    Raises:
        PerfError: degrees that no engine runs.
    """
    check_degrees(shape, tensor, pipeline)
    return -(-shape.layers // pipeline) * _kv_numbers(shape, tensor) * dtype_bytes(shape.kv_dtype)


def kv_copies(shape: ModelShape, tensor: int) -> float:
    """How often a worker of this tensor degree holds each number of its KV."""
    return tensor * _kv_numbers(shape, tensor) / _kv_numbers(shape, 1)


def weight_bytes_per_gpu(shape: ModelShape, tensor: int, pipeline: int = 1) -> int:
    """Weights on the fullest GPU: of the stages with the most layers the one that also holds the larger table.

    Raises:
        PerfError: degrees that no engine runs.
    """
    check_degrees(shape, tensor, pipeline)
    sparse_layers = shape.experts.layers if shape.experts else 0
    stage_layers = -(-shape.layers // pipeline)
    # The stage with the most layers has as many with experts as there are: those are the larger ones.
    sparse = min(sparse_layers, stage_layers)
    total = sparse * layer_weight_bytes(shape, layer_count(shape, tensor, with_experts=True))
    total += (stage_layers - sparse) * layer_weight_bytes(shape, layer_count(shape, tensor, with_experts=False))
    table = dtype_bytes(shape.activation_dtype)
    first, last = embedding_parameters(shape) * table / tensor, output_parameters(shape) * table / tensor
    if pipeline > 1:
        return round(total + max(first, last))
    return round(total + first + (0 if shape.tied_embeddings else last))


def layer_weight_bytes(shape: ModelShape, count: LayerCount) -> float:
    """Bytes of a layer's weights, all its experts included."""
    dense = (count.attention + count.mlp) * dtype_bytes(shape.weight_dtype)
    if shape.experts is None or not count.expert:
        return dense
    return dense + shape.experts.count * count.expert * dtype_bytes(shape.expert_dtype)


def activation_bytes_per_gpu(shape: ModelShape, tensor: int, engine: Engine) -> int:
    """The peak while a step of `batched_tokens` runs: an estimate (ours), within what one layer and the logits need.

    A layer holds its input, its residual and the widest of what it makes: queries, keys and values, or the two halves
    of a gated MLP; experts work on `per_token` copies of each token. Logits are of the whole vocabulary on each GPU.
    """
    halves = 2 if shape.gated else 1
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim / tensor
    widest = max(qkv, halves * shape.intermediate / tensor)
    if shape.experts:
        routed = shape.experts.per_token * (shape.hidden + halves * shape.experts.intermediate / tensor)
        widest = max(widest, routed + halves * shape.experts.shared_intermediate / tensor)
    layer = engine.batched_tokens * (3 * shape.hidden + widest) * dtype_bytes(shape.activation_dtype)
    logits = min(engine.max_running, engine.batched_tokens) * shape.vocab * _LOGIT_BYTES
    return round(max(layer, logits))


def fit(
    shape: ModelShape, accelerator: Accelerator, tensor: int, pipeline: int = 1, engine: Engine | None = None
) -> MemoryFit:
    """Spend a GPU's memory: weights, activations, the reserve, and KV in whole blocks with the rest.

    Raises:
        PerfError: degrees or settings that cannot be.
        DoesNotFitError: not one block fits.
    """
    engine = engine or Engine()
    if not 0 < engine.utilization <= 1:
        raise PerfError(f"utilization: {engine.utilization} is no share of the memory: write a number from 0 to 1")
    weights = weight_bytes_per_gpu(shape, tensor, pipeline)
    activations = activation_bytes_per_gpu(shape, tensor, engine)
    usable = accelerator.memory_bytes * engine.utilization
    room = usable - weights - activations - engine.reserve_bytes
    block_bytes = kv_bytes_per_token_per_gpu(shape, tensor, pipeline) * engine.block_tokens
    if engine.context_tokens > 0:
        kept = _layer_tokens(shape, engine.context_tokens) / (shape.layers * engine.context_tokens)
        block_bytes *= kept
    if room < block_bytes:
        raise DoesNotFitError(
            f"{shape.name} does not fit on {tensor * pipeline} {accelerator.name} (tensor {tensor}, pipeline"
            f" {pipeline}): a GPU would hold {weights / _GIB:.1f} GiB of weights, {activations / _GIB:.1f} GiB of"
            f" activations and {engine.reserve_bytes / _GIB:.1f} GiB beside, of {usable / _GIB:.1f} GiB usable."
            " Raise tensor or pipeline, take a larger GPU, or a smaller weight data type"
        )
    blocks = int(room // block_bytes)
    return MemoryFit(
        weight_bytes=weights,
        activation_bytes=activations,
        reserve_bytes=engine.reserve_bytes,
        kv_bytes=int(blocks * block_bytes),
        kv_blocks=blocks,
        kv_tokens=blocks * engine.block_tokens,
    )


def _layer_tokens(shape: ModelShape, tokens: int) -> int:
    if shape.window is None:
        return shape.layers * tokens
    return (shape.layers - shape.window.layers) * tokens + shape.window.layers * min(tokens, shape.window.tokens)


def _kv_numbers(shape: ModelShape, tensor: int) -> int:
    if shape.latent is not None:
        return shape.latent.kv_rank + shape.latent.rope_dim
    return 2 * local_kv_heads(shape, tensor) * shape.head_dim
