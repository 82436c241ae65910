"""The small rules: when to go on after a failure, what an answer means, what a prompt weighs, what a setting may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.errors import ConnectFailed, NobodyAccepts, Retryable, SettingsError, WorkerLost, WorkerRefused
from headrace_gateway.openai import Endpoint, Verdict, clean_answer, judge, judge_first_event, parse
from headrace_gateway.settings import Settings, documentation, from_environment
from headrace_gateway.steps.recover import Bounds, Plan, Progress, Recovery, recover
from headrace_gateway.tokens import Tokens

BOUNDS = Bounds(worker_wait_s=2.0, max_attempts=3)
AGAIN = Recovery.AGAIN

PLANS: list[tuple[str, Progress, Retryable, Plan]] = [
    ("first refusal: at once", Progress(tries=1), WorkerRefused("x"), Plan(AGAIN)),
    ("second: at once", Progress(tries=2, failed_attempts=1), WorkerLost("x"), Plan(AGAIN)),
    ("third: a moment", Progress(tries=3), WorkerRefused("x"), Plan(AGAIN, 0.04)),
    ("nobody: a moment", Progress(tries=1), NobodyAccepts("x"), Plan(AGAIN, 0.01)),
    ("nobody for long: bounded", Progress(tries=40), NobodyAccepts("x"), Plan(AGAIN, 0.125)),
    ("out of patience", Progress(tries=9, waited_s=2.0), NobodyAccepts("x"), Plan(Recovery.OUT_OF_PATIENCE)),
    ("out of attempts", Progress(tries=3, failed_attempts=3), WorkerLost("x"), Plan(Recovery.OUT_OF_ATTEMPTS)),
]


@pytest.mark.parametrize(("name", "progress", "failure", "expected"), PLANS, ids=[case[0] for case in PLANS])
def test_recover(name: str, progress: Progress, failure: Retryable, expected: Plan) -> None:
    assert recover(progress, BOUNDS, failure, 0.0) == expected


def test_waits_are_spread() -> None:
    plans = [recover(Progress(tries=9), BOUNDS, NobodyAccepts("x"), chance) for chance in (0.0, 0.999)]
    assert plans[0].wait_s < plans[1].wait_s <= 0.25


def test_refusals_use_up_no_attempt_and_dead_workers_do() -> None:
    assert (WorkerRefused.counts, NobodyAccepts.counts) == (False, False)
    assert (WorkerLost.counts, ConnectFailed.counts) == (True, True)


def body_of(code: object) -> bytes:
    return json.dumps({"error": {"message": "m", "type": "t", "code": code}}).encode()


VERDICTS = [
    (200, b"", Verdict.PASS),
    (400, body_of(400), Verdict.PASS),
    (404, b"", Verdict.PASS),
    (422, b"", Verdict.PASS),
    (401, body_of("unauthorized"), Verdict.FAILED),
    (403, b"", Verdict.FAILED),
    (500, b"<html>", Verdict.FAILED),
    (502, body_of("kv_transfer_failed"), Verdict.KV_FAILED),
    (502, b"", Verdict.FAILED),
    (503, body_of("try_another"), Verdict.REFUSED),
    (503, b"[]", Verdict.FAILED),
]


@pytest.mark.parametrize(("status", "body", "expected"), VERDICTS)
def test_judge(status: int, body: bytes, expected: Verdict) -> None:
    assert judge(status, body) is expected


EVENTS = [
    (b'data: {"choices":[]}\n\n', Verdict.PASS, 200),
    (b'data: {"choices":[{"text":"{\\"error\\""}]}\n\n', Verdict.PASS, 200),
    (b"data: [DONE]\n\n", Verdict.PASS, 200),
    (b'data: {"error":{"message":"m","code":400}}\n\ndata: [DONE]\n\n', Verdict.PASS, 400),
    (b'data: {"error":{"message":"m","code":500}}\n\n', Verdict.FAILED, 500),
    (b'data: {"error":{"message":"m","code":"odd"}}\n\n', Verdict.FAILED, 500),
    (b'data: {"error":{"message":"m","code":"try_another"}}\n\n', Verdict.REFUSED, 500),
]


@pytest.mark.parametrize(("event", "verdict", "status"), EVENTS)
def test_judge_first_event(event: bytes, verdict: Verdict, status: int) -> None:
    assert judge_first_event(event)[:2] == (verdict, status)


def test_clean_answer_leaves_others_byte_for_byte() -> None:
    assert clean_answer(b'{"a": "\xc3\xa9"}') == b'{"a": "\xc3\xa9"}'
    assert clean_answer('{"a":"é","kv_transfer_params":null,"headrace":1}'.encode()) == '{"a":"é"}'.encode()
    with pytest.raises(ValueError, match="Extra data"):
        clean_answer(b'"headrace"{')


WEIGHTS: list[tuple[Endpoint, bytes, int]] = [
    (Endpoint.TEXT, b'{"prompt": "12345678"}', 2),
    (Endpoint.TEXT, b'{"prompt": "123456789"}', 3),
    (Endpoint.TEXT, b'{"prompt": [5, 6, 7]}', 3),
    (Endpoint.TEXT, b'{"prompt": ["12345678"]}', 2),
    (Endpoint.TEXT, b'{"prompt": [[5, 6, 7]]}', 3),
    (Endpoint.CHAT, b'{"messages": [{"content": "12345678"}, {"content": [{"text": "1234"}]}, {"content": null}]}', 3),
]


@pytest.mark.parametrize(("endpoint", "raw", "tokens"), WEIGHTS)
def test_estimated_prompt_tokens(endpoint: Endpoint, raw: bytes, tokens: int) -> None:
    assert parse(raw, endpoint=endpoint, served_name="m", request_id="r").estimated_prompt_tokens == tokens


GOOD = {"HEADRACE_SERVED_NAME": "m", "HEADRACE_CLUSTER": "c", "HEADRACE_NAMESPACE": "n"}


def test_settings_come_from_the_environment() -> None:
    settings = from_environment({**GOOD, "HEADRACE_PORT": "0", "HEADRACE_GATEWAY_WORKER_WAIT": "2.5", "OTHER": "x"})
    assert (settings.served_name, settings.port, settings.worker_wait_s) == ("m", 0, 2.5)
    assert settings.max_in_flight == Settings(served_name="m").max_in_flight


BAD: list[tuple[dict[str, str], str]] = [
    ({"HEADRACE_SERVED_NAME": ""}, "HEADRACE_SERVED_NAME"),
    ({"HEADRACE_CLUSTER": ""}, "HEADRACE_CLUSTER"),
    ({"HEADRACE_NAMESPACE": ""}, "HEADRACE_NAMESPACE"),
    ({"HEADRACE_PORT": "http"}, "HEADRACE_PORT"),
    ({"HEADRACE_PORT": "-1"}, "HEADRACE_PORT"),
    ({"HEADRACE_GATEWAY_WORKER_WAIT": "nan"}, "HEADRACE_GATEWAY_WORKER_WAIT"),
    ({"HEADRACE_GATEWAY_WORKER_WAIT": "inf"}, "HEADRACE_GATEWAY_WORKER_WAIT"),
    ({"HEADRACE_GATEWAY_MAX_IN_FLIGHT": "0"}, "HEADRACE_GATEWAY_MAX_IN_FLIGHT"),
    ({"HEADRACE_WORKERS": "127.0.0.1"}, "--workers"),
    ({"HEADRACE_TOKEN_FILE": "/nowhere/token"}, "HEADRACE_TOKEN_FILE"),
    ({"HEADRACE_GATEWAY_OUT_AFTER": "0.5"}, "HEADRACE_GATEWAY_SUSPECT_AFTER"),
]


@pytest.mark.parametrize(("changes", "named"), BAD)
def test_bad_setting_is_named(changes: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        from_environment({**GOOD, **changes})


def test_workers_by_address_need_no_kubernetes() -> None:
    settings = from_environment({"HEADRACE_SERVED_NAME": "m", "HEADRACE_WORKERS": "127.0.9.1:8000, 127.0.9.2:8000"})
    assert settings.static_workers == ("127.0.9.1:8000", "127.0.9.2:8000")


def test_every_setting_is_documented() -> None:
    lines = documentation().splitlines()
    assert len(lines) == len(Settings.__dataclass_fields__)
    assert all(": " in line and len(line.split(": ", 1)[1]) > 10 for line in lines)


TOKENS: list[tuple[str | None, bool]] = [
    ("Bearer one", True),
    ("bearer two", True),
    ("Bearer three", False),
    ("Bearer ", False),
    ("Basic one", False),
    ("one", False),
    ("Bearer é", False),
    (None, False),
]


@pytest.mark.parametrize(("header", "accepted"), TOKENS)
def test_tokens(tmp_path: Path, header: str | None, accepted: bool) -> None:
    file = tmp_path / "token"
    file.write_text("one\n\n two \n")
    tokens = Tokens(str(file))
    assert tokens.accepts(header) is accepted
    assert tokens.header() == {"Authorization": "Bearer one"}


def test_tokens_follow_their_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    tokens: Any = Tokens(str(file))
    assert tokens.accepts("Bearer one")
    file.write_text("another\n")
    assert not tokens.accepts("Bearer one")
    file.unlink()
    assert tokens.accepts("Bearer another"), "the swap of a mounted Secret must not lock everybody out"


def test_without_a_token_file_nothing_is_asked() -> None:
    assert Tokens("").accepts(None)
    assert not Tokens("").header()


MAX_TOKENS = [
    ("text", Endpoint.TEXT, {"max_tokens": 7}, 7),
    ("text that says nothing", Endpoint.TEXT, {}, 16),
    ("text without a bound", Endpoint.TEXT, {"max_tokens": None}, None),
    ("chat", Endpoint.CHAT, {"max_tokens": 7}, 7),
    ("chat, the newer name first", Endpoint.CHAT, {"max_tokens": 7, "max_completion_tokens": 9}, 9),
    ("chat that says nothing", Endpoint.CHAT, {}, None),
    ("what the worker will refuse", Endpoint.TEXT, {"max_tokens": -1}, None),
    ("no number", Endpoint.TEXT, {"max_tokens": "7"}, None),
    ("a truth value", Endpoint.TEXT, {"max_tokens": True}, None),
]


@pytest.mark.parametrize(("name", "endpoint", "fields", "expected"), MAX_TOKENS, ids=[case[0] for case in MAX_TOKENS])
def test_max_tokens_of_a_request(name: str, endpoint: Endpoint, fields: dict[str, Any], expected: int | None) -> None:
    prompt = {"prompt": "x"} if endpoint is Endpoint.TEXT else {"messages": [{"role": "user", "content": "x"}]}
    raw = json.dumps(prompt | fields).encode()
    assert parse(raw, endpoint=endpoint, served_name="m", request_id="r").max_tokens == expected
