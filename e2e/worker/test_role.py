"""Role changes of a real worker, and what it costs to stand idle."""

from __future__ import annotations

import time

from e2e.traffic import prompts
from e2e.worker.conftest import Pair
from headrace_core.api.names import Role
from headrace_core.api.wire import PATH_ROLE, Phase

FLIPS = 20
SOON_S = 0.5
IDLE_S = 10.0
IDLE_CORES = 0.1


def test_flips_there_and_back_keep_serving(pair: Pair) -> None:
    worker = pair.decode
    (prompt,) = prompts(seed=41, count=1, characters=range(300, 301), max_tokens=16)
    alone = pair.prefill.alone(prompt)
    before = worker.role()
    for number in range(1, FLIPS + 1):
        target = Role.PREFILL if number % 2 else Role.DECODE
        state = worker.change_role(target)
        assert (state.role, state.epoch) == (target, before.epoch + number)
        assert state.last_switch is not None
        assert state.last_switch.outcome == "Succeeded"
        assert state.last_switch.to_role == target
    assert worker.role().role == before.role
    assert worker.decode(prompt, pair.prefill.prefill(prompt)).text == alone


def test_a_flipped_worker_does_its_new_work(pair: Pair) -> None:
    (prompt,) = prompts(seed=42, count=1, characters=range(700, 701), max_tokens=16)
    alone = pair.prefill.alone(prompt)
    try:
        pair.prefill.change_role(Role.DECODE)
        pair.decode.change_role(Role.PREFILL)
        assert pair.prefill.decode(prompt, pair.decode.prefill(prompt)).text == alone
    finally:
        pair.prefill.change_role(Role.PREFILL)
        pair.decode.change_role(Role.DECODE)


def test_a_role_change_waits_for_kv_that_others_still_want(pair: Pair) -> None:
    (prompt,) = prompts(seed=43, count=1, characters=range(900, 901), max_tokens=16)
    alone = pair.prefill.alone(prompt)
    handle = pair.prefill.prefill(prompt)
    before = pair.prefill.role()
    request = {"role": Role.DECODE, "expected_epoch": before.epoch, "drain_timeout": 20}
    pair.prefill.http.post(PATH_ROLE, json=request).raise_for_status()
    time.sleep(0.5)
    waiting = pair.prefill.role()
    assert (waiting.phase, waiting.epoch, waiting.role) == (Phase.DRAINING, before.epoch, Role.PREFILL)
    assert waiting.held_kv_blocks > 0
    assert pair.decode.decode(prompt, handle).text == alone
    fetched_at = time.monotonic()
    while (now := pair.prefill.role()).phase != Phase.READY:
        assert time.monotonic() - fetched_at < SOON_S, now
        time.sleep(0.005)
    assert (now.role, now.epoch) == (Role.DECODE, before.epoch + 1)
    pair.prefill.change_role(Role.PREFILL)


def test_a_worker_listens_on_loopback_and_its_own_address_only(pair: Pair) -> None:
    for worker in (pair.prefill, pair.decode):
        addresses = worker.listens_on()
        assert worker.address in addresses
        assert addresses <= {worker.address, "127.0.0.1", "::1"}


def test_an_idle_worker_costs_little(pair: Pair) -> None:
    workers = (pair.prefill, pair.decode)
    used = [worker.cpu_seconds() for worker in workers]
    time.sleep(IDLE_S)
    for worker, before in zip(workers, used, strict=True):
        assert (worker.cpu_seconds() - before) / IDLE_S < IDLE_CORES
