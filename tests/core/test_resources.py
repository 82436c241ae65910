"""The models of the custom resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace_core.api import names
from headrace_core.api.resources import ClusterSpec, Flips, InferenceCluster, InferenceFlip, ModelSource, Pool

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {
    "model": {"uri": "hf://Qwen/Qwen3-8B"},
    "pools": [{"name": "in", "role": "Prefill"}, {"name": "out", "role": "Decode"}, {"name": "more", "role": "Decode"}],
}


def test_a_minimal_spec_has_all_defaults() -> None:
    spec = ClusterSpec.model_validate(MINIMAL)
    assert spec.pools[0] == Pool(
        name="in", role="Prefill", scaling="Elastic", replicas=1, min_replicas=1, max_replicas=8
    )
    assert (spec.pools[0].parallelism.tensor, spec.pools[0].parallelism.pipeline) == (1, 1)
    assert spec.elasticity.mode == "Auto"
    assert spec.elasticity.interval_s == 15.0
    assert spec.gateway.managed
    assert spec.rollout.max_unavailable == 1


def test_flips_in_seconds_and_shares() -> None:
    flips = Flips(cooldown="1m30s", drain_timeout="500ms", idle_below="12.5%", idle_for="1h")
    assert (flips.cooldown_s, flips.drain_timeout_s, flips.idle_for_s) == (90.0, 0.5, 3600.0)
    assert flips.idle_below_share == 0.125


SERVED_NAMES = {
    "last part of the hub's name": ({"uri": "hf://Qwen/Qwen3-8B"}, "Qwen3-8B"),
    "last part of a path": ({"uri": "file:///models/tiny"}, "tiny"),
    "as given": ({"uri": "hf://Qwen/Qwen3-8B", "servedName": "chat"}, "chat"),
}


@pytest.mark.parametrize("case", SERVED_NAMES)
def test_the_name_in_requests(case: str) -> None:
    source, name = SERVED_NAMES[case]
    assert ModelSource.model_validate(source).name == name


BAD = {
    "unknown field": ({"slo": {}}, "slo"),
    "unknown role": ({"pools": [{"name": "a", "role": "prefill"}, MINIMAL["pools"][1]]}, "pools.0.role"),
    "one pool": ({"pools": MINIMAL["pools"][:1]}, "pools"),
    "uri": ({"model": {"uri": "Qwen/Qwen3-8B"}}, "model.uri"),
    "duration": ({"elasticity": {"interval": "15"}}, "elasticity.interval"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_names_its_field(case: str) -> None:
    change, field = BAD[case]
    with pytest.raises(ValidationError) as caught:
        ClusterSpec.model_validate({**MINIMAL, **change})
    assert field in {".".join(map(str, error["loc"])) for error in caught.value.errors()}


def test_a_manifest_survives_the_round_trip() -> None:
    body = {
        "apiVersion": names.API_VERSION,
        "kind": "InferenceCluster",
        "metadata": {"name": "chat", "uid": "u", "generation": 3},
        "spec": MINIMAL,
        "status": {
            "activeFlips": [
                {
                    "name": "f", "pod": "chat-w0", "podUID": "p", "from": "in", "to": "out", "step": "Draining",
                    "started": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:02:00Z",
                }
            ]
        },
    }  # fmt: skip
    cluster = InferenceCluster.model_validate(body)
    assert cluster.status.observed_generation == -1
    again = cluster.manifest()
    flip = again["status"]["activeFlips"][0]
    assert (flip["podUID"], flip["from"], flip["to"], flip["bootID"]) == ("p", "in", "out", "")
    assert flip["started"] == "2026-01-01T00:00:00Z"
    assert InferenceCluster.model_validate(again) == cluster


def test_nothing_of_a_spec_can_be_changed() -> None:
    spec = ClusterSpec.model_validate(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        spec.pools = ()  # type: ignore[misc]


def test_the_sample_manifests_are_read() -> None:
    quickstart = yaml.safe_load((ROOT / "manifests" / "quickstart.yaml").read_text())
    spec = InferenceCluster.model_validate(quickstart).spec
    assert [(pool.role.worker, pool.replicas) for pool in spec.pools] == [("prefill", 2), ("decode", 1)]
    flip = yaml.safe_load((ROOT / "manifests" / "flip.yaml").read_text())
    flip["metadata"]["name"] = f"{flip['metadata']['generateName']}x"
    asked = InferenceFlip.model_validate(flip).spec
    assert asked.cluster_name == quickstart["metadata"]["name"]
    assert asked.target_pool in [pool.name for pool in spec.pools]


def test_the_readme_shows_the_quickstart() -> None:
    shown = yaml.safe_load((ROOT / "README.md").read_text().partition("```yaml\n")[2].partition("```")[0])
    spec = InferenceCluster.model_validate(shown).spec
    quickstart = yaml.safe_load((ROOT / "manifests" / "quickstart.yaml").read_text())
    assert shown["metadata"] == quickstart["metadata"]
    whole = InferenceCluster.model_validate(quickstart).spec
    assert (spec.model.uri, spec.model.name, spec.pools) == (whole.model.uri, whole.model.name, whole.pools)
    assert (spec.elasticity.mode, spec.elasticity.policy) == (whole.elasticity.mode, whole.elasticity.policy)
