"""What the Kubernetes API says, folded; and a watch against an API server that ends, errs and forgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from headrace_gateway.kube import PodWatch, wait_s
from headrace_gateway.pods import PodEventType, PodRecord, PodTable, fold, record_of, static_table, table_of
from tests.gateway.fakes import eventually

ROLE = "serving.headrace.dev/role"
EPOCH = "serving.headrace.dev/epoch"


def pod(name: str = "w0", version: int = 1, **changes: Any) -> dict[str, Any]:
    ip = changes.get("ip", "127.0.9.1")
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {ROLE: changes.get("role", "prefill")},
            "annotations": {EPOCH: changes.get("epoch", "2")},
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if changes.get("terminating") else {}),
        },
        "status": {
            "phase": changes.get("phase", "Running"),
            **({"podIP": ip} if ip else {}),
            "conditions": [{"type": "Ready", "status": changes.get("ready", "True")}],
        },
    }


def record(**changes: Any) -> PodRecord:
    fields: dict[str, Any] = {
        "name": "w0",
        "uid": "uid-w0",
        "address": "127.0.9.1:8000",
        "role": "prefill",
        "epoch": 2,
        "ready": True,
        "terminating": False,
    }
    return PodRecord(**{**fields, **changes})


RECORDS: list[tuple[str, dict[str, Any], PodRecord | None]] = [
    ("whole", pod(), record()),
    ("IPv6", pod(ip="fd00::1"), record(address="[fd00::1]:8000")),
    ("no address yet", pod(ip=None), None),
    ("failed", pod(phase="Failed"), None),
    ("succeeded", pod(phase="Succeeded"), None),
    ("not ready", pod(ready="False"), record(ready=False)),
    ("terminating", pod(terminating=True), record(terminating=True)),
    ("draining", pod(role="draining"), record(role="draining")),
    ("malformed epoch", pod(epoch="x"), record(epoch=0)),
    ("bare", {"metadata": {"name": "w0", "uid": "uid-w0"}, "status": {}}, None),
    (
        "no labels",
        {"metadata": {"name": "w0", "uid": "uid-w0"}, "status": {"podIP": "127.0.9.1"}},
        record(role="", epoch=0, ready=False),
    ),
]


@pytest.mark.parametrize(("name", "shown", "expected"), RECORDS, ids=[case[0] for case in RECORDS])
def test_record(name: str, shown: dict[str, Any], expected: PodRecord | None) -> None:
    assert record_of(shown, port=8000) == expected


FOLDS: list[tuple[str, PodEventType, dict[str, Any], dict[str, PodRecord]]] = [
    ("added", PodEventType.ADDED, pod("w1"), {"w0": record(), "w1": record(name="w1", uid="uid-w1")}),
    ("modified", PodEventType.MODIFIED, pod(role="decode"), {"w0": record(role="decode")}),
    ("lost its address", PodEventType.MODIFIED, pod(ip=None), {}),
    ("deleted", PodEventType.DELETED, pod(), {}),
    ("deleted unknown", PodEventType.DELETED, pod("w9"), {"w0": record()}),
]


@pytest.mark.parametrize(("name", "kind", "shown", "expected"), FOLDS, ids=[case[0] for case in FOLDS])
def test_fold(name: str, kind: PodEventType, shown: dict[str, Any], expected: dict[str, PodRecord]) -> None:
    before = table_of([pod()], port=8000)
    assert fold(before, kind, shown, port=8000) == expected
    assert before == {"w0": record()}, "the old table is changed"


def test_static_table_knows_only_addresses() -> None:
    table = static_table(["127.0.9.1:8000"])
    assert table == {"127.0.9.1:8000": record(name="", uid="", role="", epoch=0)}


def test_waits_grow_to_a_bound() -> None:
    assert [round(wait_s(failures, 0.0), 2) for failures in (0, 1, 3, 20)] == [0.05, 0.1, 0.4, 2.5]
    assert wait_s(20, 0.999) < 5.0


class FakeApi:
    """Answers list and watch of pods from scripts; each watch sends its events, then ends."""

    def __init__(self) -> None:
        self.lists: list[Callable[[], web.Response]] = []
        self.watches: list[tuple[str, list[dict[str, Any]]]] = []
        """The resource version that must be asked for, and the events to send."""
        self.asked: list[dict[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        if "watch" not in query:
            return self.lists.pop(0)() if len(self.lists) > 1 else self.lists[0]()
        if not self.watches:
            await asyncio.sleep(60)
        version, events = self.watches.pop(0)
        assert query["resourceVersion"] == version
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            data = json.dumps(event).encode() + b"\n"
            # In two pieces, so that a line is longer than what arrives at once.
            await response.write(data[:40])
            await response.write(data[40:])
        return response


def listing(version: str, *pods: dict[str, Any], more: str = "") -> Callable[[], web.Response]:
    metadata = {"resourceVersion": version, **({"continue": more} if more else {})}
    return lambda: web.json_response({"metadata": metadata, "items": list(pods)})


def failing(status: int) -> Callable[[], web.Response]:
    return lambda: web.json_response({"message": "no", "code": status}, status=status)


@asynccontextmanager
async def watching(api: FakeApi, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[PodTable]]:
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/llm/pods", api.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    tables: list[PodTable] = []
    watch = PodWatch(cluster="chat", namespace="llm", port=8000, on_change=tables.append, chance=lambda: 0.0)
    task = asyncio.create_task(watch.run())
    try:
        yield tables
    finally:
        task.cancel()
        await asyncio.wait({task})
        await runner.cleanup()


def event(kind: str, shown: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": shown}


async def test_watch_goes_on_from_the_last_version_and_through_bookmarks(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi()
    api.lists = [listing("5", pod("w0"), more="next"), listing("5", pod("w1"))]
    api.watches = [
        ("5", [event("MODIFIED", pod("w0", 6, role="decode")), event("BOOKMARK", pod(version=9))]),
        ("9", [event("DELETED", pod("w1", 10))]),
    ]
    async with watching(api, tmp_path, monkeypatch) as tables:
        await eventually(lambda: len(tables) == 3)
        assert [sorted(table) for table in tables] == [["w0", "w1"], ["w0", "w1"], ["w0"]]
        assert tables[1]["w0"].role == "decode"
        assert api.asked[0]["labelSelector"] == f"serving.headrace.dev/cluster=chat,{ROLE}"
        assert api.asked[1]["continue"] == "next"


GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


async def test_watch_lists_again_after_410_and_outlives_errors(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi()
    api.lists = [failing(500), listing("5", pod("w0")), failing(503), failing(410), listing("50", pod("w2"))]
    api.watches = [("5", [GONE]), ("50", [event("ADDED", pod("w3", 51))])]
    async with watching(api, tmp_path, monkeypatch) as tables:
        await eventually(lambda: len(tables) == 3)
        assert [sorted(table) for table in tables] == [["w0"], ["w2"], ["w2", "w3"]]
