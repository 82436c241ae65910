"""Finds the factors on step times with which a simulation shows the latencies observed on a real cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from headrace_core.perf.errors import FitError
from headrace_core.perf.fit import Correction, Latency, calibrate, corrected
from headrace_core.sim.attainment import judge
from headrace_core.sim.cluster import simulate
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.workload import Workload, first

MOST_REQUESTS: Final = 2000
"""Requests of one of about 50 trial runs: enough for means within a few percent at loads that a cluster can carry."""


def corrected_scenario(scenario: Scenario, correction: Correction) -> Scenario:
    """The scenario with the factors on the step times of all its pools."""
    pools = tuple(
        replace(pool, instance=replace(pool.instance, costs=corrected(pool.instance.costs, correction)))
        for pool in scenario.pools
    )
    return replace(scenario, pools=pools)


def calibrate_to(observed: Latency, scenario: Scenario, workload: Workload) -> Correction:
    """The factors for what was observed while this cluster served this load.

    Args:
        observed: mean TTFT and mean TPOT.
        scenario: the cluster at that time.
        workload: the load at that time; its first MOST_REQUESTS requests are simulated.

    Raises:
        FitError: an observed time is not above 0, no answer has a second token, or no factor between 1/20 and 20 shows
            what was observed.
    """
    sample = first(workload, MOST_REQUESTS)
    if max(sample.output_tokens) == 1:
        raise FitError("calibrate: no answer has a second token, so there is no TPOT; give longer answers")

    def predict(correction: Correction) -> Latency:
        trial = corrected_scenario(scenario, correction)
        verdicts = judge(trial, simulate(trial, sample))
        return Latency(_mean(verdicts.ttft_ms), _mean(verdicts.tpot_ms))

    return calibrate(observed, predict)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    # Nothing served is slower than any observation.
    return math.fsum(known) / len(known) if known else math.inf
