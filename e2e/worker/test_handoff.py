"""The KV hand-off between two real workers: the same text, computed once, and nothing held for nobody."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.traffic import Prompt, prompts
from e2e.worker.conftest import Pair
from e2e.worker.process import KV_LEASE_S, Worker, loopback
from headrace_core.api.names import Metric, Role
from headrace_core.api.wire import ErrorCode

TWENTY = prompts(seed=31, count=20, characters=range(1, 1500), max_tokens=24)
LONG = prompts(seed=32, count=2, characters=range(1400, 1500), max_tokens=24)
SOON_S = 0.5
"""Time for a step or two of an idle engine on a busy machine; far below the lease."""


def wait_for(what: str, reached: Any, timeout_s: float) -> float:
    """Waits until `reached()` holds, and returns after how many seconds it did."""
    started = time.monotonic()
    while not reached():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - started


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def held(worker: Worker) -> int:
    return worker.role().held_kv_blocks


@pytest.mark.parametrize("prompt", TWENTY, ids=lambda p: f"{p.kind}-{len(p.text)}")
def test_same_text_as_one_worker_alone(pair: Pair, prompt: Prompt) -> None:
    alone = pair.prefill.alone(prompt)
    computed_before = pair.decode.metric(Metric.WORKER_PREFILLED_TOKENS)
    received_before = pair.decode.metric(Metric.WORKER_KV_RECEIVES)
    answered = pair.decode.decode(prompt, pair.prefill.prefill(prompt))
    assert answered.text == alone, answered.body
    assert pair.decode.metric(Metric.WORKER_KV_RECEIVES) - received_before == 1
    computed = pair.decode.metric(Metric.WORKER_PREFILLED_TOKENS) - computed_before
    assert computed <= 1, "the decode worker computed the prompt itself"


def test_same_text_when_many_come_at_once(pair: Pair) -> None:
    alone = [pair.prefill.alone(prompt) for prompt in TWENTY]
    received_before = pair.decode.metric(Metric.WORKER_KV_RECEIVES)

    def hand_off(prompt: Prompt) -> str | None:
        return pair.decode.decode(prompt, pair.prefill.prefill(prompt)).text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(hand_off, TWENTY * 3)) == alone * 3
    assert pair.decode.metric(Metric.WORKER_KV_RECEIVES) - received_before == 3 * len(TWENTY)
    wait_for("all KV is fetched", lambda: held(pair.prefill) == 0, SOON_S)


def test_answers_differ_by_prompt(pair: Pair) -> None:
    # With a model that answers the same to all prompts, the test above would prove nothing.
    assert len({pair.prefill.alone(prompt) for prompt in TWENTY}) == len(TWENTY)


def test_bytes_received_are_bytes_sent(pair: Pair) -> None:
    sent, received = (
        pair.prefill.metric(Metric.WORKER_KV_SENT_BYTES),
        pair.decode.metric(Metric.WORKER_KV_RECEIVED_BYTES),
    )
    assert pair.decode.decode(LONG[0], pair.prefill.prefill(LONG[0])).status == 200
    wait_for("the KV is fetched", lambda: held(pair.prefill) == 0, SOON_S)
    received_now = pair.decode.metric(Metric.WORKER_KV_RECEIVED_BYTES) - received
    assert received_now > 0
    assert pair.prefill.metric(Metric.WORKER_KV_SENT_BYTES) - sent == received_now


def test_released_kv_is_free_at_once(pair: Pair) -> None:
    handle = pair.prefill.prefill(LONG[0])
    assert held(pair.prefill) > 0
    pair.prefill.release(handle)
    assert wait_for("the KV is free", lambda: held(pair.prefill) == 0, KV_LEASE_S) < SOON_S


def test_a_late_pull_never_gives_wrong_text(pair: Pair) -> None:
    prompt = LONG[1]
    alone = pair.prefill.alone(prompt)
    handle = pair.prefill.prefill(prompt)
    wait_for("the lease ends", lambda: held(pair.prefill) == 0, 3 * KV_LEASE_S)
    for other in prompts(seed=33, count=30, characters=range(1400, 1500), max_tokens=1):
        pair.prefill.alone(other)  # its KV goes where the prompt's was
    answered = pair.decode.decode(prompt, handle)
    assert answered.status == 502, (answered.text, alone)
    assert answered.body["error"]["code"] == ErrorCode.KV_TRANSFER_FAILED
    assert pair.decode.decode(prompt, pair.prefill.prefill(prompt)).text == alone


def test_a_dead_prefill_worker_leaves_the_decode_worker_healthy(pair: Pair, model: Any, logs: Any) -> None:
    doomed = Worker(loopback(3), Role.PREFILL, model, logs, {})
    try:
        doomed.wait_until_ready()
        first, second = LONG
        assert pair.decode.decode(first, doomed.prefill(first)).status == 200
        handle = doomed.prefill(second)
        processes = doomed.processes()
        assert len(processes) > 1
        doomed.kill()
        wait_for("the engine ends with the server", lambda: not any(map(runs, processes)), SOON_S)
        answered = pair.decode.decode(second, handle)
        assert (answered.status, answered.body["error"]["code"]) == (502, ErrorCode.KV_TRANSFER_FAILED)
    finally:
        doomed.stop()
    assert pair.decode.http.get("/livez").status_code == 200
    assert pair.decode.decode(second, pair.prefill.prefill(second)).text == pair.prefill.alone(second)


def test_a_worker_ends_with_its_engine(model: Path, logs: Path) -> None:
    doomed = Worker(loopback(4), Role.DECODE, model, logs, {})
    try:
        doomed.wait_until_ready()
        server, *engine = doomed.processes()
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
        wait_for("the server ends with the engine", lambda: not runs(server), 10 * SOON_S)
        assert doomed.process.wait(10) == 1
    finally:
        doomed.stop()
