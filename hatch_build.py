"""Compiles the core's hot modules into the wheel by mypyc, and leaves the wheel pure where there is no C compiler.

The modules are listed in pyproject.toml, in the hook's `include`. The work is hatch-mypyc's, done on a copy: in the
tree it would put extension modules beside the sources, and move pyproject.toml away for as long as it compiles.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatch_mypyc.plugin import MypycBuildHook
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PURE = "HEADRACE_PURE"
"""Set to anything, this environment variable asks for a pure wheel."""


class _Mypyc(MypycBuildHook):  # type: ignore[misc] # it has no types
    """hatch-mypyc for one of several packages; by itself it takes the first."""

    package_source = "core"


class CompiledCore(BuildHookInterface[Any]):
    """The hook. Editable installs stay pure, since their modules change."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the extension modules as files of the wheel."""
        if version != "standard" or os.environ.get(PURE):
            return
        if not has_compiler():
            self.app.display_warning("No C compiler, or no Python.h: the wheel is pure Python, and simulates 5x slower")
            return
        self._copy = TemporaryDirectory(prefix="headrace-build-")
        root = Path(self._copy.name).resolve()
        shutil.copytree(Path(self.root) / "core", root / "core", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(Path(self.root) / "pyproject.toml", root)
        hook = _Mypyc(
            str(root), self.config, self.build_config, self.metadata, self.directory, self.target_name, self.app
        )
        compiled: dict[str, Any] = {"artifacts": [], "force_include": {}}
        try:
            with contextlib.chdir(root):
                hook.initialize(version, compiled)
        except Exception as failed:  # of no narrower type
            raise RuntimeError(f"mypyc failed, see above. {PURE}=1 in the environment gives a pure wheel") from failed
        for module in sorted(root.glob("core/**/*.so")):
            build_data["force_include"][str(module)] = str(module.relative_to(root))
        build_data["pure_python"] = compiled["pure_python"]
        build_data["infer_tag"] = compiled["infer_tag"]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Drop the copy once the wheel is written."""
        if hasattr(self, "_copy"):
            self._copy.cleanup()


def get_build_hook() -> type[CompiledCore]:
    """Say which of the classes here is the hook."""
    return CompiledCore


def has_compiler() -> bool:
    """Whether a C compiler and the headers of Python are there."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return shutil.which(command[0]) is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
