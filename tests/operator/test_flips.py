"""Which step of a flip is next, for each state that a crash or a failure can leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from headrace_core.api.names import ROLE_DRAINING, FlipStep, Outcome, Role
from headrace_core.api.wire import Phase, RoleState
from headrace_operator.plan.actions import (
    Action,
    DeletePod,
    FinishFlip,
    LabelDraining,
    PostRole,
    Relabel,
    WriteJournal,
)
from headrace_operator.plan.flips import plan_flips, step_of
from headrace_operator.plan.view import FlipMarks, Silent
from tests.operator.builders import FENCE, GRACE_S, NOW, World, draining, entry, pod, pool, state, switched

OTHERS = (pod(1), pod(2, "decode"))
MARKS = FlipMarks(flip="f1", from_role="prefill", to_role="decode", to_pool="decode", deadline=NOW, boot_id="boot")


def summary(actions: Sequence[Action]) -> list[str]:
    """The sequence of steps, with what matters of each."""
    lines = []
    for action in actions:
        match action:
            case WriteJournal():
                moved = {name: count for name, count in action.flipped.items() if count}
                lines.append(f"journal {[e.name for e in action.journal]} {moved} {action.reason}")
            case LabelDraining():
                lines.append(f"label {action.pod.name} {action.from_role}->{action.to_role}")
            case PostRole():
                lines.append(f"post {action.pod.name} {action.to_role} within {action.drain_timeout_s:g}")
            case Relabel():
                lines.append(f"relabel {action.pod.name} {action.pool} {action.role} {action.epoch} {action.reason}")
            case FinishFlip():
                lines.append(f"finish {action.name} {action.outcome} {action.reason}")
            case DeletePod():
                lines.append(f"delete {action.pod.name} {action.reason}")
            case _:
                lines.append(repr(action))
    return lines


@dataclass(frozen=True)
class Case:
    """A state in the middle of a flip, and the exact steps that follow."""

    name: str
    world: World
    steps: list[str]


def world(worker: object, answer: object = None, open_entry: object = None) -> World:
    """One flip of chat-w0 from prefill to decode."""
    made = World().with_pods(worker, *OTHERS)  # type: ignore[arg-type]
    made = made.with_journal(open_entry or entry())  # type: ignore[arg-type]
    return made.with_roles({0: answer}) if answer is not None else made  # type: ignore[dict-item]


CLOSED_MOVED = "journal [] {'prefill': -1, 'decode': 1} Flipped"
STEPS = [
    Case("reserved: label", world(pod(0), state()), ["label chat-w0 prefill->decode"]),
    Case(
        "reserved by another leader: drop",
        world(pod(0), state(), entry(fence=FENCE - 1)),
        ["journal [] {} FlipDropped"],
    ),
    Case("labelled: post", world(draining(0), state()), ["post chat-w0 decode within 60"]),
    Case(
        "labelled by another leader: post",
        world(draining(0), state(), entry(fence=FENCE - 1)),
        ["post chat-w0 decode within 60"],
    ),
    Case(
        "labelled, deadline passed: relabel back",
        world(draining(0), state(), entry(deadline=NOW - 1)),
        [
            "relabel chat-w0 prefill prefill 0 DeadlinePassed",
            "finish f1 RolledBack DeadlinePassed",
            "journal [] {} DeadlinePassed",
        ],
    ),
    Case("posted, draining: look again", world(draining(0), state(phase=Phase.DRAINING)), []),
    Case("posted, switching: look again", world(draining(0), state(phase=Phase.SWITCHING)), []),
    Case("role not asked yet: look again", world(draining(0)), []),
    Case(
        "switched: relabel, then close",
        world(draining(0), switched()),
        ["relabel chat-w0 decode decode 1 Flipped", "finish f1 Succeeded Flipped", CLOSED_MOVED],
    ),
    Case(
        "relabelled, entry open: close",
        world(pod(0, "decode", epoch=1, origin_pool="prefill"), switched()),
        ["finish f1 Succeeded Flipped", CLOSED_MOVED],
    ),
    Case(
        "relabelled by another leader: close",
        world(pod(0, "decode", epoch=1), switched(), entry(fence=FENCE - 1)),
        ["finish f1 Succeeded Flipped", CLOSED_MOVED],
    ),
    Case(
        "rolled back by the worker: relabel back",
        world(draining(0), switched("prefill", 1, "RolledBack")),
        [
            "relabel chat-w0 prefill prefill 1 WorkerRolledBack",
            "finish f1 RolledBack WorkerRolledBack",
            "journal [] {} WorkerRolledBack",
        ],
    ),
    Case(
        "relabelled back, entry open: close",
        world(pod(0, epoch=1), switched("prefill", 1, "RolledBack")),
        ["finish f1 RolledBack WorkerRolledBack", "journal [] {} WorkerRolledBack"],
    ),
    Case(
        "container restarted: back to what it is",
        world(draining(0), RoleState(role=Role.PREFILL, epoch=0, boot_id="other", phase=Phase.READY)),
        [
            "relabel chat-w0 prefill prefill 0 ContainerRestarted",
            "finish f1 RolledBack ContainerRestarted",
            "journal [] {} ContainerRestarted",
        ],
    ),
    Case(
        "container restarted after the switch: the switch is lost",
        world(
            draining(0, epoch=3),
            RoleState(role=Role.PREFILL, epoch=0, boot_id="other", phase=Phase.READY),
            entry(epoch=3),
        ),
        [
            "relabel chat-w0 prefill prefill 0 ContainerRestarted",
            "finish f1 RolledBack ContainerRestarted",
            "journal [] {} ContainerRestarted",
        ],
    ),
    Case("silent before the end of grace: look again", world(draining(0), Silent(why="refused")), []),
    Case(
        "silent after grace: replace",
        world(draining(0), Silent(why="refused"), entry(deadline=NOW - GRACE_S - 1)),
        ["delete chat-w0 WorkerSilent"],
    ),
    Case(
        "failed: replace",
        world(draining(0), state(phase=Phase.FAILED)),
        ["delete chat-w0 WorkerFailed"],
    ),
    Case(
        "still draining within grace: look again",
        world(draining(0), state(phase=Phase.DRAINING), entry(deadline=NOW - GRACE_S + 1)),
        [],
    ),
    Case(
        "still draining after grace: replace",
        world(draining(0), state(phase=Phase.DRAINING), entry(deadline=NOW - GRACE_S - 1)),
        ["delete chat-w0 WorkerStuck"],
    ),
    Case(
        "pod terminating: close as replaced",
        world(draining(0, terminating=True), state()),
        ["finish f1 Replaced PodGone", "journal [] {} PodGone"],
    ),
    Case(
        "another pod of that name: close as replaced",
        world(pod(0, uid="uid-new")),
        ["finish f1 Replaced PodGone", "journal [] {} PodGone"],
    ),
    Case(
        "status lost: rebuild from the annotations",
        World().with_pods(draining(0), *OTHERS).with_roles({0: state()}),
        ["journal ['f1'] {} FlipRebuilt"],
    ),
    Case(
        "shapes differ: replace the pod",
        world(pod(0), state()).with_pools(pool("prefill", Role.PREFILL), pool("decode", Role.DECODE, 1, tensor=2)),
        ["delete chat-w0 ShapeDiffers"],
    ),
    Case(
        "shapes differ, pod gone: close, and the other pool gets one more",
        world(pod(0, terminating=True)).with_pools(
            pool("prefill", Role.PREFILL), pool("decode", Role.DECODE, 1, tensor=2)
        ),
        ["finish f1 Replaced ShapeDiffers", "journal [] {'prefill': -1, 'decode': 1} ShapeDiffers"],
    ),
    Case(
        "target pool removed before the label: close",
        world(pod(0), state()).with_pools(pool("prefill", Role.PREFILL), pool("other", Role.DECODE, 1)),
        ["finish f1 RolledBack PoolGone", "journal [] {} PoolGone"],
    ),
    Case(
        "target pool removed after the switch: to the pool of its role",
        world(draining(0), switched()).with_pools(pool("prefill", Role.PREFILL), pool("other", Role.DECODE, 1)),
        [
            "relabel chat-w0 other decode 1 PoolGone",
            "finish f1 RolledBack PoolGone",
            "journal [] {'prefill': -1, 'other': 1} PoolGone",
        ],
    ),
    Case(
        "label says draining, annotations gone: the worker decides",
        world(pod(0, role=ROLE_DRAINING), switched()),
        ["relabel chat-w0 decode decode 1 Flipped", "finish f1 Succeeded Flipped", CLOSED_MOVED],
    ),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_next_step(case: Case) -> None:
    assert summary(plan_flips(case.world.look(), GRACE_S)) == case.steps


REPAIRS = [
    Case("labels are right: nothing", World().with_pods(pod(0), *OTHERS).with_roles({0: state()}), []),
    Case(
        "a flipped worker restarted in its first role: label and counts follow",
        World().with_pods(pod(0, "decode", origin_pool="prefill", epoch=1), *OTHERS).with_roles({0: state()}),
        [
            "relabel chat-w0 prefill prefill 0 RoleRepaired",
            "journal [] {'decode': -1, 'prefill': 1} RoleRepaired",
        ],
    ),
    Case(
        "only the epoch is wrong: label, same pool",
        World().with_pods(pod(0), *OTHERS).with_roles({0: state(epoch=2)}),
        ["relabel chat-w0 prefill prefill 2 RoleRepaired"],
    ),
    Case(
        "a worker that is changing is not repaired",
        World().with_pods(pod(0), *OTHERS).with_roles({0: state("decode", 1, Phase.SWITCHING)}),
        [],
    ),
    Case(
        "draining without annotations or entry: the worker decides",
        World().with_pods(pod(0, role=ROLE_DRAINING), *OTHERS).with_roles({0: state()}),
        ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
    ),
    Case("unknown role: nothing", World().with_pods(pod(0), *OTHERS).with_roles({0: Silent(why="x")}), []),
    Case(
        "the role label is gone: it comes back",
        World().with_pods(pod(0, role=""), *OTHERS).with_roles({0: state()}),
        ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
    ),
    Case(
        "the pool label is gone: it comes back, and nothing was flipped",
        World().with_pods(pod(0, pool=""), *OTHERS).with_roles({0: state()}),
        ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
    ),
    Case(
        "the pool label says a pool of the other role: the worker goes back, and nothing was flipped",
        World().with_pods(pod(0, pool="decode"), *OTHERS).with_roles({0: state()}),
        ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
    ),
    Case(
        "marks of a flip without the label: cleared, nobody is flipped by them",
        World().with_pods(pod(0, flip=MARKS), *OTHERS).with_roles({0: state()}),
        ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
    ),
    Case(
        "marks of a flip from a pool that cannot be: cleared",
        World().with_pods(draining(0, pool="p" * 63), *OTHERS).with_roles({0: state()}),
        ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
    ),
    *(
        Case(
            f"marks that no operator can have written ({what}): cleared",
            World().with_pods(replace(draining(0), flip=replace(MARKS, **marks)), *OTHERS).with_roles({0: state()}),
            ["relabel chat-w0 prefill prefill 0 RoleRepaired"],
        )
        for what, marks in {
            "no name": {"flip": ""},
            "no name of an object": {"flip": "../F 1"},
            "a long name": {"flip": "f" * 254},
            "a long pool": {"to_pool": "p" * 41},
            "a long boot id": {"boot_id": "b" * 65},
        }.items()
    ),
]


@pytest.mark.parametrize("case", REPAIRS, ids=lambda case: case.name)
def test_repair(case: Case) -> None:
    assert summary(plan_flips(case.world.look(), GRACE_S)) == case.steps


def test_measured_times_reach_the_ledger() -> None:
    actions = plan_flips(world(draining(0), switched()).look(), GRACE_S)
    done = next(action for action in actions if isinstance(action, FinishFlip))
    assert (done.drain_s, done.switch_s, done.outcome) == (1.5, 0.004, Outcome.SUCCEEDED)


def test_times_of_an_earlier_flip_do_not() -> None:
    stale = switched(epoch=1)
    observed = world(draining(0, epoch=1), stale, entry(epoch=1, deadline=NOW - 1)).look()
    done = next(action for action in plan_flips(observed, GRACE_S) if isinstance(action, FinishFlip))
    assert (done.outcome, done.drain_s, done.switch_s) == (Outcome.ROLLED_BACK, None, None)


def test_the_rebuilt_entry_equals_the_lost_one_where_it_can() -> None:
    (action,) = plan_flips(World().with_pods(draining(0), *OTHERS).look(), GRACE_S)
    assert isinstance(action, WriteJournal)
    assert action.journal == (entry(started=NOW, step=FlipStep.LABELLED),)


def test_two_pods_with_the_marks_of_one_flip_make_one_entry() -> None:
    (action,) = plan_flips(World().with_pods(draining(0), draining(1), pod(2, "decode")).look(), GRACE_S)
    assert isinstance(action, WriteJournal)
    assert [made.name for made in action.journal] == ["f1"]


@pytest.mark.parametrize(
    ("worker", "answer", "step"),
    [
        (pod(0), state(), FlipStep.RESERVED),
        (draining(0), state(), FlipStep.LABELLED),
        (draining(0), state(phase=Phase.DRAINING), FlipStep.DRAINING),
        (draining(0), state(phase=Phase.SWITCHING), FlipStep.SWITCHING),
        (draining(0), state(phase=Phase.ROLLING_BACK), FlipStep.ROLLING_BACK),
        (draining(0), switched(), FlipStep.SWITCHED),
        (pod(0, "decode", epoch=1), switched(), FlipStep.RELABELLED),
    ],
)
def test_step_in_status(worker: object, answer: object, step: FlipStep) -> None:
    assert step_of(world(worker, answer).look(), entry()) is step
