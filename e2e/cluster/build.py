"""Builds the control plane and helm from source, once for each state of the sources, outside the tree."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster.progress import ClusterError, run_logged, say

SOURCES: Final = Path(__file__).parent / "controlplane"
OLDEST_GO: Final = (1, 26)
KUBERNETES_VERSION: Final = "v1.36.3"
HELM_VERSION: Final = "v4.3.1"

# Without a version the API server calls itself v0.0.0-master+$Format, which kubectl and helm cannot parse.
_KUBERNETES_STAMP: Final = (
    f"-X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}"
    f" -X k8s.io/component-base/version.gitMajor={KUBERNETES_VERSION[1:].split('.')[0]}"
    f" -X k8s.io/component-base/version.gitMinor={KUBERNETES_VERSION.split('.')[1]}"
)
_HELM_STAMP: Final = f"-X helm.sh/helm/v4/internal/version.version={HELM_VERSION}"


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs that a cluster needs."""

    controlplane: Path
    helm: Path
    kubectl: Path


def cache_dir() -> Path:
    """Where what was built is kept: `HEADRACE_CACHE`, else a folder in the user's cache."""
    if given := os.environ.get("HEADRACE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def _hash_of_sources() -> str:
    digest = hashlib.sha256(f"{_KUBERNETES_STAMP} {_HELM_STAMP}".encode())
    for file in sorted(SOURCES.rglob("*")):
        if file.is_file():
            digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def beside_python(program: str) -> Path:
    """A program that the virtual environment of this Python brings, else one on the PATH."""
    ours = Path(sys.executable).parent / program
    if ours.exists():
        return ours
    found = shutil.which(program)
    if found is None:
        raise ClusterError(f"{program} is neither beside {sys.executable} nor on the PATH: run `make setup`")
    return Path(found)


def tools() -> Tools:
    """Returns the programs, built first where they are missing; two runs at once build once.

    Raises:
        ClusterError: a build failed.
    """
    folder = cache_dir() / "bin" / _hash_of_sources()
    built = Tools(folder / "controlplane", folder / "helm", beside_python("kubectl"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting: another run is building the control plane")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.controlplane.exists():
            what = f"building Kubernetes {KUBERNETES_VERSION} from source"
            _go_build(what, "5 to 10 minutes on two cores, once", ".", _KUBERNETES_STAMP, built.controlplane)
        if not built.helm.exists():
            what = f"building helm {HELM_VERSION}"
            _go_build(what, "about 2 minutes, once", "helm.sh/helm/v4/cmd/helm", _HELM_STAMP, built.helm)
    return built


def _go() -> Path:
    """Go as the virtual environment brings it, or the PATH's."""
    go = beside_python("go")
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout.strip()
    version = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
    if version < OLDEST_GO:
        raise ClusterError(f"{go} is Go {said or 'of an unknown version'}; 1.26 is needed: run `make setup`")
    return go


def _go_build(what: str, expected: str, package: str, stamp: str, target: Path) -> None:
    unfinished = target.with_suffix(".unfinished")
    # -mod=readonly: go.sum names every byte, and nothing may change it behind our back. -v names each package.
    command = [
        *(_go(), "build", "-v", "-mod=readonly", "-trimpath", "-buildvcs=false"),
        *("-ldflags", f"-s -w {stamp}", "-o", unfinished, package),
    ]
    env = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    # Outside the folder of this state of the sources: how long the last state took is what is expected.
    duration = cache_dir() / f"{target.name}.seconds"
    if duration.exists():
        expected = f"last time {duration.read_text()} s"
    started = time.monotonic()
    run_logged(what, command, target.with_suffix(".log"), cwd=SOURCES, env=env, expected=expected)
    duration.write_text(f"{time.monotonic() - started:.0f}")
    unfinished.rename(target)
