"""Goodput against what queueing theory and arithmetic say, and the shape of the search."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.planner import goodput
from headrace_core.planner.deployment import prefill_alone
from headrace_core.planner.goodput import Bracket, Candidate, interval, measure, replicate, screen, settled
from headrace_core.planner.runner import Here
from headrace_core.planner.sides import decode_contenders, prefill_contenders
from headrace_core.planner.trial import SCREEN_REQUESTS, Trial, Verdict, drawn, requests_for, run, workload_for
from headrace_core.sim.cluster import simulate as real
from headrace_core.sim.lengths import fixed
from headrace_core.sim.outcome import Outcome
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.workload import Workload
from tests.core.planner.builders import Known, question, shape, space
from tests.core.planner.queue import simulate

SERVICE_MS = 50.0
"""Of a prompt of 400 tokens on the builders' shape."""


def test_goodput_of_prefill_is_that_of_an_m_d_1_queue() -> None:
    """Crommelin's distribution of the wait in M/D/1, solved for the rate at which 90 % start within 200 ms."""
    asked = question(ttft_ms=250.0)
    runner = Here(asked.traffic, simulate)
    found = measure(prefill_contenders(asked, space())[0].candidate, runner)
    assert found.half_width <= 0.02 * found.mean
    assert found.mean == pytest.approx(m_d_1_rate(200.0, 0.9), rel=0.025)


def test_goodput_of_decode_is_where_the_step_meets_the_tpot() -> None:
    """Without queues the step is that of the mean batch: 10 + 0.1 n = 15 ms at n = 50, 100 tokens a request."""
    asked = question(tpot_ms=15.0, lengths=fixed(400, 101))
    found = measure(decode_contenders(asked, space())[0].candidate, Here(asked.traffic, simulate))
    assert found.mean == pytest.approx(50 / 15 / 100 * 1000, rel=0.015)


@given(goodput_per_s=st.floats(0.02, 0.99), cap=st.floats(0.1, 500.0))
def test_the_search_finds_any_goodput_under_the_cap(goodput_per_s: float, cap: float) -> None:
    found = measure(candidate(cap), Known(lambda _: goodput_per_s * cap))
    assert found.mean == pytest.approx(goodput_per_s * cap, rel=0.006)
    assert found.half_width <= 1e-6 * found.mean


@given(over=st.floats(1.0, 10.0))
def test_nothing_is_tried_at_or_above_the_cap(over: float) -> None:
    """A short run would flatter such a rate."""
    runner = Known(lambda _: 10.0 * over)
    found = measure(candidate(10.0), runner)
    assert max(trial.rate_per_s for trial in runner.seen) < 10.0
    assert 9.5 <= found.mean <= 10.0


def test_a_candidate_that_never_holds_has_no_goodput() -> None:
    runner = Known(lambda _: 0.0)
    assert measure(candidate(10.0), runner).mean == 0
    assert runner.trials < 16
    assert measure(candidate(0.0), runner).mean == 0


def test_replications_have_other_arrivals_and_longer_runs_than_the_screen() -> None:
    runner = Known(lambda _: 6.0)
    one = candidate(10.0)
    screen([one], runner)
    assert {trial.replication for trial in runner.seen} == {0}
    runner.seen.clear()
    replicate([one], 3, runner)
    assert {trial.replication for trial in runner.seen} == {0, 1, 2}
    assert {trial.requests for trial in runner.seen} == {goodput.REPLICATION_FACTOR * SCREEN_REQUESTS}
    replicate([one], 2, runner)
    assert {trial.replication for trial in runner.seen} == {0, 1, 2, 3, 4}


def test_later_replications_follow_the_slope_of_the_first() -> None:
    """Goodputs a little apart: the first is enclosed, the others take two runs at most, and are found all the same."""
    runner = Known(lambda trial: 6.0 * (1 + 0.002 * trial.replication))
    one = candidate(10.0)
    screen([one], runner)
    runner.seen.clear()
    replicate([one], 5, runner)
    assert one.roots == pytest.approx([6.0 * (1 + 0.002 * number) for number in range(5)], rel=1e-3)
    later = [trial.replication for trial in runner.seen if trial.replication]
    assert max(later.count(number) for number in range(1, 5)) <= 2


def test_a_cliff_has_no_slope_and_is_enclosed_closely() -> None:
    """From all in time to a run that is stopped early, within 1 %."""
    runner = Known(lambda trial: 6.0 if trial.rate_per_s <= 6.0 else 1.0)
    one = candidate(10.0)
    found = measure(one, runner)
    assert one.slope is None
    assert found.mean == pytest.approx(6.0, rel=0.01)


def test_replications_go_on_until_the_interval_is_narrow() -> None:
    """Goodputs that differ by replication: more of them are made than of equal ones, and as many as there can be."""
    equal, noisy, wild = candidate(10.0), candidate(10.0), candidate(10.0)
    measure(equal, Known(lambda _: 6.0))
    measure(noisy, Known(lambda trial: 6.0 * (1 + 0.02 * (-1) ** trial.replication)))
    measure(wild, Known(lambda trial: 6.0 * (1 + 0.2 * (-1) ** trial.replication)))
    assert len(equal.roots) == goodput.LEAST_REPLICATIONS
    assert goodput.LEAST_REPLICATIONS < len(noisy.roots) <= goodput.MOST_REPLICATIONS
    assert len(wild.roots) >= goodput.MOST_REPLICATIONS
    assert all(settled(one) for one in (equal, noisy, wild))


@pytest.mark.parametrize(("count", "student"), [(2, 12.706), (3, 4.303), (4, 3.182), (6, 2.571), (12, 2.201)])
def test_the_interval_is_students(count: int, student: float) -> None:
    values = [float(number * number) for number in range(count)]
    found = interval(values)
    assert found.half_width == pytest.approx(student * statistics.stdev(values) / math.sqrt(count))
    assert interval([3.0]).half_width == math.inf


def test_the_root_lies_on_the_line_between_two_whole_runs() -> None:
    bracket = Bracket(0.0, 20.0)
    bracket.learn(10.0, verdict(0.94))
    bracket.learn(11.0, verdict(0.84))
    assert bracket.root() == pytest.approx(10.4)
    bracket.learn(11.0, verdict(0.5, stopped=True))
    assert bracket.root() == 10.5


def test_the_warm_up_is_cut_and_the_measured_part_has_the_rate_exactly() -> None:
    asked = question()
    trial = Trial(scenario=prefill_alone(asked, shape()), rate_per_s=7.0, target=0.9, requests=1000)
    times = workload_for(trial, drawn(asked.traffic, 1000, 3)).arrival_ms
    assert times[249] == pytest.approx(250 * 1000 / 7)
    assert times[-1] == pytest.approx(1000 * 1000 / 7)
    assert times == sorted(times)


def test_the_warm_up_is_not_counted() -> None:
    """A cluster that is late for the first quarter of the requests, and in time for all others."""
    asked = question(ttft_ms=250.0)
    trial = prefill_contenders(asked, space())[0].candidate.screening(1.0)

    def late_at_first(scenario: Scenario, workload: Workload) -> Outcome:
        outcome = simulate(scenario, workload)
        first = [time + 1e6 for time in outcome.first_token_ms[:750]]
        return replace(outcome, first_token_ms=first + outcome.first_token_ms[750:])

    found = run(trial, drawn(asked.traffic, 3000, 0), late_at_first)
    assert (found.measured, found.met, found.ttft_met) == (2250, 2250, 2250)


@pytest.mark.parametrize(("resident", "requests"), [(0, 3000), (300, 3000), (301, 6000), (1200, 12_000), (1e9, 48_000)])
def test_a_larger_system_gets_a_longer_run(resident: float, requests: int) -> None:
    assert requests_for(resident) == requests


def test_stopping_early_never_changes_a_verdict() -> None:
    """The same trial stopped early and run on: where the simulator stops it, the target is missed in any case."""
    asked = question(ttft_ms=250.0)
    for rate in (4.0, 8.0, 11.0, 14.0, 19.0):
        one = prefill_contenders(asked, space())[0].candidate.screening(rate)
        verdicts = [stopping(one, stops) for stops in (True, False)]
        assert verdicts[0].holds == verdicts[1].holds


def stopping(trial: Trial, stops: bool) -> Verdict:
    asked = question(ttft_ms=250.0)
    return run(replace(trial, to_the_end=not stops), drawn(asked.traffic, trial.requests, 0), real)


def candidate(cap_per_s: float) -> Candidate:
    trial = Trial(scenario=prefill_alone(question(), shape()), rate_per_s=1.0, target=0.9, requests=SCREEN_REQUESTS)
    return Candidate(trial=trial, cap_per_s=cap_per_s)


def verdict(share: float, *, stopped: bool = False) -> Verdict:
    met = round(share * 1000)
    return Verdict(measured=1000, met=met, ttft_met=met, tpot_met=met, target=0.9, stopped_early=stopped)


def m_d_1_rate(wait_ms: float, target: float) -> float:
    low, high = 1e-6, 1 / SERVICE_MS - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        if m_d_1_share(middle, wait_ms) >= target:
            low = middle
        else:
            high = middle
    return low * 1000


def m_d_1_share(per_ms: float, wait_ms: float) -> float:
    terms = (
        (per_ms * (count * SERVICE_MS - wait_ms)) ** count
        / math.factorial(count)
        * math.exp(-per_ms * (count * SERVICE_MS - wait_ms))
        for count in range(math.floor(wait_ms / SERVICE_MS) + 1)
    )
    return (1 - per_ms * SERVICE_MS) * math.fsum(terms)


def test_the_formula_itself() -> None:
    """At half load 0.5 find nobody."""
    assert m_d_1_share(0.5 / SERVICE_MS, 0.0) == 0.5
