"""Workers are added where the SLO is missed, and taken away where they are not needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from headrace_core.planner.deployment import Deployment, Side, trial_of
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.settle import MOST_REPLICATIONS, assess, grown, settle, within
from headrace_core.planner.trial import Trial, Verdict
from tests.core.planner.builders import Known, priced, question, shape, space

FAST = {"decode_request_ms": 0.0, "prefill_token_ms": 0.0}
"""So fast that no cap stands in the way: what holds is the fake's to say."""


class Needs:
    """A runner for which a deployment holds from so many workers a side on; what is short is missed."""

    def __init__(self, *workers: int) -> None:
        self._workers = workers
        self.trials = 0
        self.tried: list[tuple[int, ...]] = []

    def run(self, trials: Sequence[Trial]) -> list[Verdict]:
        self.trials += len(trials)
        return [self._verdict(trial) for trial in trials]

    def _verdict(self, trial: Trial) -> Verdict:
        counts = tuple(pool.workers for pool in trial.scenario.pools)
        self.tried.append(counts)
        short = [max(0, need - count) for need, count in zip(self._workers, counts, strict=True)]
        met = [1000 - 150 * one for one in short]
        return Verdict(
            measured=1000, met=min(met), ttft_met=met[0], tpot_met=met[-1], target=trial.target, stopped_early=False
        )


def apart(prefills: int, decodes: int, *, weights: tuple[float, float] = (1.0, 1.0)) -> Deployment:
    sides = (
        Side(shape=shape(offer=priced("A100-80G", weights[0]), **FAST), workers=prefills),
        Side(shape=shape(offer=priced("L40S", weights[1]), **FAST), workers=decodes),
    )
    return Deployment(layout=Layout.APART, sides=sides, token_budget=2048)


def settled(start: Deployment, runner: Needs, asked: Question) -> tuple[int, ...] | None:
    found = settle(asked, space(), start, runner)
    return found and tuple(side.workers for side in found[0].sides)


@pytest.mark.parametrize(
    ("start", "need"),
    [((1, 1), (3, 5)), ((3, 5), (3, 5)), ((2, 9), (3, 5)), ((6, 9), (3, 5)), ((1, 40), (2, 40)), ((40, 1), (30, 1))],
)
def test_the_least_workers_that_hold(start: tuple[int, int], need: tuple[int, int]) -> None:
    runner = Needs(*need)
    found = settled(apart(*start), runner, question(rate_per_s=1.0))
    assert found is not None
    # What was missed is what grows, and a start that holds shrinks to the least.
    assert all(count >= least for count, least in zip(found, need, strict=True))
    if all(begin >= least for begin, least in zip(start, need, strict=True)):
        assert found == need


def test_the_dearer_side_shrinks_first() -> None:
    runner = Needs(1, 1)
    settled(apart(2, 2, weights=(1.0, 5.0)), runner, question(rate_per_s=1.0))
    assert list(dict.fromkeys(runner.tried))[:2] == [(2, 2), (2, 1)]


def test_pairs_come_and_go_together() -> None:
    side = Side(shape=shape(**FAST), workers=3)
    pairs = Deployment(layout=Layout.PAIRED, sides=(side, side), token_budget=2048)
    more = grown(pairs, 0)
    assert [one.workers for one in more.sides] == [4, 4]


def test_too_few_gpus_are_no_plan() -> None:
    assert settled(apart(1, 1), Needs(3, 3), question(rate_per_s=1.0, gpus=5)) is None
    assert settled(apart(1, 1), Needs(3, 3), question(rate_per_s=1.0, gpus=6)) == (3, 3)


def test_the_gpus_of_each_accelerator_count() -> None:
    plan = apart(2, 2)
    offer = replace(plan.sides[0].shape.offer, gpus=1)
    few = replace(plan, sides=(replace(plan.sides[0], shape=shape(offer=offer)), plan.sides[1]))
    assert within(question(), plan)
    assert not within(question(), few)


def test_a_rate_above_the_cap_is_not_simulated() -> None:
    """A worker decodes 33 requests/s and sends 76 at most: the fake would say that all is well."""
    runner = Needs(1, 1)
    sides = (Side(shape=shape(prefill_token_ms=0.0), workers=1), Side(shape=shape(), workers=1))
    start = Deployment(layout=Layout.APART, sides=sides, token_budget=2048)
    asked = question(rate_per_s=101.0)
    found = settle(asked, space(), start, runner)
    assert found is not None
    assert [side.workers for side in found[0].sides] == [2, 4]
    assert set(runner.tried) == {(2, 4)}


@pytest.mark.parametrize(
    ("goodput", "replications", "holds"),
    [
        (lambda _: 20.0, 3, True),
        (lambda _: 9.0, 3, False),
        (lambda trial: 10.0 + 0.2 * (-1) ** trial.replication, MOST_REPLICATIONS, False),
    ],
    ids=["far above", "far under", "on the line"],
)
def test_an_assessment_replicates_until_it_is_certain(
    goodput: Callable[[Trial], float], replications: int, holds: bool
) -> None:
    runner = Known(goodput)
    asked = question(rate_per_s=10.0)
    found = assess(trial_of(asked, space(), apart(1, 1), 10.0), runner)
    assert runner.trials == replications
    assert found.holds is holds
