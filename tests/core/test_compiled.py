"""The compiled core against the sources, and the wheel without a C compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from bench.core.compiled import NoCompilerError, environment
from hatch_build import PURE

ROOT = Path(__file__).parents[2]


def hashes(*, compiled: bool) -> list[str]:
    """What tests/core/hashes.py prints with the core of that kind."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.hashes"],
        cwd=ROOT,
        env=environment(compiled=compiled),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_whole_simulations_are_the_same_to_the_last_bit() -> None:
    try:
        where, *compiled = hashes(compiled=True)
    except NoCompilerError as missing:
        pytest.skip(str(missing))
    assert where.endswith(".so")
    source, *interpreted = hashes(compiled=False)
    assert source.endswith("cluster.py")
    assert compiled == interpreted
    assert len(set(compiled)) == len(compiled) > 5
    said = "\n".join(compiled)
    for count in ("preemptions", "deflected", "role changes"):
        assert re.search(rf"[1-9]\d* {count}", said), "the simulations leave it out"


@pytest.mark.parametrize("reason", ["asked for", "no compiler"])
def test_the_wheel_is_pure_where_nothing_can_be_compiled(reason: str, tmp_path: Path) -> None:
    without = {PURE: "1"} if reason == "asked for" else {"CC": str(tmp_path / "gone"), PURE: ""}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **without},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("No C compiler" in done.stdout + done.stderr) == (reason == "no compiler")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "headrace_core/sim/cluster.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_each_module_to_compile_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["include"]
    assert [name for name in include if not (ROOT / name).is_file()] == []
