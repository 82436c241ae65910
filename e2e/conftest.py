"""The cluster that all end-to-end tests share, and a namespace for each that wants one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from e2e.cluster.api import Cluster, open_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster that the variable CLUSTER asks for, up for the whole run; its logs stay behind."""
    opened = open_cluster(f"test-{os.getpid()}" if os.environ.get("CLUSTER", "local") == "local" else "test")
    opened.up()
    yield opened
    opened.down()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace, which must really go at the end of the test."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.ensure_namespace(name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait", "--timeout=60s")


@pytest.fixture(autouse=True)
def _only_where_it_is_possible(request: pytest.FixtureRequest) -> None:
    """Skips a test marked `needs(ABILITY, ...)` on a cluster that lacks one."""
    marker = request.node.get_closest_marker("needs")
    if marker is None:
        return
    lacking = [a.name for a in marker.args if a not in request.getfixturevalue("cluster").abilities]
    if lacking:
        pytest.skip(f"this cluster cannot: {', '.join(lacking)}")


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker."""
    config.addinivalue_line("markers", "needs(*abilities): what a test does to the cluster (e2e.cluster.api.Ability)")
