"""What a model holds: parameters, KV, weights, and the KV that fits, against published numbers and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.perf import profiles
from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.errors import DoesNotFitError, PerfError
from headrace_core.perf.hf_config import known
from headrace_core.perf.memory import (
    Engine,
    activation_bytes_per_gpu,
    fit,
    kv_bytes,
    kv_bytes_per_token,
    kv_bytes_per_token_per_gpu,
    kv_copies,
    weight_bytes_per_gpu,
)
from headrace_core.perf.shape import Dtype, ModelShape, parameters
from tests.core.perf.build_profiles import SHIPPED, rows_of
from tests.core.perf.shapes import ALL, DENSE, GROUPED, LATENT, SPARSE, WINDOWED

DISTSERVE_ENGINE = Engine(utilization=0.95, reserve_bytes=849_877_401, batched_tokens=1, max_running=1)
"""Its table: 95 % of 84,987,740,160 bytes, less 1 % of them, less the weights."""


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("facebook/opt-13b", 12.85),
        ("facebook/opt-66b", 65.7),
        ("bigscience/bloom", 176.25),
        ("meta-llama/Llama-2-70b-hf", 68.98),
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("meta-llama/Llama-3.1-405B", 405.85),
        ("mistralai/Mixtral-8x7B-v0.1", 46.70),
        ("mistralai/Mixtral-8x22B-v0.1", 140.6),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen3-235B-A22B", 235.1),
        ("deepseek-ai/DeepSeek-V2-Lite", 15.7),
        ("deepseek-ai/DeepSeek-V3", 671.0),
        ("google/gemma-3-27b-it", 27.0),
        ("openai/gpt-oss-20b", 20.9),
        ("openai/gpt-oss-120b", 116.8),
    ],
)
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert parameters(known(name)) / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("facebook/opt-13b", 2 * 40 * 5120 * 2),
        ("meta-llama/Llama-2-70b-hf", 2 * 80 * 8 * 128 * 2),
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),
        ("mistralai/Mixtral-8x7B-v0.1", 2 * 32 * 8 * 128 * 2),
        ("openai/gpt-oss-120b", 2 * 36 * 8 * 64 * 2),
    ],
    ids=["every head", "grouped heads", "latent", "experts", "experts and windows"],
)
def test_kv_of_a_token(name: str, by_hand: int) -> None:
    assert kv_bytes_per_token(known(name)) == by_hand


def test_kv_takes_the_data_type_of_the_cache() -> None:
    shape = known("meta-llama/Llama-3.1-8B")
    assert kv_bytes_per_token(replace(shape, kv_dtype=Dtype.FP8)) == kv_bytes_per_token(shape) / 2


@pytest.mark.parametrize(
    ("shape", "tensor", "heads_or_width", "copies"),
    [
        (DENSE, 4, 2 * 2 * 8, 1),
        (GROUPED, 2, 2 * 1 * 8, 1),
        (GROUPED, 4, 2 * 1 * 8, 2),
        (GROUPED, 8, 2 * 1 * 8, 4),
        (LATENT, 1, 36, 1),
        (LATENT, 8, 36, 8),
    ],
    ids=["cut", "cut to one head", "each head twice", "each head four times", "latent", "latent on every GPU"],
)
def test_kv_of_a_token_on_one_gpu(shape: ModelShape, tensor: int, heads_or_width: int, copies: int) -> None:
    assert kv_bytes_per_token_per_gpu(shape, tensor) == 4 * heads_or_width * 2
    assert kv_copies(shape, tensor) == copies
    assert kv_bytes_per_token_per_gpu(shape, tensor, 3) == 2 * heads_or_width * 2  # 2 + 1 + 1 layers


@pytest.mark.parametrize(
    ("tokens", "layer_tokens"), [(50, 6 * 50), (100, 6 * 100), (1000, 2 * 1000 + 4 * 100)], ids=["in", "at", "past"]
)
def test_a_window_bounds_the_kv_of_a_request(tokens: int, layer_tokens: int) -> None:
    assert kv_bytes(WINDOWED, tokens) == layer_tokens * 2 * 2 * 8 * 2


def test_weights_by_hand() -> None:
    attention = 64 * 8 * (8 + 2 + 2 + 8)
    router, shared, expert = 64 * 16, 3 * 64 * 64, 3 * 64 * 32
    layers = 4 * attention + 3 * (router + shared + 16 * expert) + 3 * 64 * 256
    assert weight_bytes_per_gpu(SPARSE, 1) == 2 * (layers + 2 * 64_000)
    halves = 4 * 64 * 8 * (4 + 1 + 1 + 4) + 3 * (router + (shared + 16 * expert) // 2) + 3 * 64 * 256 // 2
    assert weight_bytes_per_gpu(SPARSE, 2) == 2 * (halves + 64_000)
    # Four GPUs, two KV heads: one head each, so that keys and values are not cut in four.
    quarters = 4 * 64 * 8 * (2 + 1 + 1 + 2) + 3 * (router + (shared + 16 * expert) // 4) + 3 * 64 * 256 // 4
    assert weight_bytes_per_gpu(SPARSE, 4) == 2 * (quarters + 32_000)
    # Two stages: the fuller has two layers with experts, and one of the two tables.
    stage = 2 * attention + 2 * (router + shared + 16 * expert)
    assert weight_bytes_per_gpu(SPARSE, 1, 2) == 2 * (stage + 64_000)


def test_latent_weights_by_hand() -> None:
    query, down, up, out = 64 * 48 + 48 * 8 * 12, 64 * 36, 32 * 8 * 16, 8 * 8 * 64
    layers = 4 * (query + down + up + out + 3 * 64 * 256)
    assert weight_bytes_per_gpu(LATENT, 1) == 2 * (layers + 2 * 64_000)
    halves = 4 * (64 * 48 + 48 * 4 * 12 + down + (up + out + 3 * 64 * 256) // 2)
    assert weight_bytes_per_gpu(LATENT, 2) == 2 * (halves + 64_000)


def test_tied_embeddings_are_held_once_and_on_two_stages_twice() -> None:
    free = replace(GROUPED, tied_embeddings=False)
    assert weight_bytes_per_gpu(free, 1) - weight_bytes_per_gpu(GROUPED, 1) == 2 * 64_000
    assert weight_bytes_per_gpu(free, 1, 2) == weight_bytes_per_gpu(GROUPED, 1, 2)


def test_narrow_weights_leave_embeddings_wide() -> None:
    narrow = replace(DENSE, weight_dtype=Dtype.INT8)
    layers = 4 * (4 * 64 * 64 + 2 * 64 * 256)
    assert weight_bytes_per_gpu(narrow, 1) == layers + 2 * 2 * 64_000


@given(st.sampled_from(ALL), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)))
def test_more_gpus_hold_less_each(shape: ModelShape, tensor: int, pipeline: int) -> None:
    weights = weight_bytes_per_gpu(shape, tensor, pipeline)
    assert weight_bytes_per_gpu(shape, 2 * tensor, pipeline) <= weights
    assert kv_bytes_per_token_per_gpu(shape, 2 * tensor, pipeline) <= kv_bytes_per_token_per_gpu(
        shape, tensor, pipeline
    )
    if pipeline < 4:
        assert weight_bytes_per_gpu(shape, tensor, 2 * pipeline) < weights


def test_what_fits_against_the_table_of_distserve() -> None:
    """It keeps the whole token table on each GPU, which we cut by the tensor degree: so we fit a little more."""
    gpu = replace(accelerator("A100-80G"), memory_bytes=84_987_740_160)
    errors = []
    for row in rows_of(SHIPPED / "distserve_kv_tokens.csv"):
        tensor, pipeline, theirs = (int(row[name]) for name in ("tensor", "pipeline", "kv_tokens"))
        shape = known(row["model"])
        assert profiles.measured_kv_tokens(row["model"], tensor, pipeline) == theirs
        ours = fit(shape, gpu, tensor, pipeline, DISTSERVE_ENGINE).kv_tokens
        errors.append(ours / theirs - 1)
        if tensor == 1:
            assert abs(ours - theirs) <= 32, row
    assert len(errors) == 76
    print(
        f"KV tokens against DistServe's table: {min(errors):+.2%} to {max(errors):+.2%}, mean {sum(errors) / 76:+.2%}"
    )
    assert min(errors) > -0.0003
    assert max(errors) < 0.06
    assert sum(errors) / len(errors) < 0.015


def test_memory_is_spent_to_the_last_block() -> None:
    engine = Engine()
    gpu = accelerator("H100-SXM")
    found = fit(known("meta-llama/Llama-3.1-8B"), gpu, 1, 1, engine)
    spent = found.weight_bytes + found.activation_bytes + found.reserve_bytes + found.kv_bytes
    usable = gpu.memory_bytes * engine.utilization
    assert usable - 131_072 * 16 < spent <= usable
    assert found.kv_tokens == 16 * found.kv_blocks == found.kv_bytes // 131_072


def test_windows_leave_room_for_more_long_requests() -> None:
    shape, gpu = known("google/gemma-3-27b-it"), accelerator("H100-SXM")
    careful = fit(shape, gpu, 2)
    short = fit(shape, gpu, 2, 1, Engine(context_tokens=1024))
    long = fit(shape, gpu, 2, 1, Engine(context_tokens=32_768))
    assert short.kv_blocks == careful.kv_blocks
    assert long.kv_tokens / careful.kv_tokens == pytest.approx(62 / (10 + 52 / 32), rel=1e-3)


def test_activations_grow_with_the_step_and_with_the_batch() -> None:
    shape = known("meta-llama/Llama-3.1-8B")
    small, large = Engine(batched_tokens=8192), Engine(batched_tokens=16_384)
    assert activation_bytes_per_gpu(shape, 1, large) == 2 * activation_bytes_per_gpu(shape, 1, small)
    logits = activation_bytes_per_gpu(shape, 1, Engine(batched_tokens=512, max_running=512))
    assert logits == 512 * 128_256 * 10


@pytest.mark.parametrize(
    ("name", "gpu", "tensor", "words"),
    [
        (
            "facebook/opt-66b",
            "A100-80G",
            1,
            "does not fit on 1 A100-80G.*122.. GiB of weights.*Raise tensor or pipeline",
        ),
        ("meta-llama/Llama-3.1-70B", "L4", 4, "does not fit on 4 L4"),
    ],
)
def test_a_model_that_does_not_fit_says_what_it_needs(name: str, gpu: str, tensor: int, words: str) -> None:
    with pytest.raises(DoesNotFitError, match=words):
        fit(known(name), accelerator(gpu), tensor)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "words"),
    [
        (3, 1, "tensor: 3 does not divide the 8 attention heads of dense"),
        (0, 1, "tensor and pipeline"),
        (1, 0, "tensor and pipeline"),
        (1, 5, "pipeline: dense has 4 layers"),
    ],
)
def test_degrees_that_no_engine_runs_are_refused(tensor: int, pipeline: int, words: str) -> None:
    with pytest.raises(PerfError, match=words):
        weight_bytes_per_gpu(DENSE, tensor, pipeline)
    with pytest.raises(PerfError, match=words):
        kv_bytes_per_token_per_gpu(DENSE, tensor, pipeline)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.2, float("nan")])
def test_a_utilization_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(PerfError, match="utilization"):
        fit(DENSE, accelerator("L4"), 1, 1, Engine(utilization=share))
