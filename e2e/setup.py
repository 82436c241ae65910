"""Installs what the Python packages do not bring: Debian's Prometheus and bubblewrap, the control plane and helm."""

from __future__ import annotations

import os
import shutil
import sys

from e2e.cluster import build
from e2e.cluster.progress import ClusterError, run_logged, say

PACKAGES = {"prometheus": "prometheus", "bwrap": "bubblewrap"}
"""Program to look for -> Debian package that brings it."""


def install_packages() -> None:
    """Installs Debian packages whose program is missing.

    Raises:
        ClusterError: apt-get is missing or fails, or there are no rights to use it.
    """
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    wanted = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"no apt-get here: install {wanted} by this system's own means")
    as_root: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise ClusterError(f"neither root nor sudo: have someone run `apt-get install {wanted}`")
        as_root = ["sudo", "-n"]
    # A service that starts by itself on all addresses is not wanted: only the program is. sudo drops the environment.
    apt = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "SYSTEMD_OFFLINE=1", "apt-get"]
    logs = build.cache_dir() / "logs"
    run_logged("reading the package lists", [*apt, "update"], logs / "apt-update.log")
    install = [*apt, "install", "-y", "--no-install-recommends", *missing]
    run_logged(f"installing {wanted}", install, logs / "apt-install.log", expected="about half a minute")


def main() -> int:
    """Installs all; 1 with a word on what failed."""
    try:
        install_packages()
        build.tools()
    except ClusterError as error:
        say(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
