"""Sizes from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_core.perf.errors import PerfError
from headrace_core.perf.hf_config import known, shape_from_config, shape_from_file
from headrace_core.perf.shape import Dtype, Experts, Latent, Window

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_a_llama() -> None:
    shape = shape_from_config(LLAMA, "mine")
    assert shape.same_work(known("meta-llama/Meta-Llama-3-8B"))
    assert (shape.name, shape.head_dim, shape.gated, shape.kv_dtype) == ("mine", 128, True, Dtype.BFLOAT16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 4096}, Window(layers=32, tokens=4096)),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "max_window_layers": 28}, Window(layers=4, tokens=4096)),
        ({"sliding_window": 4096, "max_window_layers": 32}, None),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, Window(layers=27, tokens=1024)),
        ({"sliding_window": 4096, "model_type": "gemma2"}, Window(layers=16, tokens=4096)),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
            Window(layers=16, tokens=128),
        ),
        ({"sliding_window": None}, None),
    ],
    ids=["every layer", "switched off", "the last four", "none of them", "five of six", "gemma 2", "a list", "null"],
)
def test_windows(changes: dict[str, object], expected: Window | None) -> None:
    assert shape_from_config({**LLAMA, **changes}).window == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            Experts(layers=32, count=8, per_token=2, intermediate=14336),
        ),
        (
            {
                "n_routed_experts": 64,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1408,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
            Experts(layers=31, count=64, per_token=6, intermediate=1408, shared_intermediate=2816),
        ),
        (
            {
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1, 3],
            },
            Experts(layers=14, count=60, per_token=4, intermediate=1408, shared_intermediate=5632),
        ),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": 2, "first_k_dense_replace": 1},
            Experts(layers=15, count=8, per_token=2, intermediate=14336),
        ),
        ({"num_local_experts": 1, "num_experts_per_tok": 1}, None),
    ],
    ids=["mixtral", "deepseek", "qwen with plain layers", "every second layer", "one expert is none"],
)
def test_experts(changes: dict[str, object], expected: Experts | None) -> None:
    assert shape_from_config({**LLAMA, **changes}).experts == expected


def test_latent_attention() -> None:
    changes = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert shape_from_config({**LLAMA, **changes}).latent == Latent(
        kv_rank=512, q_rank=0, nope_dim=128, rope_dim=64, value_dim=128
    )


@pytest.mark.parametrize(
    ("quantization", "weights", "experts"),
    [
        ({"quant_method": "fp8"}, Dtype.FP8, Dtype.FP8),
        ({"quant_method": "awq", "bits": 4}, Dtype.INT4, Dtype.INT4),
        ({"quant_method": "gptq", "bits": 8}, Dtype.INT8, Dtype.INT8),
        ({"quant_method": "mxfp4"}, Dtype.BFLOAT16, Dtype.MXFP4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Dtype.INT4, Dtype.INT4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            Dtype.FP8,
            Dtype.FP8,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            Dtype.INT4,
            Dtype.INT4,
        ),
    ],
)
def test_quantized_weights(quantization: dict[str, object], weights: Dtype, experts: Dtype) -> None:
    shape = shape_from_config({**LLAMA, "quantization_config": quantization})
    assert (shape.weight_dtype, shape.expert_dtype, shape.activation_dtype) == (weights, experts, Dtype.BFLOAT16)


def test_older_names_and_defaults() -> None:
    opt, bloom = known("facebook/opt-13b"), known("bigscience/bloom")
    assert (opt.gated, opt.tied_embeddings, opt.learned_positions, opt.intermediate) == (False, True, 2048, 20480)
    assert (bloom.layers, bloom.heads, bloom.kv_heads, bloom.intermediate) == (70, 112, 112, 57344)
    falcon = {
        "model_type": "falcon",
        "n_layer": 4,
        "n_head": 8,
        "hidden_size": 64,
        "vocab_size": 9,
        "multi_query": True,
    }
    assert shape_from_config(falcon).kv_heads == 1
    assert shape_from_config({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2}).kv_heads == 2


def test_the_language_part_of_a_model_with_several() -> None:
    shape = shape_from_config(
        {"model_type": "gemma3", "torch_dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    )
    assert (shape.layers, shape.activation_dtype) == (32, Dtype.FLOAT16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.*greater than 0"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"is_encoder_decoder": True}, "decoder-only"),
        ({"torch_dtype": "complex64"}, "torch_dtype: 'complex64' is not one of"),
        ({"quantization_config": {"quant_method": "exotic"}}, "quantization_config: exotic"),
    ],
)
def test_what_is_not_a_known_model_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PerfError, match=words):
        shape_from_config({**LLAMA, **changes})


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert shape_from_file(folder) == shape_from_file(folder / "config.json") == shape_from_config(LLAMA, "tiny-llama")


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("{", "is no JSON"), ("[]", "holds no JSON object")]
)
def test_a_file_that_is_none(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PerfError, match=words):
        shape_from_file(file)


def test_shipped_models_by_name() -> None:
    assert known("OPT-13B") is known("facebook/opt-13b")
    with pytest.raises(PerfError, match=r"'opt-13' is not among the models shipped \(nearest: facebook/opt-1"):
        known("opt-13")
