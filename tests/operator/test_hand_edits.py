"""What somebody may write into the objects that the operator reads: none of it may end the operator."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headrace_core.api import names, resources
from headrace_core.api.names import Annotation, Label
from headrace_operator.objects import _first_line
from headrace_operator.plan.actions import WriteJournal
from headrace_operator.plan.flips import plan_flips
from headrace_operator.plan.status import journal_status
from headrace_operator.reflector import parse
from tests.operator.builders import GRACE_S, UID, World

ODD_MARKS = [
    {Annotation.EPOCH: "9" * 5000},
    {Annotation.EPOCH: "9" * 30, Annotation.FLIP_ID: "f1"},
    {Annotation.FLIP_ID: ""},
    {Annotation.FLIP_ID: "f1", Annotation.DEADLINE: "0001-01-01T00:00:00Z"},
    {Annotation.FLIP_ID: "f1", Annotation.DEADLINE: "9999-12-31T23:59:59Z"},
    {Annotation.FLIP_ID: "f1", Annotation.DEADLINE: "tomorrow"},
    {Annotation.FLIP_ID: "f1", Annotation.BOOT_ID: "b" * 100},
]


def body(marks: dict[str, str]) -> dict[str, Any]:
    labels = {
        Label.CLUSTER: "chat",
        Label.APP_COMPONENT: "worker",
        Label.POOL: "prefill",
        Label.ROLE: names.ROLE_DRAINING,
        Label.REVISION: "r1",
    }
    return {
        "metadata": {
            "namespace": "llm",
            "name": "chat-w0",
            "uid": "uid-0",
            "resourceVersion": "5",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels,
            "annotations": {Annotation.EPOCH: "0", Annotation.ORIGIN_POOL: "prefill", **marks},
            "ownerReferences": [{"controller": True, "uid": UID}],
        },
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize("marks", ODD_MARKS, ids=lambda marks: " ".join(f"{k[-8:]}={v[:12]}" for k, v in marks.items()))
def test_odd_annotations_make_a_journal_that_can_be_written_or_none(marks: dict[str, str]) -> None:
    for action in plan_flips(World().with_pods(parse(body(marks))).look(), GRACE_S):
        assert isinstance(action, WriteJournal)
        journal_status(action.journal, action.flipped, action.window, resources.ClusterStatus())


@pytest.mark.parametrize(
    ("raw", "token"),
    [
        (b"one\ntwo\n", "one"),
        (b"\n  one \n", "one"),
        (b"", ""),
        (b"\xff\xfe\x00\ntwo", "two"),
        ("caf\u00e9".encode(), ""),
        (b"a\x00b", ""),
    ],
)
def test_a_token_is_the_first_line_that_a_header_can_carry(raw: bytes, token: str) -> None:
    assert _first_line({"data": {names.TOKEN_SECRET_KEY: base64.b64encode(raw).decode()}}) == token
