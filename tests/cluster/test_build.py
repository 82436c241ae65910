"""What is built once, when again, and what is said when it cannot be: with a compiler that only writes files."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from e2e import setup
from e2e.cluster import build
from e2e.cluster.progress import ClusterError

FAKE_GO = """#!/bin/sh
if [ "$1" = env ]; then echo {version}; exit 0; fi
echo "$*" >> {calls}
[ -z "{error}" ] || {{ echo "{error}"; exit 3; }}
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


class Workshop:
    """A folder of sources, a cache and a compiler of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "sources"
        self.sources.mkdir()
        (self.sources / "main.go").write_text("package main")
        self._folder = folder
        self._calls = folder / "calls"
        self.go()

    def go(self, version: str = "go1.26.6", error: str = "") -> None:
        program = self._folder / "go"
        program.write_text(FAKE_GO.format(version=version, error=error, calls=self._calls))
        program.chmod(0o755)

    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setattr(build, "SOURCES", made.sources)
    monkeypatch.setattr(build, "beside_python", lambda program: tmp_path / program)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return made


def test_built_once_and_again_when_the_sources_change(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    first = build.tools()
    assert first.controlplane.read_text() == first.helm.read_text() == "built\n"
    assert build.tools() == first
    assert workshop.calls() == 2, "the control plane and helm, each once"
    assert "minutes on two cores" in capsys.readouterr().out

    (workshop.sources / "main.go").write_text("package main // changed")
    assert build.tools().controlplane != first.controlplane
    assert workshop.calls() == 4
    assert "last time" in capsys.readouterr().out


def test_two_runs_at_once_build_once(workshop: Workshop) -> None:
    runs = [threading.Thread(target=build.tools) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert workshop.calls() == 2


def test_a_failed_build_says_what_and_why_and_where(workshop: Workshop) -> None:
    workshop.go(error="no required module")
    with pytest.raises(ClusterError) as raised:
        build.tools()
    message = str(raised.value)
    assert "building Kubernetes v1.36.3 from source failed with exit code 3" in message
    assert "controlplane.log" in message
    assert "no required module" in message

    workshop.go()
    assert build.tools().controlplane.exists(), "a failed build must not stop the next"


@pytest.mark.parametrize("version", ["go1.25.9", "go1.19", ""])
def test_an_old_compiler_is_refused(workshop: Workshop, version: str) -> None:
    workshop.go(version=version)
    with pytest.raises(ClusterError, match=r"1\.26 is needed: run `make setup`"):
        build.tools()
    assert workshop.calls() == 0


# missing programs, user id -> the remedy that is named
NO_PACKAGES = {
    "no apt-get": ({"prometheus", "apt-get"}, 0, "install prometheus by this system's own means"),
    "neither root nor sudo": ({"prometheus", "bwrap", "sudo"}, 1000, "apt-get install prometheus bubblewrap"),
}


@pytest.mark.parametrize("case", NO_PACKAGES)
def test_packages_that_cannot_be_installed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, user, remedy = NO_PACKAGES[case]
    monkeypatch.setattr(shutil, "which", lambda program: None if program in missing else f"/usr/bin/{program}")
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(ClusterError, match=remedy):
        setup.install_packages()
