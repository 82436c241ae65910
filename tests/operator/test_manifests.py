"""What pods, gateways and budgets are made of, and which defaults a user's template takes over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_core.api import names
from headrace_core.api.names import Env, Label, Role
from headrace_operator.errors import SettingsError
from headrace_operator.handlers import settings as kopf_settings
from headrace_operator.kube import Api
from headrace_operator.manifests import gateway, worker
from headrace_operator.manifests.shared import Images, revision
from headrace_operator.plan.view import ClusterSpec, PoolSpec
from headrace_operator.reflector import parse
from headrace_operator.settings import Settings, from_environment
from tests.operator.builders import World, pool

IMAGES = Images(worker="w:1", gateway="g:1", pull_policy="IfNotPresent")


def cluster(**changes: Any) -> ClusterSpec:
    return replace(World().look().cluster, **changes)


def prefill(**changes: Any) -> PoolSpec:
    return pool("prefill", Role.PREFILL, **changes)


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found  # type: ignore[no-any-return]


def environment(template: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(template)["env"]}


def test_a_worker_pod_says_who_it_is() -> None:
    base = worker.base_template(cluster(), prefill(), IMAGES)
    body = worker.pod(cluster(), 3, base, "abc")
    meta = body["metadata"]
    assert meta["name"] == "chat-w3"
    assert meta["labels"][Label.ROLE] == meta["labels"][Label.LLMD_ROLE] == "prefill"
    assert (meta["labels"][Label.POOL], meta["labels"][Label.REVISION]) == ("prefill", "abc")
    assert meta["annotations"] == {names.Annotation.EPOCH: "0", names.Annotation.ORIGIN_POOL: "prefill"}
    (owner,) = meta["ownerReferences"]
    assert (owner["controller"], owner["uid"]) == (True, "cluster-uid")
    said = environment(base)
    assert (said[Env.ROLE], said[Env.MODEL], said[Env.ENGINE_ARGS]) == ("prefill", "hf://org/model", "[]")
    assert base["spec"]["automountServiceAccountToken"] is False
    assert base["spec"]["enableServiceLinks"] is False


def test_a_read_back_pod_is_the_pod_that_was_made() -> None:
    body = worker.pod(cluster(), 0, worker.base_template(cluster(), prefill(), IMAGES), "abc")
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "creationTimestamp": "2026-01-01T00:00:00Z"}
    seen = parse(body)
    assert (seen.cluster, seen.component, seen.pool, seen.role) == ("chat", "worker", "prefill", "prefill")
    assert (seen.revision, seen.epoch, seen.origin_pool, seen.owner_uid) == ("abc", 0, "prefill", "cluster-uid")


@pytest.mark.parametrize(("tensor", "pipeline", "gpus", "volumes"), [(1, 1, "1", 1), (4, 2, "8", 2)])
def test_gpus_follow_the_shape(tensor: int, pipeline: int, gpus: str, volumes: int) -> None:
    base = worker.base_template(cluster(), prefill(tensor=tensor, pipeline=pipeline), IMAGES)
    assert container(base)["resources"] == {
        "requests": {"nvidia.com/gpu": gpus},
        "limits": {"nvidia.com/gpu": gpus},
    }
    assert len(base["spec"]["volumes"]) == volumes


TAKEN_OVER: dict[str, tuple[dict[str, Any], str, bool]] = {
    "another accelerator": ({"resources": {"limits": {"amd.com/gpu": 1}}}, "resources", True),
    "a claim": ({"resources": {"claims": [{"name": "gpu"}]}}, "resources", True),
    "memory only": ({"resources": {"limits": {"memory": "1Gi"}}}, "resources", False),
    "a probe": ({"startupProbe": {"periodSeconds": 1}}, "startupProbe", True),
    "nothing": ({}, "livenessProbe", False),
}


@pytest.mark.parametrize("case", TAKEN_OVER)
def test_a_default_that_the_user_sets_is_left_out(case: str) -> None:
    said, key, taken = TAKEN_OVER[case]
    template = {"spec": {"containers": [{"name": "worker", **said}]}}
    base = worker.base_template(cluster(), prefill(template=template), IMAGES)
    assert (key not in container(base)) is taken


def test_a_default_of_the_pod_is_left_out_too() -> None:
    base = worker.base_template(cluster(), prefill(template={"spec": {"terminationGracePeriodSeconds": 5}}), IMAGES)
    assert "terminationGracePeriodSeconds" not in base["spec"]
    assert "securityContext" in base["spec"]


def test_a_revision_changes_with_either_part() -> None:
    base = worker.base_template(cluster(), prefill(), IMAGES)
    other = worker.base_template(cluster(), prefill(), replace(IMAGES, worker="w:2"))
    hashes = {
        revision(base, {}), revision(other, {}), revision(base, {"spec": {"hostNetwork": True}}),
    }  # fmt: skip
    assert len(hashes) == 3
    assert revision(base, {}) == revision(worker.base_template(cluster(), prefill(), IMAGES), {})


def test_replicas_and_flips_change_no_revision() -> None:
    made = worker.base_template(cluster(), prefill(), IMAGES)
    assert made == worker.base_template(cluster(generation=9), prefill(replicas=7), IMAGES)


def test_the_gateway_sees_pods_and_nothing_else() -> None:
    (_, role, binding) = gateway.access(cluster())
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["subjects"][0]["name"] == "chat-gateway"


def test_the_service_finds_the_gateway_and_no_worker() -> None:
    wanted = gateway.service(cluster())["spec"]["selector"].items()
    front = gateway.base_template(cluster(), IMAGES)["metadata"]["labels"].items()
    back = worker.base_template(cluster(), prefill(), IMAGES)["metadata"]["labels"].items()
    assert wanted <= front
    assert not wanted <= back


def test_a_budget_covers_its_role_only() -> None:
    wanted = worker.disruption_budget(cluster(), Role.PREFILL, 2)["spec"]
    assert wanted["minAvailable"] == 2
    labels = wanted["selector"]["matchLabels"].items()
    of = {
        each.name: worker.base_template(cluster(), each, IMAGES)["metadata"]["labels"].items()
        for each in cluster().pools
    }
    assert labels <= of["prefill"]
    assert not labels <= of["decode"]


def test_kopf_writes_nothing() -> None:
    chosen = kopf_settings()
    assert chosen.posting.enabled is False
    assert chosen.persistence.consistency_timeout == 0
    assert chosen.scanning.disabled is True


def test_settings_from_the_environment() -> None:
    read = from_environment({"WATCH_NAMESPACES": "a, b,", "TICK_SECONDS": "3", "PROMETHEUS_URL": ""})
    assert (read.watch_namespaces, read.tick_s, read.prometheus_url) == (("a", "b"), 3.0, "")
    assert Settings().watch_namespaces == ()
    assert Settings().crash_after == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TICK_SECONDS", "0"), ("TICK_SECONDS", "soon"), ("METRICS_PORT", "70000"), ("PROMETHEUS_URL", "prometheus"),
        ("CONCURRENT_RECONCILES", "0"), ("CONCURRENT_RECONCILES", "many"), ("LEASE_DURATION_SECONDS", "5"),
        ("LOG_LEVEL", "LOUD"), ("IMAGE_PULL_POLICY", "Sometimes"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named_with_what_is_expected(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}.*(give|start|must hold)"):
        from_environment({name: value})


@pytest.mark.parametrize("kubeconfig", ["", "/nowhere/config"])
async def test_without_a_way_to_the_api_server_the_remedy_is_named(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match=f"KUBECONFIG='{kubeconfig}'.*name a"):
        await Api.connect({"KUBECONFIG": kubeconfig})
