"""Runs trials side by side on all cores. What comes out does not depend on how many there are."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from types import TracebackType
from typing import Any, Protocol, Self, final

from headrace_core.planner.trial import Simulate, Trial, Verdict, drawn, run
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.sim.scenario import (
    DecodeRules,
    Instance,
    Network,
    Pool,
    Prediction,
    PrefillRules,
    Scenario,
    Slo,
)
from headrace_core.sim.traffic import Traffic
from headrace_core.sim.workload import Workload

BATCH = 8
"""Trials that a search puts in hand at once. It is not the number of cores, so that a plan is the same everywhere."""


class Runner(Protocol):
    """Whoever runs trials."""

    trials: int
    """That were run so far."""

    def run(self, trials: Sequence[Trial]) -> list[Verdict]:
        """The verdicts, in the order of the trials."""


@final
class Here:
    """Runs trials one after another in this process."""

    def __init__(self, traffic: Traffic, simulate: Simulate) -> None:
        self._bench = _Bench(traffic, simulate)
        self.trials = 0

    def run(self, trials: Sequence[Trial]) -> list[Verdict]:
        """The verdicts, in the order of the trials."""
        self.trials += len(trials)
        return [self._bench.one(trial) for trial in trials]


@final
class Processes:
    """Runs trials in a process for each core; a context manager that ends them."""

    def __init__(
        self,
        traffic: Traffic,
        simulate: Simulate,
        *,
        processes: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """`progress` is told how many trials are done, each time that some are."""
        self._pool = ProcessPoolExecutor(
            processes or os.cpu_count() or 1, initializer=_prepare, initargs=(traffic, simulate)
        )
        self._progress = progress
        self.trials = 0

    def run(self, trials: Sequence[Trial]) -> list[Verdict]:
        """The verdicts, in the order of the trials."""
        verdicts: list[Verdict] = []
        for verdict in self._pool.map(_one, trials):
            verdicts.append(verdict)
            self.trials += 1
            if self._progress is not None:
                self._progress(self.trials)
        return verdicts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


@final
class _Bench:
    """The traffic of one process, and the workloads that were drawn from it."""

    def __init__(self, traffic: Traffic, simulate: Simulate) -> None:
        self._traffic = traffic
        self._simulate = simulate
        self._drawn: dict[tuple[int, int], Workload] = {}

    def one(self, trial: Trial) -> Verdict:
        """One trial. What arrives is drawn once and kept."""
        if trial.given is not None:
            return run(trial, trial.given, self._simulate)
        key = (trial.requests, trial.replication)
        unit = self._drawn.get(key)
        if unit is None:
            unit = self._drawn[key] = drawn(self._traffic, *key)
        return run(trial, unit, self._simulate)


_bench: list[_Bench] = []
"""Of a process of the pool: the one that it was started with."""


def _prepare(traffic: Traffic, simulate: Simulate) -> None:
    _bench[:] = [_Bench(traffic, simulate)]


def _one(trial: Trial) -> Verdict:
    return _bench[0].one(trial)


def _taken_apart(value: Any) -> tuple[Any, ...]:
    return _put_together, (type(value), {one.name: getattr(value, one.name) for one in fields(value) if one.init})


def _put_together(kind: Callable[..., object], values: dict[str, object]) -> object:
    return kind(**values)


# Compiled frozen classes cannot be unpickled: their own __setstate__ sets fields, and those are frozen.
for _kind in (
    DecodeRules,
    DeflectionSettings,
    Instance,
    Network,
    Pool,
    Prediction,
    PrefillRules,
    Scenario,
    Slo,
    Traffic,
):
    copyreg.pickle(_kind, _taken_apart)
