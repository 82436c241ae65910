"""Pruning never loses the best, spares most of the simulations, and does not depend on the machine."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.planner.deployment import prefill_alone
from headrace_core.planner.goodput import Candidate, measure
from headrace_core.planner.race import SURVIVORS, Contender, race
from headrace_core.planner.trial import SCREEN_REQUESTS, Trial
from tests.core.planner.builders import Known, question, shape


def contenders(goodputs: list[tuple[float, float, float]]) -> tuple[list[Contender], Known]:
    """Each with (goodput over cap, cap, weight), and a runner that knows them; the target tells them apart."""
    made: list[Contender] = []
    known: dict[int, float] = {}
    for index, (part, cap, weight) in enumerate(goodputs):
        scenario = prefill_alone(question(), shape(kv_blocks=1000 + index))
        trial = Trial(scenario=scenario, rate_per_s=1.0, target=0.9, requests=SCREEN_REQUESTS)
        known[1000 + index] = part * cap
        made.append(Contender(candidate=Candidate(trial=trial, cap_per_s=cap), weight=weight, index=index))
    return made, Known(lambda trial: known[trial.scenario.pools[0].instance.kv_blocks])


SIZES = st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 50.0), st.floats(1.0, 8.0))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=12), rate=st.one_of(st.none(), st.floats(0.1, 60.0)))
def test_the_best_and_the_runner_up_of_all_are_among_the_survivors(
    sizes: list[tuple[float, float, float]], rate: float | None
) -> None:
    made, runner = contenders(sizes)
    found = race(made, rate, runner)
    able = [one for one in made if sizes[one.index][0] > 0.01]
    assert {one.index for one in found} <= {one.index for one in made if sizes[one.index][0] > 0}
    if able:
        best = min(cost(sizes[one.index], rate) for one in able)
        assert min(cost(sizes[one.index], rate) for one in found) <= best * 1.02
    if len(able) >= SURVIVORS:
        assert len(found) >= SURVIVORS


def cost(size: tuple[float, float, float], rate: float | None) -> float:
    part, cap, weight = size
    goodput = part * cap
    if goodput <= 0:
        return math.inf
    return weight / goodput if rate is None else weight * max(1.0, rate / goodput)


def test_shapes_that_cannot_win_are_dropped_after_few_simulations() -> None:
    """Two good ones; thirty of which even the cap is dear, and thirty that two simulations show to be."""
    sizes = [(0.8, 10.0, 1.0), (0.78, 10.0, 1.0), *[(0.9, 3.0, 1.0)] * 30, *[(0.3, 11.0, 1.0)] * 30]
    made, runner = contenders(sizes)
    found = race(made, None, runner)
    assert [one.index for one in found] == [0, 1]
    tried = [trial.scenario.pools[0].instance.kv_blocks - 1000 for trial in runner.seen]
    assert not any(2 <= index < 32 for index in tried)
    assert max(tried.count(index) for index in range(32, 62)) <= 2
    made, exhaustive = contenders(sizes)
    for one in made:
        measure(one.candidate, exhaustive)
    assert runner.trials < exhaustive.trials / 5


def test_who_was_not_looked_at_yet_is_judged_by_its_cap() -> None:
    """Eight that promise a little more are narrowed first, and the best comes after them."""
    made, runner = contenders([*[(0.5, 10.0, 1.0)] * 8, (0.9, 9.9, 1.0)])
    assert race(made, None, runner)[0].index == 8


def test_a_rate_makes_small_shapes_as_good_as_large_ones() -> None:
    """At 1 request/s one worker of either is enough, so that the better one a GPU is the dearer one."""
    sizes = [(0.5, 4.0, 2.0), (0.5, 60.0, 16.0)]
    made, runner = contenders(sizes)
    assert race(made, 1.0, runner)[0].index == 0
    made, runner = contenders(sizes)
    assert race(made, 300.0, runner)[0].index == 1
    made, runner = contenders(sizes)
    assert race(made, None, runner)[0].index == 1


def test_nobody_able_leaves_nobody() -> None:
    made, runner = contenders([(0.0, 10.0, 1.0), (0.0, 0.0, 1.0)])
    assert race(made, 5.0, runner) == []
    assert race([], 5.0, runner) == []


def test_equal_candidates_keep_their_order() -> None:
    made, runner = contenders([(0.5, 10.0, 1.0)] * 5)
    assert [one.index for one in race(made, None, runner)] == [0, 1, 2]
