"""Reads a model's sizes from its Hugging Face `config.json`, or from the few that are shipped by name.

Source: the attribute names of the transformers library's configurations. A model with layers that `ModelShape` cannot
express (recurrent, linear attention, an encoder) is refused rather than taken for something that it is not.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from headrace_core.perf.errors import PerfError
from headrace_core.perf.shape import Dtype, Experts, Latent, ModelShape, Window

_PLAIN_MLP: Final = frozenset(
    (
        "opt",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "starcoder2",
        "nemotron",
    )
)
"""Model types whose MLP has two matrices. The configuration does not say; all others have three."""
_TIED_BY_DEFAULT: Final = frozenset(
    ("opt", "gpt2", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3_text", "cohere")
)
"""Model types whose configuration may leave `tie_word_embeddings` out and mean true."""
_LEARNED_POSITIONS: Final = frozenset(("opt", "gpt2", "gpt_neo", "gpt_bigcode"))
_KNOWN_LAYER_TYPES: Final = frozenset(("full_attention", "sliding_attention"))
_NOT_EXPRESSIBLE: Final = ("ssm_cfg", "mamba_d_state", "state_size", "linear_num_key_heads", "attention_chunk_size")
_HALF_A_BYTE: Final = 4
_BYTE: Final = 8


class _Quantization(BaseModel):
    model_config = ConfigDict(extra="allow")
    quant_method: str = ""
    bits: int | None = None
    load_in_4bit: bool = False
    config_groups: dict[str, dict[str, object]] = Field(default_factory=dict)
    quant_algo: str = ""


class _Config(BaseModel):
    """The attributes that count, each under the names that it has in one model type or another."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    model_type: str = ""
    layers: int = Field(gt=0, validation_alias=AliasChoices("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    hidden: int = Field(gt=0, validation_alias=AliasChoices("hidden_size", "n_embd", "n_embed", "d_model"))
    heads: int = Field(gt=0, validation_alias=AliasChoices("num_attention_heads", "n_head", "n_heads"))
    kv_heads: int | None = Field(None, gt=0, validation_alias=AliasChoices("num_key_value_heads", "num_kv_heads"))
    head_dim: int | None = Field(None, gt=0)
    intermediate: int | None = Field(
        None, gt=0, validation_alias=AliasChoices("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    )
    vocab: int = Field(gt=0, validation_alias=AliasChoices("vocab_size", "padded_vocab_size"))
    positions: int = Field(0, ge=0, validation_alias=AliasChoices("max_position_embeddings", "n_positions"))
    tied: bool | None = Field(None, validation_alias="tie_word_embeddings")
    multi_query: bool = False
    new_decoder_architecture: bool = False
    is_encoder_decoder: bool = False
    dtype: str = Field("bfloat16", validation_alias=AliasChoices("dtype", "torch_dtype"))
    quantization_config: _Quantization | None = None
    # Sliding windows
    sliding_window: int | None = None
    use_sliding_window: bool = True
    max_window_layers: int | None = None
    sliding_window_pattern: int | None = None
    layer_types: list[str] | None = None
    # Latent attention
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    # Experts
    experts: int | None = Field(
        None, validation_alias=AliasChoices("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    )
    experts_per_token: int | None = Field(
        None, validation_alias=AliasChoices("num_experts_per_tok", "experts_per_token", "moe_topk")
    )
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = Field(default_factory=list)


def shape_from_config(config: Mapping[str, object], name: str = "") -> ModelShape:
    """The sizes in a parsed `config.json`. The language model's part is taken where it has several.

    Raises:
        PerfError: a size is missing or cannot be, or the model has layers that are not modelled.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        outer = {key: config[key] for key in ("quantization_config", "torch_dtype", "dtype") if config.get(key)}
        return shape_from_config({**outer, **{key: value for key, value in inner.items() if value is not None}}, name)
    given = {key: value for key, value in config.items() if value is not None}
    _refuse_what_is_not_modelled(given)
    try:
        read = _Config.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "config"
        raise PerfError(
            f"config.json: {field}: {first['msg']}: give the config.json of a decoder-only model"
        ) from error
    weight, expert = _weight_dtypes(read)
    return ModelShape(
        name=name or str(given.get("_name_or_path") or read.model_type or "model"),
        layers=read.layers,
        hidden=read.hidden,
        heads=read.heads,
        kv_heads=_kv_heads(read),
        head_dim=read.head_dim or read.hidden // read.heads,
        intermediate=read.intermediate or 4 * read.hidden,
        vocab=read.vocab,
        gated=read.model_type not in _PLAIN_MLP,
        tied_embeddings=read.tied if read.tied is not None else read.model_type in _TIED_BY_DEFAULT,
        learned_positions=read.positions if read.model_type in _LEARNED_POSITIONS else 0,
        window=_window(read),
        latent=_latent(read),
        experts=_experts(read),
        weight_dtype=weight,
        expert_dtype=expert,
        activation_dtype=_dtype(read.dtype),
        kv_dtype=_dtype(read.dtype),
    )


def shape_from_file(path: str | Path) -> ModelShape:
    """The sizes in a `config.json`, or in the one of a model's folder.

    Raises:
        PerfError: there is no such file, it is no JSON object, or see `shape_from_config`.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PerfError(f"model: {file} cannot be read ({error.strerror}): give a config.json or its folder") from error
    except ValueError as error:
        raise PerfError(f"model: {file} is no JSON: give a model's config.json") from error
    if not isinstance(parsed, dict):
        raise PerfError(f"model: {file} holds no JSON object: give a model's config.json")
    return shape_from_config(parsed, str(parsed.get("_name_or_path") or file.parent.name))


def known(name: str) -> ModelShape:
    """A model whose sizes are shipped, by its Hugging Face name in any case, with or without the owner.

    Raises:
        PerfError: it is not shipped; the message names the nearest, and the other way.
    """
    shapes = _shipped()
    wanted = name.lower()
    for known_name, shape in shapes.items():
        if wanted in {known_name.lower(), known_name.lower().rpartition("/")[2]}:
            return shape
    near = difflib.get_close_matches(wanted, [one.lower() for one in shapes], n=3, cutoff=0.3)
    names = [one for one in shapes if one.lower() in near] or list(shapes)
    raise PerfError(
        f"model: {name!r} is not among the models shipped (nearest: {', '.join(names)}): give a path to its config.json"
    )


@functools.cache
def _shipped() -> dict[str, ModelShape]:
    text = resources.files("headrace_core.perf").joinpath("data/models.json").read_text(encoding="utf-8")
    return {name: shape_from_config(config, name) for name, config in json.loads(text)["models"].items()}


def _refuse_what_is_not_modelled(config: Mapping[str, object]) -> None:
    for key in _NOT_EXPRESSIBLE:
        if config.get(key):
            raise PerfError(f"config.json: {key}: recurrent, linear or chunked attention is not modelled")
    if config.get("is_encoder_decoder"):
        raise PerfError("config.json: is_encoder_decoder: only decoder-only models are modelled")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        strange = sorted({str(one) for one in layer_types} - _KNOWN_LAYER_TYPES)
        if strange:
            raise PerfError(
                f"config.json: layer_types: {', '.join(strange)}: only {', '.join(sorted(_KNOWN_LAYER_TYPES))}"
            )


def _kv_heads(read: _Config) -> int:
    if read.kv_heads is not None and (read.model_type != "falcon" or read.new_decoder_architecture):
        return read.kv_heads
    return 1 if read.multi_query else read.heads


def _window(read: _Config) -> Window | None:
    tokens = read.sliding_window
    if not tokens or not read.use_sliding_window:
        return None
    if read.layer_types is not None:
        layers = sum(one == "sliding_attention" for one in read.layer_types)
    elif read.sliding_window_pattern:
        # Every n-th layer sees all.
        layers = read.layers - read.layers // read.sliding_window_pattern
    elif read.model_type == "gemma2":
        layers = -(-read.layers // 2)
    elif read.max_window_layers is not None:
        # Qwen: the layers from this one on.
        layers = max(0, read.layers - read.max_window_layers)
    else:
        layers = read.layers
    return Window(layers=layers, tokens=tokens) if layers else None


def _latent(read: _Config) -> Latent | None:
    if not read.kv_lora_rank:
        return None
    return Latent(
        kv_rank=read.kv_lora_rank,
        q_rank=read.q_lora_rank or 0,
        nope_dim=read.qk_nope_head_dim,
        rope_dim=read.qk_rope_head_dim,
        value_dim=read.v_head_dim,
    )


def _experts(read: _Config) -> Experts | None:
    if not read.experts or read.experts == 1:
        return None
    if not read.experts_per_token:
        raise PerfError("config.json: num_experts_per_tok: a mixture of experts needs it")
    width = read.moe_intermediate_size or read.intermediate or 4 * read.hidden
    step = max(read.moe_layer_freq, read.decoder_sparse_step)
    sparse = [
        layer
        for layer in range(read.first_k_dense_replace, read.layers)
        if layer not in read.mlp_only_layers and (read.decoder_sparse_step <= 1 or (layer + 1) % step == 0)
        if read.moe_layer_freq <= 1 or layer % step == 0
    ]
    if not sparse:
        return None
    return Experts(
        layers=len(sparse),
        count=read.experts,
        per_token=read.experts_per_token,
        intermediate=width,
        shared_intermediate=read.shared_expert_intermediate_size + (read.n_shared_experts or 0) * width,
    )


def _weight_dtypes(read: _Config) -> tuple[Dtype, Dtype]:
    own = _dtype(read.dtype)
    quantization = read.quantization_config
    if quantization is None:
        return own, own
    method = quantization.quant_method.lower()
    if method == "mxfp4":
        return own, Dtype.MXFP4
    stored = _quantized(method, quantization)
    return stored, stored


def _quantized(method: str, quantization: _Quantization) -> Dtype:
    if method == "compressed-tensors":
        for group in quantization.config_groups.values():
            weights = group.get("weights")
            if isinstance(weights, Mapping):
                if weights.get("num_bits") == _HALF_A_BYTE:
                    return Dtype.INT4
                return Dtype.FP8 if weights.get("type") == "float" else Dtype.INT8
    if method in {"fp8", "fbgemm_fp8"} or quantization.quant_algo.upper() == "FP8":
        return Dtype.FP8
    if method in {"awq", "gptq"} and (quantization.bits or _HALF_A_BYTE) == _HALF_A_BYTE:
        return Dtype.INT4
    if method == "bitsandbytes":
        return Dtype.INT4 if quantization.load_in_4bit else Dtype.INT8
    if quantization.bits == _BYTE:
        return Dtype.INT8
    raise PerfError(
        f"config.json: quantization_config: {method or 'no quant_method'} is not known: leave it out and give the"
        " weight data type yourself"
    )


def _dtype(text: str) -> Dtype:
    name = text.removeprefix("torch.")
    if name == "auto":
        return Dtype.BFLOAT16
    try:
        return Dtype(name)
    except ValueError:
        raise PerfError(f"config.json: torch_dtype: {text!r} is not one of {', '.join(Dtype)}") from None
