"""Who stands where: the worker's report against its pod's labels, silence, placements, what the peers are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_core.api.names import Role
from headrace_core.api.wire import LoadReport
from headrace_gateway.monitor import is_given_up
from headrace_gateway.pods import PodRecord
from headrace_gateway.registry import Registry, Silence, Standing, WorkerView, standing_of
from headrace_gateway.steps.route import RouteReason, choose_prefill, explain

SILENCE = Silence(suspect_after_s=1.0, out_after_s=3.0)


def record(name: str = "w0", **changes: Any) -> PodRecord:
    base = PodRecord(
        name=name, uid=f"uid-{name}", address=f"{name}:8000", role="prefill", epoch=0, ready=True, terminating=False
    )
    return replace(base, **changes)


def report(pod: str = "w0", **changes: Any) -> LoadReport:
    fields: dict[str, Any] = {
        "pod": pod,
        "address": f"{pod}:8000",
        "boot_id": "b",
        "sequence": 1,
        "role": Role.PREFILL,
        "epoch": 0,
        "accepting": True,
    }
    return LoadReport(**{**fields, **changes})


STANDINGS = [
    ("all well", {}, {}, 0.0, False, Standing.READY),
    ("never heard", {}, None, 0.0, False, Standing.OUT),
    ("just not suspect", {}, {}, 0.99, False, Standing.READY),
    ("suspect", {}, {}, 1.0, False, Standing.SUSPECT),
    ("just not out", {}, {}, 2.99, False, Standing.SUSPECT),
    ("out", {}, {}, 3.0, False, Standing.OUT),
    ("out although draining", {"role": "draining"}, {}, 3.0, False, Standing.OUT),
    ("not Ready for Kubernetes", {"ready": False}, {}, 0.0, False, Standing.SUSPECT),
    ("not accepting", {}, {"accepting": False}, 0.0, False, Standing.DRAINING),
    ("refused since", {}, {}, 0.0, True, Standing.DRAINING),
    ("terminating", {"terminating": True}, {}, 0.0, False, Standing.DRAINING),
    ("label draining, worker does not know yet", {"role": "draining"}, {}, 0.0, False, Standing.DRAINING),
    ("label draining, worker has switched", {"role": "draining"}, {"epoch": 1}, 0.0, False, Standing.READY),
    ("label draining of epoch 3, restarted", {"role": "draining", "epoch": 3}, {}, 0.0, False, Standing.DRAINING),
    ("label without a role", {"role": ""}, {}, 0.0, False, Standing.READY),
    ("label of another role", {"role": "decode"}, {}, 0.0, False, Standing.READY),
]


@pytest.mark.parametrize(
    ("name", "pod", "said", "silent_s", "closed", "expected"), STANDINGS, ids=[case[0] for case in STANDINGS]
)
def test_standing(
    *, name: str, pod: dict[str, Any], said: dict[str, Any] | None, silent_s: float, closed: bool, expected: Standing
) -> None:
    heard = None if said is None else report(**said)
    assert standing_of(record(**pod), heard, silent_s=silent_s, closed=closed, silence=SILENCE) is expected


def registry(*records: PodRecord) -> Registry:
    it = Registry(SILENCE)
    it.set_pods({each.name or each.address: each for each in records})
    return it


def view(it: Registry, now_s: float) -> WorkerView:
    (only,) = it.views(now_s)
    return only


ROLES = [
    ("report wins while fresh", "prefill", Role.DECODE, 0.0, Role.DECODE),
    ("report wins while suspect", "prefill", Role.DECODE, 2.0, Role.DECODE),
    ("label when silent", "prefill", Role.DECODE, 3.0, Role.PREFILL),
    ("label draining says nothing of the role", "draining", Role.DECODE, 3.0, Role.DECODE),
    ("label when never heard", "prefill", None, 0.0, Role.PREFILL),
    ("nothing known", "draining", None, 0.0, None),
]


@pytest.mark.parametrize(("name", "label", "said", "at_s", "expected"), ROLES, ids=[case[0] for case in ROLES])
def test_role(name: str, label: str, said: Role | None, at_s: float, expected: Role | None) -> None:
    it = registry(record(role=label))
    if said:
        it.hear("w0:8000", report(role=said), 0.0)
    assert view(it, at_s).role is expected


def test_epoch_is_the_reported_one() -> None:
    it = registry(record(epoch=4))
    assert view(it, 0.0).epoch == 4
    it.hear("w0:8000", report(epoch=6), 0.0)
    assert view(it, 9.0).epoch == 6


HEARD = [
    ("newer", {"sequence": 6}, True),
    ("the same again", {"sequence": 5}, False),
    ("older", {"sequence": 4}, False),
    ("another boot counts anew", {"sequence": 1, "boot_id": "c"}, True),
    ("another pod at the address", {"sequence": 9, "pod": "w9"}, False),
]


@pytest.mark.parametrize(("name", "changes", "taken"), HEARD, ids=[case[0] for case in HEARD])
def test_hear(name: str, changes: dict[str, Any], taken: bool) -> None:
    it = registry(record())
    assert it.hear("w0:8000", report(sequence=5), 0.0)
    assert it.hear("w0:8000", report(**changes), 2.0) is taken
    assert view(it, 2.0).standing is (Standing.READY if taken else Standing.SUSPECT)


def test_unknown_address_is_not_heard() -> None:
    assert not registry().hear("w0:8000", report(), 0.0)


def test_worker_given_by_address_says_its_name_itself() -> None:
    it = registry(record("", address="w0:8000", role=""))
    assert it.hear("w0:8000", report("anybody"), 0.0)
    assert view(it, 0.0).pod == "anybody"


def test_refusal_counts_until_the_next_report() -> None:
    it = registry(record())
    it.hear("w0:8000", report(sequence=1), 0.0)
    it.close("w0:8000")
    assert not view(it, 0.0).can_take
    it.hear("w0:8000", report(sequence=2), 0.1)
    assert view(it, 0.1).can_take


def test_pod_changes_keep_what_was_heard_but_a_new_pod_starts_unknown() -> None:
    it = registry(record())
    it.hear("w0:8000", report(), 0.0)
    it.set_pods({"w0": record(role="draining")})
    assert view(it, 0.0).standing is Standing.DRAINING
    it.set_pods({"w0": record(uid="another")})
    assert view(it, 0.0).standing is Standing.OUT


def test_new_pod_wins_an_address_over_a_terminating_one() -> None:
    new, old = record("w1", address="a:1"), record("w0", address="a:1", terminating=True)
    for order in ((new, old), (old, new)):
        it = registry(*order)
        assert view(it, 0.0).pod == "w1"


def test_own_stall_is_not_the_workers_silence() -> None:
    it = registry(record())
    it.hear("w0:8000", report(), 0.0)
    it.forgive(5.0)
    assert view(it, 5.0).standing is Standing.READY


def test_placements_count_until_they_end_or_a_report_has_them() -> None:
    it = registry(record())
    it.hear("w0:8000", report(queued_prefill_tokens=100), 1.0)
    placed = it.place("w0:8000", 30, 1.5)
    it.place("w0:8000", 7, 1.6)
    assert view(it, 1.6).queued_prefill_tokens == 137
    it.unplace("w0:8000", placed)
    assert view(it, 1.6).queued_prefill_tokens == 107
    it.hear("w0:8000", report(queued_prefill_tokens=7, sequence=2), 1.7)
    assert view(it, 1.7).queued_prefill_tokens == 7


def told(it: Registry, now_s: float) -> dict[str, bool]:
    return {each.pod: each.accepting for each in it.reports(Role.DECODE, now_s)}


def test_peers_are_told_whom_not_to_choose() -> None:
    it = registry(record("w0"), record("w1", role="draining"), record("w2"), record("w3"), record("w4"))
    for pod, at_s in (("w0", 4.0), ("w1", 4.0), ("w2", 2.5), ("w3", 0.5)):
        it.hear(f"{pod}:8000", report(pod, role=Role.DECODE), at_s)
    it.hear("w4:8000", report("w4", role=Role.PREFILL), 4.0)
    assert told(it, 4.0) == {"w0": True, "w1": False, "w2": False}
    it.close("w0:8000")
    # Nobody is ready: a suspect one is better than none.
    assert told(it, 4.0) == {"w0": False, "w1": False, "w2": True}


def worker(pod: str, **changes: Any) -> WorkerView:
    base = WorkerView(
        pod=pod,
        address=f"{pod}:8000",
        role=Role.PREFILL,
        epoch=0,
        standing=Standing.READY,
        queued_prefill_tokens=0,
        running_tokens=0,
    )
    return replace(base, **changes)


D = worker("d0", role=Role.DECODE)
ROUTES: list[tuple[str, list[WorkerView], str | None, RouteReason]] = [
    ("by name", [worker("b"), worker("a"), D], "a", RouteReason.LEAST_LOADED),
    (
        "fewest queued tokens first",
        [worker("a", queued_prefill_tokens=2), worker("b", queued_prefill_tokens=1, running_tokens=9), D],
        "b",
        RouteReason.LEAST_LOADED,
    ),
    ("then running tokens", [worker("a", running_tokens=2), worker("b"), D], "b", RouteReason.LEAST_LOADED),
    (
        "suspect only when alone",
        [worker("a", standing=Standing.SUSPECT), worker("b", queued_prefill_tokens=99), D],
        "b",
        RouteReason.LEAST_LOADED,
    ),
    ("suspect alone", [worker("a", standing=Standing.SUSPECT), D], "a", RouteReason.ONLY_SUSPECT),
    ("failed this request", [worker("f"), worker("z", queued_prefill_tokens=9), D], "z", RouteReason.LEAST_LOADED),
    ("failed and alone", [worker("f"), D], "f", RouteReason.ONLY_SUSPECT),
    ("draining", [worker("a", standing=Standing.DRAINING), D], None, RouteReason.NO_PREFILL_WORKER),
    ("out", [worker("a", standing=Standing.OUT), D], None, RouteReason.NO_PREFILL_WORKER),
    ("nobody", [], None, RouteReason.NO_PREFILL_WORKER),
    ("nobody to decode", [worker("a")], None, RouteReason.NO_DECODE_WORKER),
    (
        "decode draining",
        [worker("a"), replace(D, standing=Standing.DRAINING)],
        None,
        RouteReason.NO_DECODE_WORKER,
    ),
    ("role unknown", [worker("a", role=None), D], None, RouteReason.NO_PREFILL_WORKER),
]


@pytest.mark.parametrize(("name", "workers", "expected", "reason"), ROUTES, ids=[case[0] for case in ROUTES])
def test_route(name: str, workers: list[WorkerView], expected: str | None, reason: RouteReason) -> None:
    route = choose_prefill(workers, frozenset({"f:8000"}))
    assert (route.worker.pod if route.worker else None, route.reason) == (expected, reason)
    assert explain(route)


GIVEN_UP = [
    ("silent and idle", 5.0, 5.0, False, True),
    ("worker lives", 0.1, 60.0, False, False),
    ("call just sent", 9.0, 0.1, False, False),
    ("pod gone", None, 5.0, False, True),
    ("begun stream gets more time", 9.0, 9.0, True, False),
    ("begun stream at last", 30.0, 30.0, True, True),
]


@pytest.mark.parametrize(
    ("name", "silent_s", "idle_s", "begun", "expected"), GIVEN_UP, ids=[case[0] for case in GIVEN_UP]
)
def test_given_up(name: str, silent_s: float | None, idle_s: float, begun: bool, expected: bool) -> None:
    assert is_given_up(silent_s, idle_s, begun=begun, abandon_after_s=5.0, stream_idle_s=30.0) is expected
