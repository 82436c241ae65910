"""What the status says: conditions with their reasons, counts, and that equal input gives equal output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from headrace_core.api import resources
from headrace_core.api.names import Condition, Reason, Role
from headrace_operator.observe import flipped_view, journal_view, window_view
from headrace_operator.plan.disruption import Budget, foreign_budgets, min_available
from headrace_operator.plan.status import (
    Surroundings,
    Verdict,
    cluster_status,
    degraded,
    journal_status,
    progressing,
    ready,
)
from headrace_operator.plan.view import Window
from tests.operator.builders import NOW, World, draining, entry, pod, pool

THREE = (pod(0), pod(1), pod(2, "decode"))
UP = Surroundings(gateways_ready=1)


@dataclass(frozen=True)
class Case:
    name: str
    world: World
    met: bool
    reason: Reason
    around: Surroundings = UP
    words: str = ""


READY = [
    Case("all there", World().with_pods(*THREE), True, Reason.ALL_READY),
    Case("no gateway", World().with_pods(*THREE), False, Reason.GATEWAY_NOT_READY, Surroundings()),
    Case(
        "one is not ready",
        World().with_pods(pod(0, ready=False), *THREE[1:]),
        False,
        Reason.WORKERS_NOT_READY,
        words="prefill has 1 of 2",
    ),
    Case(
        "one lacks in a rollout",
        World().with_pods(pod(0), pod(2, "decode")).with_revisions(prefill="r2", decode="r1"),
        True,
        Reason.ALL_READY,
    ),
    Case(
        "a role has nobody, though the rollout allows one to lack",
        World().with_pods(*THREE[:2], pod(2, "decode", ready=False)).with_revisions(prefill="r1", decode="r2"),
        False,
        Reason.WORKERS_NOT_READY,
        words="none for decode",
    ),
    Case(
        "one is flipping",
        World().with_pods(draining(0), *THREE[1:]).with_journal(entry()),
        True,
        Reason.ALL_READY,
    ),
]
PROGRESSING = [
    Case("stable", World().with_pods(*THREE), False, Reason.STABLE),
    Case("flip", World().with_pods(draining(0), *THREE[1:]).with_journal(entry()), True, Reason.FLIPPING),
    Case("missing", World().with_pods(*THREE[1:]), True, Reason.SCALING, words="prefill 1/2"),
    Case("starting", World().with_pods(pod(0, ready=False), *THREE[1:]), True, Reason.SCALING, words="1 workers"),
    Case(
        "out of date",
        World().with_pods(*THREE).with_revisions(prefill="r2", decode="r1"),
        True,
        Reason.ROLLING_OUT,
        words="2 workers",
    ),
    Case("advice", World().with_pods(*THREE), False, Reason.FLIP_ADVISED, replace(UP, advice="flip it"), "flip it"),
]
DEGRADED = [
    Case("healthy", World().with_pods(*THREE), False, Reason.HEALTHY),
    Case("failing pods", World().with_failures(3, NOW - 1), True, Reason.PODS_FAILING, words="3 pods"),
    Case("failed long ago", World().with_pods(*THREE).with_failures(3, NOW - 400), False, Reason.HEALTHY),
    Case(
        "crash loop",
        World().with_pods(pod(0, waiting="CrashLoopBackOff"), *THREE[1:]),
        True,
        Reason.PODS_FAILING,
        words="chat-w0: CrashLoopBackOff",
    ),
    Case("creating", World().with_pods(pod(0, waiting="ContainerCreating"), *THREE[1:]), False, Reason.HEALTHY),
    Case(
        "no node",
        World().with_pods(pod(0, unschedulable="0/2 nodes have GPUs"), *THREE[1:]),
        True,
        Reason.PODS_UNSCHEDULABLE,
        words="0/2 nodes",
    ),
    Case(
        "foreign budget",
        World().with_pods(*THREE),
        True,
        Reason.FOREIGN_BUDGET,
        replace(UP, foreign_budgets=("theirs",)),
        "theirs",
    ),
    Case(
        "no metrics",
        World().with_pods(*THREE),
        True,
        Reason.METRICS_UNKNOWN,
        replace(UP, hold="Prometheus: 503"),
        "the policy holds: Prometheus: 503",
    ),
    Case(
        "refused by the API server, named first",
        World().with_pods(pod(0, waiting="CrashLoopBackOff"), *THREE[1:]),
        True,
        Reason.REFUSED_BY_API,
        replace(UP, failure="403 Forbidden: quota"),
        "CrashLoopBackOff",
    ),
]


@pytest.mark.parametrize("case", READY, ids=lambda case: case.name)
def test_ready(case: Case) -> None:
    check(ready(case.world.look(), case.around), case)


@pytest.mark.parametrize("case", PROGRESSING, ids=lambda case: case.name)
def test_progressing(case: Case) -> None:
    check(progressing(case.world.look(), case.around), case)


@pytest.mark.parametrize("case", DEGRADED, ids=lambda case: case.name)
def test_degraded(case: Case) -> None:
    check(degraded(case.world.look(), case.around), case)


def check(verdict: Verdict, case: Case) -> None:
    assert (verdict.met, verdict.reason) == (case.met, case.reason), verdict
    assert case.words in verdict.message


def read_back(manifest: dict[str, object]) -> resources.ClusterStatus:
    return resources.ClusterStatus.model_validate(manifest)


def test_the_same_state_gives_the_same_status_later() -> None:
    world = World().with_pods(draining(0), *THREE[1:]).with_journal(entry()).in_window(Window(started=NOW, count=2))
    first = cluster_status(world.look(), UP, resources.ClusterStatus())
    later = cluster_status(world.at(NOW + 30).look(), UP, read_back(first))
    assert later == read_back(first).manifest()


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = cluster_status(World().with_pods(*THREE).look(), UP, resources.ClusterStatus())
    second = cluster_status(World().with_pods(*THREE[1:]).at(NOW + 30).look(), UP, read_back(first))
    times = [{c["type"]: c["lastTransitionTime"] for c in status["conditions"]} for status in (first, second)]
    assert times[0]["Accepted"] == times[1]["Accepted"]
    assert times[0]["Ready"] < times[1]["Ready"]


def test_counts() -> None:
    world = World().with_pods(draining(0), pod(1), pod(2, "decode"), pod(3, "decode", ready=False))
    observed = world.with_journal(entry()).flipped(decode=1).look()
    status = read_back(cluster_status(observed, UP, resources.ClusterStatus()))
    prefill, decode = status.pools
    assert (prefill.desired, prefill.ready, prefill.draining, prefill.updated, prefill.flipped) == (2, 1, 1, 2, 0)
    assert (decode.desired, decode.ready, decode.draining, decode.updated, decode.flipped) == (2, 1, 0, 2, 1)
    assert (status.prefill, status.decode) == ("1/2", "1/2")
    assert status.observed_generation == 3


def test_conditions_carry_type_and_generation() -> None:
    status = read_back(cluster_status(World().look(), UP, resources.ClusterStatus()))
    assert [c.type for c in status.conditions] == [
        Condition.ACCEPTED, Condition.READY, Condition.PROGRESSING, Condition.DEGRADED,
    ]  # fmt: skip
    assert {c.observed_generation for c in status.conditions} == {3}


def test_the_journal_survives_the_status() -> None:
    world = World().with_pods(*THREE)
    before = read_back(cluster_status(world.look(), UP, resources.ClusterStatus()))
    window = Window(started=NOW, count=4)
    written = read_back(journal_status((entry(),), {"prefill": -1, "decode": 1}, window, before))
    assert journal_view(written) == (entry(),)
    assert window_view(written) == window
    assert flipped_view(written, world.look()) == {"prefill": -1, "decode": 1}
    assert [one.desired for one in written.pools] == [one.desired for one in before.pools]


def test_flips_are_counted_from_the_pods_when_the_status_is_lost() -> None:
    flipped_pod = pod(0, "decode", origin_pool="prefill")
    observed = World().with_pods(flipped_pod, pod(1), pod(2, "decode")).look()
    assert flipped_view(resources.ClusterStatus(), observed) == {"prefill": -1, "decode": 1}


@pytest.mark.parametrize(
    ("replicas", "flips", "unavailable", "expected"), [(3, 0, 1, 2), (3, -1, 1, 1), (1, 0, 1, 0), (3, 0, 5, 0)]
)
def test_budget_of_a_role(replicas: int, flips: int, unavailable: int, expected: int) -> None:
    world = World().with_pools(pool("prefill", Role.PREFILL, replicas), pool("decode", Role.DECODE, 1))
    assert min_available(world.unavailable(unavailable).flipped(prefill=flips).look(), Role.PREFILL) == expected


LABELS = {"app": "x", "role": "prefill"}
BUDGETS = {
    "the same label": (Budget(name="b", owner_uid="", match_labels={"app": "x"}), True),
    "another value": (Budget(name="b", owner_uid="", match_labels={"app": "y"}), False),
    "ours": (Budget(name="b", owner_uid="cluster-uid", match_labels={"app": "x"}), False),
    "an empty selector selects all": (Budget(name="b", owner_uid="", match_labels={}), True),
    "no selector selects none": (Budget(name="b", owner_uid="", match_labels={}, selects_nothing=True), False),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_foreign_budgets(case: str) -> None:
    budget, covers = BUDGETS[case]
    assert bool(foreign_budgets([budget], [LABELS], "cluster-uid")) is covers


@pytest.mark.parametrize(
    ("operator", "values", "covers"),
    [
        ("In", ["prefill"], True), ("In", ["decode"], False), ("NotIn", ["decode"], True),
        ("NotIn", ["prefill"], False), ("Exists", None, True), ("DoesNotExist", None, False),
    ],
)  # fmt: skip
def test_label_expressions(operator: str, values: list[str] | None, covers: bool) -> None:
    expression = {"key": "role", "operator": operator, "values": values}
    budget = Budget(name="b", owner_uid="", match_labels={}, match_expressions=(expression,))
    assert budget.selects(LABELS) is covers
