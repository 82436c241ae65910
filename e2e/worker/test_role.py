"""Role changes of a real worker, and what it costs to stand idle."""

from __future__ import annotations

import time

from e2e.traffic import prompts
from e2e.worker.conftest import Pair
from headrace_core.api.names import Role

FLIPS = 20
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


def test_an_idle_worker_costs_little(pair: Pair) -> None:
    for worker in (pair.prefill, pair.decode):
        used = worker.cpu_seconds()
        time.sleep(IDLE_S)
        assert (worker.cpu_seconds() - used) / IDLE_S < IDLE_CORES
