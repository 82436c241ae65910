"""The chart through helm: what renders, what the values' schema refuses, and what the operator may do."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from e2e.cluster.api import CHART, OPERATOR_NAMESPACE, Cluster
from e2e.cluster.progress import ClusterError

ACCOUNT = f"system:serviceaccount:{OPERATOR_NAMESPACE}:headrace-operator"


def rendered(cluster: Cluster, **values: str) -> list[dict[str, Any]]:
    """The chart's objects for some values, without installing anything."""
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    text = cluster.helm("template", "headrace", str(CHART), "-n", OPERATOR_NAMESPACE, *settings)
    return [item for item in yaml.safe_load_all(text) if item]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of one kind."""
    return [item for item in objects if item["kind"] == kind]


def test_the_default_serves_all_namespaces(headrace: Cluster) -> None:
    objects = rendered(headrace)
    assert len(of_kind(objects, "CustomResourceDefinition")) == 2
    assert [role["metadata"]["namespace"] for role in of_kind(objects, "Role")] == [OPERATOR_NAMESPACE]
    resources = {name for rule in of_kind(objects, "ClusterRole")[0]["rules"] for name in rule["resources"]}
    assert {"nodes", "pods", "inferenceclusters"} <= resources


def test_with_named_namespaces_the_operator_has_no_right_elsewhere(headrace: Cluster) -> None:
    objects = rendered(headrace, watchNamespaces="{one,two}")
    assert of_kind(objects, "ClusterRole")[0]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    ]
    roles = {role["metadata"]["namespace"]: len(role["rules"]) for role in of_kind(objects, "Role")}
    assert roles.keys() == {"one", "two", OPERATOR_NAMESPACE}
    assert roles["one"] == roles["two"] > roles[OPERATOR_NAMESPACE]


def test_crds_can_be_left_to_somebody_else(headrace: Cluster) -> None:
    assert of_kind(rendered(headrace, **{"crds.install": "false"}), "CustomResourceDefinition") == []


# values -> the path that the refusal names
BAD_VALUES = {
    "unknown value": ("replicaCount=2", "replicaCount"),
    "unknown part": ("image.tags=1", "tags"),
    "negative replicas": ("replicas=-1", "replicas"),
    "pull policy": ("image.pullPolicy=Sometimes", "pullPolicy"),
    "prometheus without scheme": ("prometheus.url=prometheus:9090", "prometheus/url"),
    "log level": ("logLevel=LOUD", "logLevel"),
    "no lease": ("lease.name=", "lease/name"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_refused_with_its_name(headrace: Cluster, case: str) -> None:
    setting, path = BAD_VALUES[case]
    with pytest.raises(ClusterError) as caught:
        headrace.helm("template", "headrace", str(CHART), "--set", setting)
    assert path in str(caught.value)


ALLOWED = [
    "list inferenceclusters",
    "patch inferenceclusters --subresource=status -n default",
    "create inferenceflips",
    "patch pods",
    "delete pods",
    "create podtemplates",
    "patch poddisruptionbudgets.policy",
    "create rolebindings.rbac.authorization.k8s.io",
    "list nodes",
    "get leases.coordination.k8s.io/headrace-operator -n headrace-system",
]
DENIED = [
    "create inferenceclusters",
    "patch inferenceclusters",
    "delete inferenceclusters",
    "list secrets",
    "patch secrets",
    "create pods --subresource=exec -n default",
    "patch nodes",
    "get configmaps",
    "create clusterroles.rbac.authorization.k8s.io",
    "escalate roles.rbac.authorization.k8s.io",
    "bind roles.rbac.authorization.k8s.io",
    "impersonate users",
    "get customresourcedefinitions.apiextensions.k8s.io",
    "update leases.coordination.k8s.io/other -n headrace-system",
    "get leases.coordination.k8s.io -n default",
]


@pytest.mark.parametrize("right", [*ALLOWED, *DENIED])
def test_what_the_operator_may_do(headrace: Cluster, right: str) -> None:
    verb, what, *where = right.split()
    place = where or ["-n", "default"]
    done = headrace.try_kubectl("auth", "can-i", verb, what, *place, f"--as={ACCOUNT}")
    assert done.stdout.strip() == ("yes" if right in ALLOWED else "no"), done.stderr
