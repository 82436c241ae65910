"""Measured profiles: DistServe's to the letter, the fitted ones current and within their stated errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.errors import PerfError
from headrace_core.perf.fit import residual
from headrace_core.perf.hf_config import known
from headrace_core.perf.model import Efficiency, Placement, estimate
from headrace_core.perf.profiles import Kind, Profile, find, measured_kv_tokens, profile_for, read
from headrace_core.perf.shape import Dtype
from tests.core.perf.build_profiles import (
    SHIPPED,
    splitwise_document,
    splitwise_steps,
    vidur_document,
    vidur_steps,
)

# As published: prefill a, b, c; small decode a, b, c; large decode a, b, c; large from 95 requests.
PUBLISHED = {
    ("DistServe", "facebook/opt-13b", 1): (
        (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
        (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
        (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    ),
    ("DistServe", "facebook/opt-66b", 4): (
        (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
        (30.760284619429587, 0.000451947603788462, 0.063284195750671),
        (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
    ),
    ("vLLM", "facebook/opt-66b", 2): (
        (58.3822026348141, 0.3826408030281867, -7.1141486747694485e-06),
        (57.07344137197128, 0.0036461138777547255, 0.2249373634499222),
        (26.983759428854572, 0.006200132376379982, 0.4482569479277445),
    ),
}
PUBLISHED_CASES = pytest.mark.parametrize(
    ("engine", "model", "tensor", "rows"), [(*key, rows) for key, rows in PUBLISHED.items()]
)


def place(model: str, gpu: str, tensor: int, pipeline: int = 1) -> Placement:
    return Placement(shape=known(model), accelerator=accelerator(gpu), tensor=tensor, pipeline=pipeline)


def found(placement: Placement, engine: str = "") -> Profile:
    profile = find(placement, engine=engine)
    assert profile is not None
    return profile


@PUBLISHED_CASES
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_prefill_is_what_distserve_simulates(
    engine: str, model: str, tensor: int, rows: tuple[tuple[float, ...], ...], pipeline: int
) -> None:
    costs = found(place(model, "A100-80G", tensor, pipeline), engine).costs
    a, b, c = rows[0]
    for prompts in ([1], [512], [100, 900, 1], [2000] * 3):
        total, square = sum(prompts), float(sum(prompt**2 for prompt in prompts))
        stage = (a + b * total + c * square) / pipeline + 1 * pipeline
        first = stage + 2 + total * 0.0001
        assert costs.stage_ms(total, square, 0, 0) == pytest.approx(first, rel=1e-12)
        assert costs.prefill_ms(total, square) == pytest.approx(first + (pipeline - 1) * stage, rel=1e-12)


@PUBLISHED_CASES
@pytest.mark.parametrize("pipeline", [1, 2])
def test_decode_is_what_distserve_simulates(
    engine: str, model: str, tensor: int, rows: tuple[tuple[float, ...], ...], pipeline: int
) -> None:
    costs = found(place(model, "A100-80G", tensor, pipeline), engine).costs
    for contexts in ([1], [500] * 94, [500] * 95, list(range(200))):
        a, b, c = rows[1] if len(contexts) < 95 else rows[2]
        stage = (a + b * sum(context + 1 for context in contexts) + c * len(contexts)) / pipeline
        first = stage + 2 + sum(contexts) * 0.0001
        kv = sum(contexts) + len(contexts)
        assert costs.stage_ms(0, 0.0, len(contexts), kv) == pytest.approx(first, rel=1e-12)
        assert costs.decode_ms(len(contexts), kv) == pytest.approx(first + (pipeline - 1) * stage, rel=1e-12)


def test_one_stage_adds_three_milliseconds_and_a_tenth_of_a_microsecond_a_token() -> None:
    costs = found(place("facebook/opt-13b", "A100-80G", 1)).costs
    a, b, c = PUBLISHED["DistServe", "facebook/opt-13b", 1][0]
    assert costs.prefill_ms(700, 700.0**2) == pytest.approx(a + b * 700 + c * 700**2 + 3 + 0.0001 * 700, rel=1e-12)


def test_its_token_table_is_there() -> None:
    assert measured_kv_tokens("facebook/opt-13b", 1, 1) == 66_144
    assert measured_kv_tokens("facebook/opt-175b", 8, 8) == 992_400
    assert measured_kv_tokens("facebook/opt-13b", 3, 1) is None


def test_fitted_profiles_are_current() -> None:
    assert (SHIPPED / "splitwise_profile.json").read_text() == splitwise_document()
    assert (SHIPPED / "vidur_profile.json").read_text() == vidur_document()


def test_fitted_profiles_are_within_their_stated_errors() -> None:
    """Mean and 95th percentile of the relative error against every measured setting, and not only those fitted."""
    cases = {(*key, "vLLM"): steps for key, steps in splitwise_steps().items()}
    cases["meta-llama/Meta-Llama-3-8B", "A100-80G", 1, "kernels"] = vidur_steps()
    assert len(cases) == 9
    for (model, gpu, tensor, engine), (prefill, decode) in cases.items():
        profile = found(place(model, gpu, tensor), engine)
        costs, scheduler_ms = profile.costs, profile.costs.scheduler_ms
        stated = profile.provenance.prefill
        assert stated is not None
        seen = residual(
            [costs.prefill_ms(step.tokens, step.squares) - scheduler_ms for step in prefill],
            [step.measured_ms for step in prefill],
        )
        steps = residual(
            [costs.decode_ms(step.requests, step.kv_tokens) - scheduler_ms for step in decode],
            [step.measured_ms for step in decode],
        )
        shares = (seen.mape, seen.p95, steps.mape, steps.p95)
        print(model, gpu, f"tp{tensor}: prefill mean, p95, decode mean, p95:", *(f"{share:.1%}" for share in shares))
        assert (seen.mape, seen.p95, seen.samples) == (
            pytest.approx(stated.mape, abs=1e-5),
            pytest.approx(stated.p95, abs=1e-5),
            stated.samples,
        )
        assert seen.mape < 0.09
        assert seen.p95 < 0.27
        assert steps.mape < 0.04
        assert steps.p95 < 0.07


FITTED = [found(place(*key)).costs for key in splitwise_steps()]


@given(st.integers(1, 512), st.integers(1, 4_000))
def test_a_larger_batch_never_takes_less_by_more_than_the_seam(requests: int, context: int) -> None:
    """Where the small fit ends and the large one begins times may fall, as in DistServe's published fits; by how much
    is bounded here for ours."""
    for costs in FITTED:
        before, after = (
            costs.decode_ms(requests, requests * context),
            costs.decode_ms(requests + 1, (requests + 1) * context),
        )
        assert after > before * 0.97


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        (place("facebook/opt-13b", "A100-80G", 2), Kind.MEASURED),
        (place("meta-llama/Llama-3.1-8B", "A100", 1), Kind.MEASURED),
        (place("facebook/opt-13b", "A100-40G", 2), Kind.ESTIMATED),
        (place("facebook/opt-13b", "A100-80G", 8), Kind.ESTIMATED),
        (place("meta-llama/Llama-3.1-8B", "H100", 1), Kind.ESTIMATED),
        (
            Placement(
                shape=replace(known("facebook/opt-13b"), weight_dtype=Dtype.INT4), accelerator=accelerator("A100-80G")
            ),
            Kind.ESTIMATED,
        ),
    ],
    ids=["measured", "the same sizes under another name", "other GPU", "other degree", "other both", "other weights"],
)
def test_measured_comes_first_and_an_estimate_is_marked(placement: Placement, kind: Kind) -> None:
    profile = profile_for(placement)
    assert profile.provenance.kind is kind
    assert ("datasheet" in profile.provenance.source) == (kind is Kind.ESTIMATED)
    if kind is Kind.ESTIMATED:
        assert find(placement) is None
        assert profile.costs == estimate(placement).costs


def test_stages_that_nobody_measured_are_told() -> None:
    one = found(place("meta-llama/Llama-2-70b-hf", "A100-80G", 4)).provenance
    two = found(place("meta-llama/Llama-2-70b-hf", "A100-80G", 4, 2))
    assert one.assumed == ""
    assert "each of the 2 stages takes 1/2" in two.provenance.assumed
    assert (two.costs.stages, two.costs.hop_ms) == (2, Efficiency().hop_ms)
    assert "kernels alone" in found(place("meta-llama/Meta-Llama-3-8B", "A100-80G", 1)).provenance.assumed


OWN = {
    "schema_version": 1,
    "source": "my worker",
    "profiles": [
        {
            "model": "in-house-7b",
            "accelerator": "NVIDIA-H100-80GB-HBM3",
            "tensor": 1,
            "engine": "mine",
            "prefill": {"base_ms": 5, "token_ms": 0.02, "square_ms": 1e-6},
            "decode": {"base_ms": 6, "kv_token_ms": 1e-4, "request_ms": 0.01},
        }
    ],
}


def test_own_profiles_come_first_and_go_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(OWN))
    mine = replace(
        place("meta-llama/Llama-3.1-8B", "H100", 1), shape=replace(known("Qwen/Qwen3-8B"), name="in-house-7b")
    )
    profile = find(mine, own=[file])
    assert profile is not None
    assert (profile.engine, profile.provenance.source, profile.costs.prefill_ms(100, 1e4)) == (
        "mine",
        "my worker",
        7.01,
    )
    assert find(mine) is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema_version",), 2, "schema_version"),
        (("profiles", 0, "prefill", "token_ms"), -1, "profiles.0.prefill.token_ms"),
        (("profiles", 0, "decode", "base_ms"), "fast", "profiles.0.decode.base_ms"),
        (("profiles", 0, "extra"), 1, "profiles.0.extra"),
    ],
)
def test_a_file_that_is_none_names_its_field(
    tmp_path: Path, path: tuple[str | int, ...], value: object, words: str
) -> None:
    document = json.loads(json.dumps(OWN))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(document))
    with pytest.raises(PerfError, match=words):
        read(file)


def test_a_missing_file_and_an_unknown_engine_are_told(tmp_path: Path) -> None:
    with pytest.raises(PerfError, match="cannot be read"):
        read(tmp_path / "none.json")
    with pytest.raises(PerfError, match="engine: 'SGLang' has no profile; there are DistServe, kernels, vLLM"):
        find(place("facebook/opt-13b", "A100-80G", 1), engine="SGLang")
