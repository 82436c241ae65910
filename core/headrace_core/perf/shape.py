"""Holds the sizes of a model that its time and its memory follow from, and counts its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from headrace_core.perf.errors import PerfError


class Dtype(StrEnum):
    """How a number is stored."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    """With a 16-bit scale and a zero point for each group of 128, as AWQ and GPTQ have."""
    MXFP4 = "mxfp4"
    """With an 8-bit scale for each group of 32."""


BITS: Final = {
    Dtype.FLOAT32: 32.0,
    Dtype.BFLOAT16: 16.0,
    Dtype.FLOAT16: 16.0,
    Dtype.FP8: 8.0,
    Dtype.INT8: 8.0,
    Dtype.INT4: 4 + 20 / 128,
    Dtype.MXFP4: 4 + 8 / 32,
}
"""Bits a number, its share of the scales included."""


def dtype_bytes(dtype: Dtype) -> float:
    """Bytes a number takes, its share of the scales included."""
    return BITS[dtype] / 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Layers that look back over a sliding window only."""

    layers: int
    tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds one vector for all
    heads, `kv_rank` + `rope_dim` wide."""

    kv_rank: int
    q_rank: int
    """0: the query is not compressed."""
    nope_dim: int
    rope_dim: int
    value_dim: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    layers: int
    """Layers that have it; the others have a plain MLP."""
    count: int
    per_token: int
    intermediate: int
    """Width of one expert."""
    shared_intermediate: int = 0
    """Width of the part that every token passes, all shared experts together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, of layers without experts."""
    vocab: int
    gated: bool
    """An MLP of three matrices (SwiGLU and the like), else of two."""
    tied_embeddings: bool
    learned_positions: int = 0
    """Rows of a learned position table. 0: rotary or none."""
    window: Window | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    weight_dtype: Dtype = Dtype.BFLOAT16
    """Of the matrices in the layers, experts apart."""
    expert_dtype: Dtype = Dtype.BFLOAT16
    activation_dtype: Dtype = Dtype.BFLOAT16
    """Of activations, embeddings and the output matrix."""
    kv_dtype: Dtype = Dtype.BFLOAT16

    def same_work(self, other: ModelShape) -> bool:
        """Whether the two take the same time and memory: all but the name, and bfloat16 the same as float16."""
        return _facts(self) == _facts(other)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """Parameters of one layer on one GPU of a tensor-parallel group."""

    attention: float
    mlp: float
    """Of a plain MLP; of a layer with experts the router and the shared part."""
    expert: float
    """Of one routed expert. 0: no experts in this layer."""


def check_degrees(shape: ModelShape, tensor: int, pipeline: int) -> None:
    """Refuse degrees that no engine runs.

    Raises:
        PerfError: a degree under 1, a tensor degree that does not divide the heads, more stages than layers.
    """
    if tensor < 1 or pipeline < 1:
        raise PerfError("tensor and pipeline: write degrees of 1 or more")
    if shape.heads % tensor:
        raise PerfError(f"tensor: {tensor} does not divide the {shape.heads} attention heads of {shape.name}")
    if pipeline > shape.layers:
        raise PerfError(f"pipeline: {shape.name} has {shape.layers} layers, too few for {pipeline} stages")


def local_kv_heads(shape: ModelShape, tensor: int) -> int:
    """KV heads that one GPU holds: with more GPUs than KV heads each holds a copy of one."""
    return -(-shape.kv_heads // tensor)


def layer_count(shape: ModelShape, tensor: int, *, with_experts: bool) -> LayerCount:
    """Parameters of one layer on one GPU. Norms and biases are left out: under 0.1 %.

    Queries, the output projection and MLPs are cut by the tensor degree; keys and values down to one head; what makes
    the latent vector, and the router, every GPU has whole.
    """
    experts = shape.experts if with_experts else None
    matrices = 3 if shape.gated else 2
    if experts is None:
        mlp, expert = matrices * shape.hidden * shape.intermediate / tensor, 0.0
    else:
        mlp = shape.hidden * experts.count + matrices * shape.hidden * experts.shared_intermediate / tensor
        expert = matrices * shape.hidden * experts.intermediate / tensor
    return LayerCount(attention=_attention(shape, tensor), mlp=mlp, expert=expert)


def embedding_parameters(shape: ModelShape) -> int:
    """Parameters of the input side: token and position tables."""
    return (shape.vocab + shape.learned_positions) * shape.hidden


def output_parameters(shape: ModelShape) -> int:
    """Parameters of the matrix that makes logits. It is the token table itself where the embeddings are tied."""
    return shape.vocab * shape.hidden


def parameters(shape: ModelShape) -> int:
    """All parameters of the model, norms and biases left out."""
    moe_layers = shape.experts.layers if shape.experts else 0
    dense = layer_count(shape, 1, with_experts=False)
    total = (shape.layers - moe_layers) * (dense.attention + dense.mlp)
    if shape.experts:
        sparse = layer_count(shape, 1, with_experts=True)
        total += moe_layers * (sparse.attention + sparse.mlp + shape.experts.count * sparse.expert)
    return round(total) + embedding_parameters(shape) + (0 if shape.tied_embeddings else output_parameters(shape))


def _attention(shape: ModelShape, tensor: int) -> float:
    latent = shape.latent
    if latent is None:
        queries = shape.heads / tensor
        return shape.hidden * shape.head_dim * (2 * queries + 2 * local_kv_heads(shape, tensor))
    heads = shape.heads / tensor
    query_dim = heads * (latent.nope_dim + latent.rope_dim)
    query = shape.hidden * latent.q_rank + latent.q_rank * query_dim if latent.q_rank else shape.hidden * query_dim
    down = shape.hidden * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return query + down + up + heads * latent.value_dim * shape.hidden


def _facts(shape: ModelShape) -> tuple[object, ...]:
    dtypes = (shape.weight_dtype, shape.expert_dtype, shape.activation_dtype, shape.kv_dtype)
    return (
        (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocab),
        (shape.gated, shape.tied_embeddings, shape.learned_positions),
        (shape.window, shape.latent, shape.experts),
        tuple(Dtype.BFLOAT16 if one is Dtype.FLOAT16 else one for one in dtypes),
    )
