"""The chart against the code that it starts, without helm: what it sets is what the operator reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_core.api import names
from headrace_operator.settings import Settings

CHART = Path(__file__).parents[2] / "charts" / "headrace"
DEPLOYMENT = (CHART / "templates" / "deployment.yaml").read_text()
TEMPLATES = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# The address of a pod on which all share one network is not to be configured; the times of a flip and the switch for
# tests are for whoever knows the code.
NOT_IN_THE_CHART = {"FLIP_POLL_SECONDS", "WORKER_TIMEOUT_SECONDS", "FLIP_GRACE_SECONDS", "HEADRACE_CRASH_AFTER"}


def test_the_operator_gets_the_variables_that_it_reads() -> None:
    set_there = set(re.findall(r"name: ([A-Z][A-Z_]+)", DEPLOYMENT))
    read = {field.metadata["env"] for field in dataclasses.fields(Settings)}
    assert set_there == read - NOT_IN_THE_CHART


def paths(node: Any, prefix: str = "") -> set[str]:
    """The paths of all values, objects of free keys as one."""
    if not isinstance(node, dict) or not node:
        return {prefix}
    return set().union(*(paths(part, f"{prefix}.{key}" if prefix else key) for key, part in node.items()))


def schema_paths(node: Any, prefix: str = "") -> set[str]:
    """The paths of all values that the schema knows."""
    if "properties" not in node:
        return {prefix}
    parts = node["properties"].items()
    return set().union(*(schema_paths(part, f"{prefix}.{key}" if prefix else key) for key, part in parts))


def test_schema_and_values_say_the_same() -> None:
    free = {"resources.requests.cpu", "resources.requests.memory", "resources.limits.memory"}
    of_helm = {"global"}
    assert paths(VALUES) - free | {"resources"} == schema_paths(SCHEMA) - of_helm


def test_every_value_is_used() -> None:
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", TEMPLATES))
    used |= {f"{path}.{part}" for path in used for part in ("repository", "tag")}
    assert {path for path in schema_paths(SCHEMA) if path not in used} == {"global"}


def test_every_value_has_a_comment() -> None:
    """A comment above it, or above the block of lines that it stands in."""
    bare, commented = [], False
    for line in (CHART / "values.yaml").read_text().splitlines():
        if line.lstrip().startswith("#"):
            commented = True
        elif not line.strip():
            commented = False
        elif not line.endswith(":") and not commented and not line.startswith("  requests", 0):
            bare.append(line)
    assert bare == []


def test_the_defaults_are_the_settings_own() -> None:
    defaults = {field.metadata["env"]: field.default for field in dataclasses.fields(Settings)}
    chart = {
        "LEASE_NAME": VALUES["lease"]["name"],
        "LEASE_DURATION_SECONDS": VALUES["lease"]["durationSeconds"],
        "LEASE_RENEW_DEADLINE_SECONDS": VALUES["lease"]["renewDeadlineSeconds"],
        "LEASE_RETRY_SECONDS": VALUES["lease"]["retrySeconds"],
        "PROMETHEUS_TIMEOUT_SECONDS": VALUES["prometheus"]["timeoutSeconds"],
        "PROMETHEUS_MAX_AGE_SECONDS": VALUES["prometheus"]["maxAgeSeconds"],
        "TICK_SECONDS": VALUES["tickSeconds"],
        "CONCURRENT_RECONCILES": VALUES["concurrentReconciles"],
        "LOG_LEVEL": VALUES["logLevel"],
        "IMAGE_PULL_POLICY": VALUES["image"]["pullPolicy"],
        "METRICS_PORT": names.OPERATOR_METRICS_PORT,
        "HEALTH_PORT": names.OPERATOR_HEALTH_PORT,
    }
    assert {name: defaults[name] for name in chart} == chart


@pytest.mark.parametrize("port", [names.OPERATOR_METRICS_PORT, names.OPERATOR_HEALTH_PORT])
def test_the_ports_are_the_operator_s(port: int) -> None:
    assert f"containerPort: {port}" in DEPLOYMENT
    assert f'value: "{port}"' in DEPLOYMENT
