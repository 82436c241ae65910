"""The generated CRDs: current, structural, and written as the API server wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from headrace_core.api import crdgen, names
from headrace_core.api.parts import Model

ROOT = Path(__file__).parents[2]
CRDS = {resource.kind: crdgen.crd(resource) for resource in crdgen.RESOURCES}


def schema(kind: str) -> dict[str, Any]:
    """The root of a kind's schema."""
    root: dict[str, Any] = CRDS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return root


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with its path."""
    yield path, node
    for name, part in node.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


ALL_NODES = [(f"{kind}{path}", node) for kind in CRDS for path, node in nodes(schema(kind))]
SPEC_NODES = [(path, node) for path, node in ALL_NODES if ".spec" in path]


def test_the_files_are_current() -> None:
    assert crdgen.stale(ROOT / "crds") == []


def test_check_fails_where_a_file_is_changed_missing_or_left_over(tmp_path: Path) -> None:
    assert crdgen.main([str(tmp_path)]) == 0
    assert crdgen.main(["--check", str(tmp_path)]) == 0
    first, second = sorted(tmp_path.glob("*.yaml"))
    first.write_text(first.read_text() + "\n")
    second.unlink()
    (tmp_path / "old.yaml").write_text("")
    assert crdgen.stale(tmp_path) == sorted([first.name, second.name, "old.yaml"])
    assert crdgen.main(["--check", str(tmp_path)]) == 1


def test_the_chart_installs_these_files() -> None:
    assert (ROOT / "charts" / "headrace" / "files" / "crds").resolve() == ROOT / "crds"


@pytest.mark.parametrize(("path", "node"), ALL_NODES, ids=[path for path, _ in ALL_NODES])
def test_every_node_is_structural(path: str, node: dict[str, Any]) -> None:
    assert isinstance(node["type"], str)
    assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "additionalProperties"} & set(node)


def test_every_text_and_list_has_a_maximum() -> None:
    """A rule may only read what is bounded, and the cost of a rule grows with the lists around it."""
    without = [
        path
        for path, node in SPEC_NODES
        if (node["type"] == "string" and "maxLength" not in node and "enum" not in node)
        or (node["type"] == "array" and "maxItems" not in node)
    ]
    assert without == []


def test_every_field_has_a_description() -> None:
    bare = [
        path
        for path, node in ALL_NODES
        if "description" not in node
        and not path.endswith((".apiVersion", ".kind", ".metadata", ".metadata.name", ".template.spec"))
    ]
    assert bare == []


def test_a_parent_s_default_holds_all_of_its_parts_defaults() -> None:
    """Defaults are filled in from the outside: a parent's incomplete one leaves a rule without the inner value."""
    for path, node in SPEC_NODES:
        if node["type"] != "object" or "default" not in node:
            continue
        inner = {name: part["default"] for name, part in node["properties"].items() if "default" in part}
        assert {**inner, **node["default"]} == node["default"], path
        assert node["default"] == {**node["default"], **inner}, path


def test_rules_have_static_messages() -> None:
    rules = [rule for _, node in ALL_NODES for rule in node.get("x-kubernetes-validations", [])]
    assert rules
    assert all(rule["message"] and "messageExpression" not in rule for rule in rules)


def test_lists_of_named_things_are_maps() -> None:
    keys = {path: node.get("x-kubernetes-list-map-keys") for path, node in ALL_NODES if node["type"] == "array"}
    assert keys == {
        "InferenceCluster.spec.engine.args": ["name"],
        "InferenceCluster.spec.engine.env": ["name"],
        "InferenceCluster.spec.pools": ["name"],
        "InferenceCluster.status.conditions": ["type"],
        "InferenceCluster.status.pools": ["name"],
        "InferenceCluster.status.activeFlips": ["name"],
        "InferenceFlip.status.conditions": ["type"],
    }


@pytest.mark.parametrize("kind", CRDS)
def test_status_is_a_subresource_that_starts_at_minus_one(kind: str) -> None:
    assert CRDS[kind]["spec"]["versions"][0]["subresources"] == {"status": {}}
    assert schema(kind)["properties"]["status"]["default"] == {"observedGeneration": -1}


def test_columns() -> None:
    columns = {
        kind: [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]
        for kind, crd in CRDS.items()
    }
    assert columns[names.Kind.CLUSTER] == ["Ready", "Prefill", "Decode", "Flips", "Model", "Reason", "Age"]
    assert columns[names.Kind.FLIP][:5] == ["Cluster", "Pod", "From", "To", "Outcome"]


@pytest.mark.parametrize("kind", CRDS)
def test_columns_show_fields_that_exist(kind: str) -> None:
    known = {path.removeprefix(f"{kind}") for path, _ in ALL_NODES if path.startswith(kind)}
    for column in CRDS[kind]["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = column["jsonPath"]
        field = ".".join(path.split("[?")[0].split(".")) if "[?" in path else path
        assert field in known | {".metadata.creationTimestamp"}, path


class Union(Model):
    """A part that no structural schema can say."""

    either: int | str
    """One or the other."""


class Free(Model):
    """A map of any keys."""

    any_key: Annotated[dict[str, str], Field(max_length=3)]
    """Whatever."""


@pytest.mark.parametrize(("model", "field"), [(Union, "either"), (Free, "anyKey")])
def test_what_is_not_structural_is_refused_with_its_path(model: type[Model], field: str) -> None:
    generated = model.model_json_schema(by_alias=True)
    with pytest.raises(crdgen.NotStructuralError, match=rf"root\.{field}"):
        crdgen.structural(generated, generated.get("$defs", {}), "root")
