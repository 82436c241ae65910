"""The cluster that all end-to-end tests share, a namespace for each that wants one, and what a failed test leaves."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Generator, Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from e2e.cluster.api import Cluster, open_cluster

FAILED = pytest.StashKey[bool]()
TRACES = pytest.StashKey[list[str]]()

LOG_LINES = 200
"""Lines of each pod's log that a failed test keeps."""

LONGEST_FIRST = ["e2e/tests", "e2e/operator", "e2e/local", "e2e/worker"]
"""The folders of end-to-end tests. Those of one folder share what is slow to start, so one process runs them all."""


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster that the variable CLUSTER asks for, up for the whole run; its logs stay if a test failed."""
    opened = open_cluster("test" if os.environ.get("CLUSTER") == "current" else f"test-{os.getpid()}")
    all_is_well = False
    try:
        opened.up()
        yield opened
        all_is_well = request.session.testsfailed == 0
    finally:
        opened.down()
        if all_is_well:
            opened.discard_logs()
        else:
            request.config.stash[TRACES].append(f"the cluster's logs: {opened.logs_dir}")


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace, which must really go at the end of the test."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.ensure_namespace(name)
    yield name
    if request.node.stash.get(FAILED, False):
        request.config.stash[TRACES].append(f"{request.node.name}: {_keep_traces(cluster, name, request.node.name)}")
    cluster.kubectl("delete", "namespace", name, "--wait", "--timeout=60s")


def _keep_traces(cluster: Cluster, namespace: str, test: str) -> str:
    """Writes a namespace's objects, events and pod logs to a file and returns its path."""
    custom = cluster.kubectl("api-resources", "--namespaced", "--api-group=serving.headrace.dev", "-o", "name").split()
    kinds = ",".join([*custom, "events", "pods", "deployments", "services", "poddisruptionbudgets", "leases"])
    parts = [cluster.kubectl("get", kinds, "-n", namespace, "-o", "yaml", check=False)]
    for pod in cluster.list("pods", namespace=namespace):
        name = pod["metadata"]["name"]
        said = cluster.kubectl("logs", name, "-n", namespace, "--all-containers", f"--tail={LOG_LINES}", check=False)
        parts.append(f"==== log of {name}\n{said}")
    path = cluster.logs_dir / "tests" / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', test)}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))
    return str(path)


@pytest.fixture(autouse=True)
def _only_where_it_is_possible(request: pytest.FixtureRequest) -> None:
    """Skips a test marked `needs(ABILITY, ...)` on a cluster that lacks one."""
    marker = request.node.get_closest_marker("needs")
    if marker is None:
        return
    lacking = [a.name for a in marker.args if a not in request.getfixturevalue("cluster").abilities]
    if lacking:
        pytest.skip(f"this cluster cannot: {', '.join(lacking)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tells the fixtures that their test has failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says where the traces of what failed are."""
    for line in config.stash[TRACES]:
        terminalreporter.write_line(line)


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process a whole folder of end-to-end tests at once, or a file of unit tests."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        return folder if folder in LONGEST_FIRST else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder:
    """How the tests are shared out between processes."""
    return ByFolder(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes longest."""
    items.sort(key=lambda item: _rank(item.nodeid.partition("::")[0].rpartition("/")[0]))


def _rank(folder: str) -> int:
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker."""
    config.stash[TRACES] = []
    config.addinivalue_line("markers", "needs(*abilities): what a test does to the cluster (e2e.cluster.api.Ability)")
