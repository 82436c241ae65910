"""Which pods are made, adopted and deleted: scaling, slots, failures, rollouts, removed pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headrace_core.api.names import Reason, Role
from headrace_operator.plan.actions import Action, AdoptPod, CreatePod, DeletePod
from headrace_operator.plan.pods import plan_pods
from headrace_operator.plan.view import Failures
from tests.operator.builders import NOW, World, draining, entry, pod, pool, state

THREE = (pod(0), pod(1), pod(2, "decode"))


def summary(actions: Sequence[Action]) -> list[str]:
    lines = []
    for action in actions:
        match action:
            case CreatePod():
                lines.append(f"create {action.slot} {action.pool} {action.reason}")
            case DeletePod():
                lines.append(f"delete {action.pod.name} {action.reason}")
            case AdoptPod():
                lines.append(f"adopt {action.pod.name}")
            case _:
                lines.append(repr(action))
    return lines


DESIRED = {
    "as specified": (True, 0, 3),
    "one more": (True, 1, 4),
    "never above the maximum": (True, 9, 5),
    "never below the minimum": (True, -9, 2),
    "a static pool does not move": (False, 1, 3),
}


@pytest.mark.parametrize(("elastic", "flipped", "desired"), DESIRED.values(), ids=DESIRED.keys())
def test_desired_workers_of_a_pool(elastic: bool, flipped: int, desired: int) -> None:
    one = pool("prefill", Role.PREFILL, 3, elastic=elastic, min_replicas=2, max_replicas=5)
    assert one.desired(flipped) == desired


@dataclass(frozen=True)
class Case:
    name: str
    world: World
    steps: list[str]


def sized(prefill: int, decode: int = 1, **of_prefill: object) -> World:
    return World().with_pools(pool("prefill", Role.PREFILL, prefill, **of_prefill), pool("decode", Role.DECODE, decode))


CASES = [
    Case("as it should be", World().with_pods(*THREE), []),
    Case(
        "nothing there",
        World(),
        ["create 0 prefill ScaleUp", "create 1 prefill ScaleUp", "create 2 decode ScaleUp"],
    ),
    Case("lowest free slot", World().with_pods(pod(1), pod(2, "decode")), ["create 0 prefill ScaleUp"]),
    Case(
        "a terminating pod counts as gone but keeps its name",
        World().with_pods(pod(0, terminating=True), pod(1), pod(2, "decode")),
        ["create 3 prefill ScaleUp"],
    ),
    Case(
        "a stranger's pod keeps its name and does not count",
        World().with_pods(pod(0, owner_uid="replicaset"), pod(1), pod(2, "decode")),
        ["create 3 prefill ScaleUp"],
    ),
    Case(
        "an orphan is adopted, and counts once it is ours",
        World().with_pods(pod(0, owner_uid=""), pod(1), pod(2, "decode")),
        ["adopt chat-w0", "create 3 prefill ScaleUp"],
    ),
    Case(
        "an orphan of another name is not ours",
        World().with_pods(*THREE, pod(3, owner_uid="", name="chat-web")),
        [],
    ),
    Case(
        "a failed pod is deleted and replaced",
        World().with_pods(pod(0, phase="Failed"), pod(1), pod(2, "decode")),
        ["delete chat-w0 PodFailed", "create 3 prefill ScaleUp"],
    ),
    Case(
        "pods keep failing: wait",
        World().with_pods(pod(1), pod(2, "decode")).with_failures(2, NOW - 19),
        [],
    ),
    Case(
        "pods kept failing, the wait is over",
        World().with_pods(pod(1), pod(2, "decode")).with_failures(2, NOW - 20),
        ["create 0 prefill ScaleUp"],
    ),
    Case("scaled down: the newest goes", sized(1).with_pods(*THREE), ["delete chat-w1 ScaleDown"]),
    Case(
        "scaled down: the one that is not ready goes first",
        sized(1).with_pods(pod(0, ready=False), pod(1), pod(2, "decode")),
        ["delete chat-w0 ScaleDown"],
    ),
    Case(
        "scaled down: then the least loaded",
        sized(1).with_pods(*THREE).with_roles({0: state(draining_requests=1), 1: state(draining_requests=5)}),
        ["delete chat-w0 ScaleDown"],
    ),
    Case(
        "scaled down: a cordoned node drains first",
        sized(1).with_pods(pod(0, node="node-b"), pod(1, ready=False), pod(2, "decode")).cordoned("node-b"),
        ["delete chat-w0 ScaleDown"],
    ),
    Case(
        "scaled down: not the one that is flipping",
        sized(1).with_pods(pod(0), draining(1), pod(2, "decode")).with_journal(entry(1)),
        ["delete chat-w0 ScaleDown"],
    ),
    Case(
        "flips count",
        World()
        .with_pods(pod(1), pod(0, "decode", origin_pool="prefill"), pod(2, "decode"))
        .flipped(prefill=-1, decode=1),
        [],
    ),
    Case(
        "a flip in flight counts where it came from",
        World().with_pods(draining(0), pod(1), pod(2, "decode")).with_journal(entry()),
        [],
    ),
    Case(
        "relabelled but not closed still counts where it came from",
        World().with_pods(pod(0, "decode"), pod(1), pod(2, "decode")).with_journal(entry()),
        [],
    ),
    Case(
        "flips never lead below the minimum",
        World().with_pods(*THREE).flipped(prefill=-5),
        ["delete chat-w1 ScaleDown"],
    ),
    Case(
        "a static pool has its replicas",
        World()
        .with_pools(pool("prefill", Role.PREFILL, elastic=False), pool("decode", Role.DECODE, 1))
        .with_pods(*THREE)
        .flipped(prefill=-1, decode=0),
        [],
    ),
    Case(
        "a removed pool loses its workers",
        World().with_pods(*THREE, pod(3, "old")),
        ["delete chat-w3 PoolRemoved"],
    ),
    Case(
        "a refused template: the pool keeps what it has",
        sized(5).with_pods(*THREE).with_revisions(decode="r1"),
        [],
    ),
    Case(
        "rollout: one at a time",
        World().with_pods(*THREE).with_revisions(prefill="r2", decode="r1"),
        ["delete chat-w0 OutOfDate"],
    ),
    Case(
        "rollout: as many as maxUnavailable",
        sized(3).unavailable(2).with_pods(*THREE, pod(3)).with_revisions(prefill="r2", decode="r1"),
        ["delete chat-w0 OutOfDate", "delete chat-w1 OutOfDate"],
    ),
    Case(
        "rollout: waits for the replacement to be ready",
        World()
        .with_pods(pod(3, revision="r2", ready=False), pod(1), pod(2, "decode"))
        .with_revisions(prefill="r2", decode="r1"),
        [],
    ),
    Case(
        "rollout: an old one that is not ready costs nothing",
        World().with_pods(pod(0, ready=False), pod(1), pod(2, "decode")).with_revisions(prefill="r2", decode="r1"),
        ["delete chat-w0 OutOfDate"],
    ),
    Case(
        "rollout: waits for a flip of the pool",
        World()
        .with_pods(draining(0), pod(1), pod(2, "decode"))
        .with_journal(entry())
        .with_revisions(prefill="r2", decode="r1"),
        [],
    ),
    Case(
        "a flipped worker is measured by the pool it was made for",
        World()
        .with_pods(pod(1), pod(0, "decode", origin_pool="prefill"), pod(2, "decode", revision="r2"))
        .flipped(prefill=-1, decode=1)
        .with_revisions(prefill="r1", decode="r2"),
        [],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pods(case: Case) -> None:
    assert summary(plan_pods(case.world.look())) == case.steps


@pytest.mark.parametrize(("count", "wait_s"), [(0, 0), (1, 10), (2, 20), (5, 160), (6, 300), (60, 300)])
def test_back_off(count: int, wait_s: float) -> None:
    last = NOW if count else 0
    assert Failures(count=count, last=last).retry_at() - last == wait_s


def test_the_reason_of_a_deletion_is_the_first_that_applies() -> None:
    actions = plan_pods(World().with_pods(pod(0, phase="Failed"), pod(1), pod(2, "decode")).look())
    assert isinstance(actions[0], DeletePod)
    assert actions[0].reason is Reason.POD_FAILED
