"""Builds the compiled core into a cache outside the tree, one folder for each state of its sources.

The folder holds `headrace_core` as the wheel has it, and goes first on PYTHONPATH:
`PYTHONPATH=$(python -m bench.core.compiled) headrace simulate ...`
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from e2e.cluster.build import cache_dir
from hatch_build import PURE, has_compiler

ROOT = Path(__file__).parents[2]
KEPT = 4
"""States of the sources that stay in the cache."""


class NoCompilerError(RuntimeError):
    """Nothing can be compiled here."""


def compiled_core() -> Path:
    """The folder, built if the cache does not have it (about a minute on one core).

    Raises NoCompilerError where no C compiler is, and CalledProcessError when the build fails; its output is shown.
    """
    if not has_compiler():
        raise NoCompilerError("No C compiler or no Python.h: install gcc and the headers of Python (python3-dev)")
    cache = cache_dir() / "compiled"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / _digest()
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _build(Path(work)).rename(made)
        made.touch()
        for old in sorted((one for one in cache.iterdir() if one.is_dir()), key=lambda one: -one.stat().st_mtime)[
            KEPT:
        ]:
            shutil.rmtree(old)
    return made


def environment(*, compiled: bool) -> dict[str, str]:
    """Variables for a child process that imports the compiled core, or the sources."""
    return {**os.environ, "PYTHONPATH": f"{compiled_core() if compiled else ROOT / 'core'}{os.pathsep}{ROOT}"}


def _digest() -> str:
    """Of all that the result depends on: sources, settings, compiler and Python."""
    found = hashlib.sha256()
    for path in [*sorted((ROOT / "core").rglob("*.py")), ROOT / "pyproject.toml", ROOT / "hatch_build.py"]:
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    found.update(f"{version('mypy')} {sys.implementation.cache_tag} {sysconfig.get_platform()}".encode())
    return found.hexdigest()[:20]


def _build(work: Path) -> Path:
    """Build the wheel and take the core out of it."""
    build_environment = {name: value for name, value in os.environ.items() if name not in {PURE, "PYTHONPATH"}}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(work)]
    done = subprocess.run(command, cwd=ROOT, env=build_environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()
    core = work / "core"
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        wheel.extractall(
            core, [name for name in wheel.namelist() if name.startswith("headrace_core/") or "__mypyc." in name]
        )
    return core


if __name__ == "__main__":
    print(compiled_core())
