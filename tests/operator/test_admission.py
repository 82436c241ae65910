"""Which requested flip may begin, which waits, and which is refused with what reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace_core.api.names import Reason, Role
from headrace_core.api.wire import Phase
from headrace_operator.plan.actions import Action, FinishFlip, ForgetFlip, HoldFlip, OwnFlip, WriteJournal
from headrace_operator.plan.admission import LEDGER_LENGTH, forget, plan_requests
from headrace_operator.plan.view import FlipObject, Silent, Window
from tests.operator.builders import FENCE, NOW, World, draining, entry, flip, pod, pool, state

PODS = (pod(0), pod(1), pod(2, "decode"))
KNOWN = {0: state(), 1: state(), 2: state("decode")}


def summary(actions: Sequence[Action]) -> list[str]:
    lines = []
    for action in actions:
        match action:
            case WriteJournal():
                lines.append(f"reserve {[e.name for e in action.journal]}")
            case FinishFlip():
                lines.append(f"{action.outcome} {action.name} {action.reason}")
            case HoldFlip():
                lines.append(f"hold {action.flip.name} {action.reason}")
            case OwnFlip():
                lines.append(f"own {action.flip.name}")
            case _:
                lines.append(repr(action))
    return lines


@dataclass(frozen=True)
class Case:
    name: str
    world: World
    steps: list[str]


def world(*flips: object) -> World:
    return World().with_pods(*PODS).with_roles(KNOWN).with_flips(*(flips or (flip(),)))  # type: ignore[arg-type]


def by_policy(**changes: Any) -> FlipObject:
    return flip(by_operator=True, **changes)


FULL = Window(started=NOW - 100, count=20)
EARLIER = flip("earlier", outcome="Succeeded", finished=NOW - 60)
CASES = [
    Case("may begin", world(), ["reserve ['f1']"]),
    Case("not owned yet: own it as well", world(flip(owned=False)), ["own f1", "reserve ['f1']"]),
    Case("finished: nothing", world(flip(outcome="Succeeded", finished=NOW - 1)), []),
    Case("under way: nothing", world().with_journal(entry()), []),
    Case("oldest first, one at a time", world(flip("new"), flip("old", 1, created=NOW - 9)), ["reserve ['old']"]),
    Case("unknown pod", world(flip(slot=9)), ["Refused f1 PodNotFound"]),
    Case("unknown pool", world(flip(to_pool="nowhere")), ["Refused f1 PoolNotFound"]),
    Case("forbidden", world().with_rules(allowed=False), ["Refused f1 FlipsForbidden"]),
    Case(
        "static pool",
        world().with_pools(pool("prefill", Role.PREFILL), pool("decode", Role.DECODE, elastic=False)),
        ["Refused f1 PoolNotElastic"],
    ),
    Case("same pool", world(flip(to_pool="prefill")), ["Refused f1 SameRole"]),
    Case("below the minimum", world(flip(slot=2, to_pool="prefill")), ["Refused f1 BelowMinimum"]),
    Case(
        "below the minimum, because the other worker is not ready",
        world().with_pods(pod(0), pod(1, ready=False), pod(2, "decode")),
        ["Refused f1 BelowMinimum"],
    ),
    Case(
        "below the minimum, though more are ready until a scale-down is done",
        world().with_pools(pool("prefill", Role.PREFILL, 1), pool("decode", Role.DECODE, 1)),
        ["Refused f1 BelowMinimum"],
    ),
    Case(
        "below the minimum after the flips that are open",
        World()
        .with_pools(pool("prefill", Role.PREFILL, 3, min_replicas=2), pool("decode", Role.DECODE, 1))
        .with_rules(max_concurrent=2)
        .with_pods(draining(0), pod(1), pod(2), pod(3, "decode"))
        .with_roles({1: state(), 2: state()})
        .with_journal(entry())
        .with_flips(flip("f2", 1)),
        ["Refused f2 BelowMinimum"],
    ),
    Case(
        "above the maximum",
        world().with_pools(pool("prefill", Role.PREFILL), pool("decode", Role.DECODE, 1, max_replicas=1)),
        ["Refused f1 AboveMaximum"],
    ),
    Case(
        "above the maximum, counting what flips brought",
        world()
        .with_pools(pool("prefill", Role.PREFILL), pool("decode", Role.DECODE, 1, max_replicas=2))
        .flipped(decode=1),
        ["Refused f1 AboveMaximum"],
    ),
    Case(
        "another flip is open: hold",
        world(flip("f2", 1)).with_journal(entry()),
        ["hold f2 WaitingForAnotherFlip"],
    ),
    Case(
        "held already: say it once",
        world(flip("f2", 1, waiting_for="WaitingForAnotherFlip")).with_journal(entry()),
        [],
    ),
    Case(
        "two at once are allowed",
        world(flip("f2", 1))
        .with_pools(pool("prefill", Role.PREFILL, 3), pool("decode", Role.DECODE, 1))
        .with_pods(draining(0), pod(1), pod(2, "decode"), pod(3))
        .with_rules(max_concurrent=2)
        .with_journal(entry()),
        ["reserve ['f1', 'f2']"],
    ),
    Case("worker silent: hold", world().with_roles({0: Silent(why="x")}), ["hold f1 WaitingForWorker"]),
    Case("worker in another role: hold", world().with_roles({0: state("decode")}), ["hold f1 WaitingForWorker"]),
    Case("worker at another epoch: hold", world().with_roles({0: state(epoch=1)}), ["hold f1 WaitingForWorker"]),
    Case(
        "worker changing: hold",
        world().with_roles({0: state(phase=Phase.ROLLING_BACK)}),
        ["hold f1 WaitingForWorker"],
    ),
    Case(
        "worker silent for too long: refuse",
        world(flip(created=NOW - 61)).with_roles({}),
        ["Refused f1 WorkerNotReady"],
    ),
    Case("policy, cooling down", world(by_policy(), EARLIER), ["Refused f1 CoolingDown"]),
    Case("by hand, cooling down: may begin", world(flip(), EARLIER), ["reserve ['f1']"]),
    Case(
        "policy, the earlier flip was of a pod before this one",
        world(by_policy(), EARLIER).with_pods(pod(0, created=NOW - 50), pod(1), pod(2, "decode")),
        ["reserve ['f1']"],
    ),
    Case(
        "policy, the earlier flip was refused",
        world(by_policy(), replace(EARLIER, outcome="Refused")),
        ["reserve ['f1']"],
    ),
    Case("policy, budget spent", world(by_policy()).in_window(FULL), ["Refused f1 OverHourlyBudget"]),
    Case("by hand, budget spent: may begin", world().in_window(FULL), ["reserve ['f1']"]),
    Case(
        "policy, the hour is over",
        world(by_policy()).in_window(replace(FULL, started=NOW - 3600)),
        ["reserve ['f1']"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_requests(case: Case) -> None:
    assert summary(plan_requests(case.world.look())) == case.steps


def test_the_reservation_holds_what_the_steps_need() -> None:
    (action,) = plan_requests(world().look())
    assert isinstance(action, WriteJournal)
    assert action.journal == (entry(started=NOW, deadline=NOW + 60, fence=FENCE),)
    assert action.reason is Reason.FLIP_RESERVED
    assert action.window == Window(started=NOW, count=0)


def test_only_the_policy_spends_the_budget() -> None:
    (action,) = plan_requests(world(by_policy()).in_window(Window(started=NOW - 5, count=3)).look())
    assert isinstance(action, WriteJournal)
    assert action.window == Window(started=NOW - 5, count=4)


def test_the_ledger_keeps_the_newest_finished_flips() -> None:
    finished = [flip(f"f{n:02}", outcome="Succeeded", finished=NOW - 1000 + n) for n in range(LEDGER_LENGTH + 3)]
    forgotten = forget([flip("pending"), *finished])
    assert forgotten == [ForgetFlip(each) for each in finished[:3]]
