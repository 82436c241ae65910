"""docs/operator.md names everything that a user can meet: reasons, outcomes, conditions and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e.cluster import prometheus
from headrace_core.api.names import Condition, Metric, Outcome, Reason

TEXT = (Path(__file__).parents[2] / "docs" / "operator.md").read_text()
METRICS = [value for name, value in vars(Metric).items() if name.startswith("OPERATOR_")]


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    assert f"`{reason.value}`" in TEXT


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_explained(metric: str) -> None:
    assert f"`{metric}" in TEXT


def test_every_outcome_and_condition_of_a_cluster_has_its_rows() -> None:
    for outcome in Outcome:
        assert f"\n| {outcome.value} |" in TEXT
    for condition in (Condition.ACCEPTED, Condition.READY, Condition.PROGRESSING, Condition.DEGRADED):
        assert f"\n| {condition.value} |" in TEXT


def test_the_scrape_configuration_is_that_of_the_tests() -> None:
    shown = yaml.safe_load(TEXT.partition("```yaml\n")[2].partition("```")[0])
    (config,) = [item for item in prometheus.in_cluster({}) if item["kind"] == "ConfigMap"]
    assert shown["scrape_configs"] == yaml.safe_load(config["data"]["prometheus.yml"])["scrape_configs"]
