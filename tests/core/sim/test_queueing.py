"""The simulator against queueing theory, where there is one: M/D/1. Little's law is in `test_properties`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.core.compiled import NoCompilerError, environment
from tests.core.sim.queueing import SERVICE_MS, mean_wait_ms

ROOT = Path(__file__).parents[3]
LOADS = (0.5, 0.8)


def theory_ms(load: float) -> float:
    """Mean waiting time with Poisson arrivals and constant service (Pollaczek and Khinchine)."""
    return load * SERVICE_MS / (2 * (1 - load))


@pytest.mark.thorough
def test_a_million_arrivals_wait_as_theory_says() -> None:
    try:
        compiled = environment(compiled=True)
    except NoCompilerError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "tests.core.sim.queueing", "1000000", *map(str, LOADS)]
    done = subprocess.run(command, cwd=ROOT, env=compiled, capture_output=True, text=True, check=True)
    waits_ms = [float(line) for line in done.stdout.split()]
    assert waits_ms == [pytest.approx(theory_ms(load), rel=0.02) for load in LOADS]


def test_fewer_arrivals_wait_about_as_theory_says() -> None:
    """The sources, where nothing compiles."""
    assert mean_wait_ms(30_000, 0.6) == pytest.approx(theory_ms(0.6), rel=0.06)
