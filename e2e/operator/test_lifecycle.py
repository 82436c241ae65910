"""Create, change, delete: what the operator makes of an InferenceCluster, and that nothing is left or written twice."""

from __future__ import annotations

import json
import time

import pytest

from e2e.deployed import until
from e2e.operator.conftest import Light
from e2e.operator.process import Operator
from headrace_core.api import names

KINDS = "pods,deployments,services,podtemplates,serviceaccounts,secrets,roles,rolebindings,poddisruptionbudgets"
QUIET_S = 7.0
"""More than three ticks of the operator."""


def ours(light: Light) -> set[str]:
    """Kind and name of all that carries the cluster's label."""
    found = light.cluster.kubectl(
        "get", KINDS, "-n", light.namespace, "-l", f"{names.Label.CLUSTER}={light.name}", "-o", "name"
    )
    return set(found.split())


def gateway_of(light: Light) -> list[str]:
    return [name for name in ours(light) if "gateway" in name]


def versions(light: Light) -> dict[str, str]:
    """Resource version of every object in the namespace but the Lease and the Events."""
    kinds = f"{KINDS},{names.Plural.CLUSTER},{names.Plural.FLIP}"
    found = json.loads(light.cluster.kubectl("get", kinds, "-n", light.namespace, "-o", "json"))
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in found["items"]
    }


def accepted(light: Light) -> dict[str, str]:
    said: dict[str, str] = light.deployed.condition(names.Condition.ACCEPTED)
    return said


def test_create_change_delete(light: Light, operator: Operator) -> None:
    operator.start()
    light.apply(gateway={"mode": "Managed", "template": light_gateway(light)})
    light.wait_ready()
    made = ours(light)
    assert sorted(light.pods()) == [light.pod(slot) for slot in range(3)]
    for kind in ("deployment.apps", "service", "serviceaccount", "role.rbac.authorization.k8s.io"):
        assert f"{kind}/{light.name}-gateway" in made
    budget = light.cluster.get("pdb", f"{light.name}-prefill", namespace=light.namespace)
    assert budget["spec"]["minAvailable"] == 1
    assert budget["status"]["expectedPods"] == 2

    light.apply(pools=pools_of(light, prefill=3))
    light.wait_ready()
    assert sorted(light.pods()) == [light.pod(slot) for slot in range(4)]
    until("the gateway to go", lambda: not gateway_of(light), timeout_s=30, seen=lambda: str(gateway_of(light)))

    light.apply(pools=pools_of(light, prefill=1))
    until("one prefill worker to be left", lambda: len(light.pods()) == 2, timeout_s=30, seen=light.in_words)

    light.cluster.kubectl("delete", names.Plural.CLUSTER, light.name, "-n", light.namespace, "--timeout=30s")
    until("nothing to be left", lambda: not ours(light), timeout_s=60, seen=lambda: str(ours(light)))


def light_gateway(light: Light) -> dict[str, object]:
    """The light worker stands in for the gateway's program: it answers the same probes."""
    container = {
        "name": "gateway",
        "command": light.command,
        "env": [{"name": "HEADRACE_PORT", "value": "8080"}],
    }
    return {"spec": {"containers": [container]}}


def pools_of(light: Light, prefill: int = 2, **template: object) -> list[dict[str, object]]:
    pools: list[dict[str, object]] = light.manifest()["spec"]["pools"]
    pools[0]["replicas"] = prefill
    pools[0].update(template)
    return pools


def test_a_quiet_cluster_is_written_to_by_nobody(light: Light, operator: Operator) -> None:
    light.apply()
    operator.start()
    light.wait_ready()
    time.sleep(2)
    before = versions(light)
    time.sleep(QUIET_S)
    assert versions(light) == before


def test_kopf_leaves_no_trace_on_our_objects(light: Light, operator: Operator) -> None:
    light.apply()
    operator.start()
    light.wait_ready()
    flip = light.ask_for_flip(0, "decode")
    light.finished(flip)
    for resource, name in ((names.Plural.CLUSTER, light.name), (names.Plural.FLIP, flip)):
        shown = light.cluster.kubectl(
            "get", resource, name, "-n", light.namespace, "-o", "json", "--show-managed-fields"
        )
        meta = json.loads(shown)["metadata"]
        managers = {field["manager"] for field in meta["managedFields"]}
        assert managers <= {"kubectl", names.MANAGER}, managers
        assert "finalizers" not in meta
        assert not [mark for mark in meta.get("annotations", {}) if "kopf" in mark]


REFUSED = {
    "a field that does not exist": (
        {"spec": {"containers": [{"name": "worker", "imagee": "x"}]}},
        "TemplateRefused",
        "imagee",
    ),
    "a quantity that is none": (
        {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"memory": "lots"}}}]}},
        "TemplateRefused",
        "quantities must match",
    ),
    "a field of the operator's": (
        {"spec": {"containers": [{"name": "worker", "image": "mine"}]}},
        "TemplateConflict",
        'containers[name="worker"].image',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_template_is_not_accepted_and_the_pods_stay(light: Light, operator: Operator, case: str) -> None:
    template, reason, words = REFUSED[case]
    light.apply()
    operator.start()
    light.wait_ready()
    before = {name: pod["metadata"]["uid"] for name, pod in light.pods().items()}

    light.apply(pools=pools_of(light, template=template))
    until("the refusal", lambda: accepted(light)["status"] == "False", timeout_s=20, seen=light.in_words)
    said = accepted(light)
    assert said["reason"] == reason
    assert "spec.pools[0].template" in said["message"]
    assert words in said["message"]
    time.sleep(3)
    assert {name: pod["metadata"]["uid"] for name, pod in light.pods().items()} == before

    light.apply()
    light.wait_ready()


def test_a_user_template_is_merged_by_key(light: Light, operator: Operator) -> None:
    operator.start()
    light.apply()
    light.wait_ready()
    (container,) = light.pods()[light.pod(0)]["spec"]["containers"]
    names_of = [variable["name"] for variable in container["env"]]
    assert "LIGHT_DRAIN_FILE" in names_of
    assert names.Env.MODEL in names_of
    assert container["image"] == "test/shell"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert container["readinessProbe"]["periodSeconds"] == 1


def test_a_change_rolls_out_one_worker_at_a_time(light: Light, operator: Operator) -> None:
    light.apply()
    operator.start()
    light.wait_ready()
    before = {pod["metadata"]["uid"] for pod in light.pods().values()}
    fewest = [9]

    def rolled() -> bool:
        pods = light.deployed.workers()
        fewest[0] = min(fewest[0], sum(pod.ready and pod.role == "prefill" for pod in pods))
        return not before & {pod.uid for pod in pods} and light.is_settled()

    light.apply(engine={"image": "test/shell", "env": [{"name": "ROUND", "value": "2"}]})
    until("all workers to be new", rolled, timeout_s=90, seen=light.in_words, every_s=0.1)
    assert fewest == [1]
    (container,) = light.pods()[min(light.pods())]["spec"]["containers"]
    assert {"name": "ROUND", "value": "2"} in container["env"]


def test_a_foreign_budget_is_reported(light: Light, operator: Operator) -> None:
    light.apply()
    operator.start()
    light.wait_ready()
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "theirs"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {names.Label.ROLE: "prefill"}}},
    }
    light.cluster.apply(budget, namespace=light.namespace)

    def reported() -> bool:
        said = light.deployed.condition(names.Condition.DEGRADED)
        return said["reason"] == "ForeignDisruptionBudget" and "theirs" in said["message"]

    until("the budget to be reported", reported, timeout_s=20, seen=light.in_words)
    light.cluster.delete(budget, namespace=light.namespace)
    until("the report to end", lambda: not reported(), timeout_s=20, seen=light.in_words)


def test_a_flip_of_a_cluster_that_is_not_there_is_refused(light: Light, operator: Operator) -> None:
    operator.start()
    name = f"{light.name}-lost"
    light.deployed.ask_for_flip(name, light.pod(0), "decode")
    (flip,) = until("the refusal", light.deployed.finished_flips, timeout_s=20, seen=operator.log_tail)
    light.cluster.kubectl("delete", names.Plural.FLIP, name, "-n", light.namespace)
    assert flip.outcome == "Refused"
