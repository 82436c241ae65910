"""The jump between two changes of a batch gives the times, gaps and preemptions of stepping token by token."""

from __future__ import annotations

import math

import pytest

from headrace_core.policy.admission import Admission, Bound
from headrace_core.sim.cluster import simulate
from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.scenario import DecodeRules, Prediction, Scenario
from headrace_core.sim.workload import Workload
from tests.core.sim import stepping
from tests.core.sim.builders import cluster, traffic

CLOSE_MS = 1e-6
GRANULARITY = 100


def tight(policy: Admission, bound: Bound = Bound.UPPER, *, kv_blocks: int = 110, max_running: int = 256) -> Scenario:
    rules = DecodeRules(admission=policy, bound=bound, max_running=max_running, token_budget=512)
    return cluster(kv_blocks=kv_blocks, rules=rules, prediction=Prediction(granularity=GRANULARITY))


CASES: dict[str, tuple[Scenario, Workload]] = {
    "light load": (cluster(), traffic(300, 2.0)),
    "heavy load": (cluster(), traffic(400, 12.0)),
    "both decode fits": (
        cluster(kv_blocks=100_000),
        traffic(250, 60.0, prompts=range(1, 100), outputs=range(100, 300)),
    ),
    "without a network": (cluster(network=None), traffic(300, 8.0)),
    "answers of one or two tokens": (cluster(), traffic(200, 8.0, outputs=range(1, 3))),
    "greedy, preempts": (tight(Admission.GREEDY), traffic(300, 6.0)),
    "greedy, some can never fit": (tight(Admission.GREEDY, kv_blocks=45), traffic(200, 3.0)),
    "static, upper bound": (tight(Admission.RESERVE_STATIC), traffic(300, 6.0)),
    "static, lower bound, preempts": (tight(Admission.RESERVE_STATIC, Bound.LOWER), traffic(300, 6.0)),
    "dynamic, upper bound": (tight(Admission.RESERVE_DYNAMIC), traffic(300, 6.0)),
    "dynamic, lower bound, preempts": (tight(Admission.RESERVE_DYNAMIC, Bound.LOWER), traffic(300, 6.0)),
    "dynamic, quantile": (tight(Admission.RESERVE_DYNAMIC, Bound.QUANTILE), traffic(300, 6.0)),
    "few may run": (tight(Admission.RESERVE_DYNAMIC, kv_blocks=4000, max_running=3), traffic(200, 3.0)),
}


def bounds(scenario: Scenario, workload: Workload) -> list[int]:
    """Right predictions, at the scenario's end of the bucket."""
    granularity = scenario.prediction.granularity
    lows = [(output - 1) // granularity * granularity for output in workload.output_tokens]
    add = {
        Bound.LOWER: 0,
        Bound.UPPER: granularity,
        Bound.QUANTILE: int(granularity * scenario.prediction.quantile),
    }[scenario.decode.bound]
    return [max(1, low + add) for low in lows]


def same(found: float, expected: float | None) -> bool:
    return math.isnan(found) if expected is None else abs(found - expected) < CLOSE_MS


@pytest.mark.parametrize("case", CASES)
def test_the_jump_equals_the_steps(case: str) -> None:
    scenario, workload = CASES[case]
    outcome = simulate(scenario, workload)
    expected = stepping.run(scenario, workload, bounds(scenario, workload))
    for one in expected:
        number = one.number
        assert outcome.status[number] == (Status.REJECTED if one.rejected else Status.FINISHED)
        assert same(outcome.first_token_ms[number], one.first_ms)
        assert same(outcome.second_token_ms[number], one.second_ms), number
        assert same(outcome.last_token_ms[number], one.last_ms), number
        assert outcome.preemptions[number] == one.preemptions
        assert one.rejected or same(outcome.largest_gap_ms[number], one.largest_gap_ms), number


def totals(case: str) -> Outcome:
    return simulate(*CASES[case])


def test_the_cases_are_what_they_say() -> None:
    assert sum(totals("greedy, preempts").preemptions) > 20
    assert sum(totals("static, lower bound, preempts").preemptions) > 5
    assert sum(totals("dynamic, lower bound, preempts").preemptions) > 5
    assert Status.REJECTED in totals("greedy, some can never fit").status
    assert sum(totals("dynamic, upper bound").preemptions) < sum(totals("greedy, preempts").preemptions) / 2
