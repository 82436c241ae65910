"""The commands, run whole against an API server that answers from a table; and what they print."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from headrace_cli import flip, render
from headrace_cli.main import main

API = "/apis/serving.headrace.dev/v1alpha1/namespaces/llm"
CLUSTERS, FLIPS, PODS = f"{API}/inferenceclusters", f"{API}/inferenceflips", "/api/v1/namespaces/llm/pods"
CREATED = "2026-01-01T00:00:00Z"
NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)


def cluster_object() -> dict[str, Any]:
    return {
        "metadata": {"name": "chat", "namespace": "llm", "generation": 2},
        "spec": {"pools": [{"name": "fill", "role": "Prefill"}, {"name": "draw", "role": "Decode"}]},
        "status": {
            "observedGeneration": 2,
            "conditions": [{"type": "Ready", "status": "True", "reason": "AllPoolsReady", "message": "all there"}],
            "pools": [{"name": "fill", "desired": 1, "ready": 1, "flipped": -1}],
            "activeFlips": [{"pod": "chat-w0", "from": "fill", "to": "draw", "step": "Labelled"}],
        },
    }


def flip_object(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat-w0-x", "creationTimestamp": CREATED},
        "spec": {"clusterName": "chat", "podName": "chat-w0", "targetPool": "draw", "reason": "why not"},
        "status": status,
    }


SUCCEEDED = {"outcome": "Succeeded", "fromPool": "fill", "drainSeconds": 1.234, "switchMilliseconds": 2.5}
REFUSED = {
    "outcome": "Refused",
    "conditions": [{"type": "Accepted", "status": "False", "message": "the pool fill would fall under its minimum"}],
}


def pod_object(name: str = "chat-w0", role: str = "prefill", **annotations: str) -> dict[str, Any]:
    prefix = "serving.headrace.dev"
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": CREATED,
            "labels": {f"{prefix}/pool": "fill", f"{prefix}/role": role},
            "annotations": {f"{prefix}/epoch": "3", **{f"{prefix}/{key}": value for key, value in annotations.items()}},
        },
        "spec": {"nodeName": "node-1"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


class Api:
    """Answers by method and path; an answer is a body, or a status and a message, or a list of bodies in turn."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.posted: list[dict[str, Any]] = []
        self.queries: list[str] = []

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        found = self.answers.get(f"{method} {path}", (404, "not found"))
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(found, tuple):
            return found[0], {"kind": "Status", "message": found[1], "code": found[0]}
        return 201 if method == "POST" else 200, found


@pytest.fixture(name="api")
def _api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            path, _, query = self.path.partition("?")
            api.queries.append(query)
            if length := int(self.headers.get("Content-Length") or 0):
                api.posted.append(json.loads(self.rfile.read(length)))
            status, body = api.answer(self.command, path)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = respond

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    _use_kubeconfig(tmp_path, monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(flip, "POLL_S", 0.01)
    yield api
    server.shutdown()
    server.server_close()
    thread.join()


def _use_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))


def test_flip_creates_the_object(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers = {f"GET {CLUSTERS}/chat": cluster_object(), f"POST {FLIPS}": flip_object()}
    assert main(["flip", "chat", "chat-w0", "draw", "--reason", "why not"]) == 0
    (posted,) = api.posted
    assert posted == {
        "apiVersion": "serving.headrace.dev/v1alpha1",
        "kind": "InferenceFlip",
        "metadata": {"generateName": "chat-w0-"},
        "spec": {"clusterName": "chat", "podName": "chat-w0", "targetPool": "draw", "reason": "why not"},
    }
    assert "chat-w0-x" in capsys.readouterr().out


WAITS: list[tuple[str, list[dict[str, Any]], int, str]] = [
    ("succeeds", [flip_object(), flip_object(started=CREATED), flip_object(**SUCCEEDED)], 0, "switched in 2.5 ms"),
    ("refused", [flip_object(**REFUSED)], 1, "Refused (the pool fill would fall under its minimum)"),
    ("rolled back", [flip_object(outcome="RolledBack")], 1, "chat-w0 to draw: RolledBack"),
    ("never seen by the operator", [flip_object()], 3, "Pending after 0.05 s"),
    ("never ends", [flip_object(started=CREATED)], 3, "Running after 0.05 s"),
]


@pytest.mark.parametrize(("name", "seen", "code", "said"), WAITS, ids=[case[0] for case in WAITS])
def test_flip_waits_for_the_outcome(
    api: Api, capsys: pytest.CaptureFixture[str], *, name: str, seen: list[dict[str, Any]], code: int, said: str
) -> None:
    api.answers = {
        f"GET {CLUSTERS}/chat": cluster_object(),
        f"POST {FLIPS}": flip_object(),
        f"GET {FLIPS}/chat-w0-x": list(seen),
    }
    assert main(["flip", "chat", "chat-w0", "draw", "--wait", "0.05" if code else "5"]) == code
    out, err = capsys.readouterr()
    assert said in out + err


NO_RESOURCE = "the server could not find the requested resource"
FAILURES: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("no cluster", {}, ["flip", "other", "w", "draw"], "'other' in namespace 'llm': there is none"),
    (
        "no pool",
        {f"GET {CLUSTERS}/chat": cluster_object()},
        ["flip", "chat", "w", "x"],
        "no pool 'x': it has fill, draw",
    ),
    ("not installed", {f"GET {CLUSTERS}": (404, NO_RESOURCE)}, ["status"], "Install the Headrace chart"),
    ("forbidden", {f"GET {FLIPS}": (403, "user cannot list")}, ["flips"], "user cannot list"),
    ("not logged in", {f"GET {FLIPS}": (401, "Unauthorized")}, ["flips"], "kubeconfig's login"),
    (
        "refused by the schema",
        {f"GET {CLUSTERS}/chat": cluster_object(), f"POST {FLIPS}": (422, "spec.podName: too long")},
        ["flip", "chat", "w", "draw"],
        "spec.podName: too long",
    ),
    (
        "pods are forbidden",
        {f"GET {CLUSTERS}/chat": cluster_object(), f"GET {PODS}": (403, "user cannot list pods")},
        ["status", "chat"],
        "user cannot list pods",
    ),
    ("error of the server", {f"GET {FLIPS}": (500, "etcd")}, ["flips"], "etcd"),
]


@pytest.mark.parametrize(("name", "answers", "arguments", "said"), FAILURES, ids=[case[0] for case in FAILURES])
def test_failures_say_why(
    api: Api,
    capsys: pytest.CaptureFixture[str],
    *,
    name: str,
    answers: dict[str, Any],
    arguments: list[str],
    said: str,
) -> None:
    api.answers = answers
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("headrace: ")
    assert not out


def test_who_may_not_read_clusters_may_still_flip(api: Api) -> None:
    api.answers = {f"GET {CLUSTERS}/chat": (403, "no"), f"POST {FLIPS}": flip_object()}
    assert main(["flip", "chat", "chat-w0", "draw"]) == 0


def test_no_server_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use_kubeconfig(tmp_path, monkeypatch, "http://127.0.0.1:9")
    assert main(["flips"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_no_kubeconfig_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["flips"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_namespace_is_taken_from_the_command_line(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers = {f"GET {FLIPS.replace('llm', 'other')}": {"items": []}}
    assert main(["flips", "-n", "other"]) == 0
    assert capsys.readouterr().out == "no flips in namespace 'other'\n"


def test_flips_lists_one_cluster_s_ledger_oldest_first(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    older, foreign = flip_object(**SUCCEEDED), flip_object()
    older["metadata"] = {"name": "z-older", "creationTimestamp": "2025-01-01T00:00:00Z"}
    foreign["spec"]["clusterName"] = "other"
    api.answers = {f"GET {FLIPS}": {"items": [flip_object(), foreign, older]}}
    assert main(["flips", "chat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "z-older", "chat-w0-x"]
    assert main(["flips", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == 3


def test_status_shows_conditions_pools_and_workers(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers = {f"GET {CLUSTERS}/chat": cluster_object(), f"GET {PODS}": {"items": [pod_object()]}}
    assert main(["status", "chat"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for said in (
        "llm/chat",
        "Ready True AllPoolsReady all there",
        "fill 1 1 0 0 -1",
        "chat-w0 fill prefill 3 True node-1",
        "flip under way: chat-w0 from fill to draw, Labelled",
    ):
        assert said in words
    assert parse_qs(api.queries[-1])["labelSelector"] == ["serving.headrace.dev/cluster=chat,serving.headrace.dev/role"]


def test_status_of_nothing(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers = {f"GET {CLUSTERS}": {"items": []}}
    assert main(["status"]) == 0
    assert "no InferenceCluster" in capsys.readouterr().out


def test_stale_status_is_marked() -> None:
    stale = cluster_object()
    stale["metadata"]["generation"] = 3
    assert "has not seen" in render.cluster_text(stale, [], NOW)
    assert "has not seen" not in render.cluster_text(cluster_object(), [], NOW)


ROWS = [
    (flip_object(), ("", "draw", "Pending", "", "", "5m", "why not")),
    (flip_object(started=CREATED, fromPool="fill"), ("fill", "draw", "Running", "", "", "5m", "why not")),
    (flip_object(**SUCCEEDED), ("fill", "draw", "Succeeded", "1.23s", "2.5ms", "5m", "why not")),
    (
        flip_object(**{**SUCCEEDED, "drainSeconds": 0, "switchMilliseconds": 0}),
        ("fill", "draw", "Succeeded", "0.00s", "0.0ms", "5m", "why not"),
    ),
]


@pytest.mark.parametrize(("shown", "expected"), ROWS)
def test_flip_row(shown: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert render.flip_row(shown, NOW)[3:] == expected


def test_pod_row_tells_what_a_draining_worker_changes_between() -> None:
    draining = pod_object(role="draining", **{"from-role": "prefill", "target-role": "decode"})
    assert render.pod_row(draining, NOW)[2] == "draining (prefill to decode)"
    assert render.pod_row({"metadata": {"name": "bare"}}, NOW) == ("bare", "", "", "", "", "", "")


AGES = [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d"), (-5, "0s")]


@pytest.mark.parametrize(("seconds", "text"), AGES)
def test_age(seconds: int, text: str) -> None:
    now = datetime.fromtimestamp(1_767_225_600 + seconds, UTC)
    assert render.age(CREATED, now) == text


def test_empty_cells_are_dashes() -> None:
    assert render.table(("A", "B"), [("", "x")]) == "A   B\n-   x"


def test_tiny_model_is_a_command() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tiny-model", "--help"])
    assert ended.value.code == 0


def test_command_line_starts_without_the_heavy_libraries() -> None:
    code = (
        "import sys, headrace_cli.main; "
        "sys.exit(any(name in sys.modules for name in ('kubernetes', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
