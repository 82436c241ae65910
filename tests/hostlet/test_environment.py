"""Environment variables: expansion, references and the errors of references to nothing."""

from __future__ import annotations

import base64

import pytest

from e2e.cluster.hostlet.environment import (
    ConfigError,
    PodFacts,
    Sources,
    container_env,
    expand,
    format_map,
    service_env,
)

POD = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "1"}},
    "spec": {"nodeName": "node", "containers": [{"name": "c", "resources": {"limits": {"memory": "1Gi"}}}]},
}
FACTS = PodFacts("127.0.0.5", "127.0.0.1", {"cpu": "8", "memory": "4Gi"})
OBJECTS = {
    ("Secret", "s"): {"data": {"k": base64.b64encode(b"value").decode()}},
    ("ConfigMap", "m"): {"data": {"k": "plain"}, "binaryData": {"b": base64.b64encode(b"\x00").decode()}},
}
SOURCES = Sources(POD, FACTS, lambda kind, name: OBJECTS.get((kind, name)))


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(MISSING)", "$(MISSING)"),
        ("$(A", "$(A"),
        ("$A $", "$A $"),
        ("$()", "$()"),
    ],
)
def test_expansion(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expanded


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        ("secret", {"secretKeyRef": {"name": "s", "key": "k"}}, "value"),
        ("config map", {"configMapKeyRef": {"name": "m", "key": "k"}}, "plain"),
        ("label", {"fieldRef": {"fieldPath": "metadata.labels['a']"}}, "1"),
        ("no such label", {"fieldRef": {"fieldPath": "metadata.labels['b']"}}, ""),
        ("address", {"fieldRef": {"fieldPath": "status.podIP"}}, "127.0.0.5"),
        ("limit of the node", {"resourceFieldRef": {"resource": "limits.cpu"}}, "8"),
        ("other container", {"resourceFieldRef": {"containerName": "c", "resource": "limits.memory"}}, "1073741824"),
        ("optional", {"secretKeyRef": {"name": "none", "key": "k", "optional": True}}, None),
    ],
)
def test_references(name: str, source: dict[str, object], value: str | None) -> None:
    container = {"name": "d", "env": [{"name": "X", "valueFrom": source}]}
    assert container_env(SOURCES, container, {}).get("X") == value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"secretKeyRef": {"name": "none", "key": "k"}}, 'secret "none" not found'),
        ({"secretKeyRef": {"name": "s", "key": "z"}}, "couldn't find key z in Secret n/s"),
        ({"configMapKeyRef": {"name": "none", "key": "k"}}, 'configmap "none" not found'),
        ({"fieldRef": {"fieldPath": "spec.unknown"}}, "fieldPath 'spec.unknown' is not offered"),
    ],
)
def test_references_to_nothing_are_errors(source: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        container_env(SOURCES, {"name": "d", "env": [{"name": "X", "valueFrom": source}]}, {})


def test_later_variables_win_and_services_come_first() -> None:
    container = {
        "name": "d",
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}],
        "env": [{"name": "k", "value": "own $(P_k) $(SVC)"}, {"name": "SVC", "value": "mine"}],
    }
    env = container_env(SOURCES, container, {"SVC": "theirs"})
    assert env == {"P_k": "plain", "P_b": "\x00", "k": "own plain theirs", "SVC": "mine"}


def test_maps_are_written_sorted_and_quoted() -> None:
    assert format_map({"b": 'q"\\', "a": "1\n"}) == 'a="1\\n"\nb="q\\"\\\\"'


def test_services_of_other_namespaces_are_no_variables() -> None:
    spec = {"clusterIP": "127.9.0.1", "ports": [{"port": 80, "protocol": "TCP"}]}
    services = [{"metadata": {"name": f"web-{ns}", "namespace": ns}, "spec": spec} for ns in ("n", "other")]
    env = service_env(services, "n", ("127.0.0.1", 6443), links=True)
    assert env["WEB_N_SERVICE_HOST"] == "127.9.0.1"
    assert env["KUBERNETES_SERVICE_PORT"] == "6443"
    assert not any(key.startswith("WEB_OTHER") for key in env)
    assert not any(key.startswith("WEB") for key in service_env(services, "n", ("h", 1), links=False))
