"""What gateway and dispatchers know when they decide: reports of a moment ago, and their own doings since."""

from __future__ import annotations

import math
from random import Random
from typing import final

from headrace_core.perf.costs import squares
from headrace_core.policy.deflection import DecodePath, PrefillPath, decide
from headrace_core.policy.dispatch import DecodeLoad, Dispatching, Request, pick
from headrace_core.policy.routing import PrefillWorker
from headrace_core.sim.request import NOWHERE, SimRequest
from headrace_core.sim.scenario import Duty, Scenario
from headrace_core.sim.worker import Worker, unreported

WAIT_MEMORY = 0.1
"""Weight of the newest wait for admission in the mean that deflection reads."""


@final
class Dispatcher:
    """The dispatchers of all prefill workers (T6).

    Each has its own table: what the last broadcast said of the decode workers, and what it placed since. Those of the
    others it sees in the next broadcast.
    """

    def __init__(self, policy: Dispatching, randomness: Random) -> None:
        self._policy = policy
        self._randomness = randomness
        self._turn = 0
        self._told: list[DecodeLoad] = []
        self._broadcast = 0
        self._tables: dict[int, list[DecodeLoad]] = {}
        """By prefill worker."""
        self._heard: dict[int, int] = {}
        """The broadcast that a table was last filled from."""

    def hear(self, workers: list[Worker]) -> None:
        """A broadcast of all loads."""
        while len(self._told) < len(workers):
            self._told.append(unreported(workers[len(self._told)]))
        for worker in workers:
            worker.report_decode(self._told[worker.index])
        self._broadcast += 1

    def choose(self, request: SimRequest) -> int:
        """The decode worker for a prefilled request; NOWHERE when none accepts."""
        table = self._table(request.prefill_worker)
        need = Request(
            prompt_tokens=request.whole_prompt_tokens, bound_tokens=request.bound_tokens, heavy=request.heavy
        )
        choice = pick(table, need, self._policy, self._randomness, self._turn)
        self._turn += 1
        if choice.index < 0:
            return NOWHERE
        chosen = table[choice.index]
        chosen.free_kv_blocks -= need.blocks(chosen.block_size)
        chosen.heavy += request.heavy
        chosen.residents += 1
        return choice.index

    def _table(self, prefill_worker: int) -> list[DecodeLoad]:
        table = self._tables.setdefault(prefill_worker, [])
        if self._heard.get(prefill_worker, 0) != self._broadcast:
            self._heard[prefill_worker] = self._broadcast
            for index, told in enumerate(self._told):
                if index == len(table):
                    table.append(_copy(told))
                known = table[index]
                known.accepting = told.accepting
                known.free_kv_blocks = told.free_kv_blocks
                known.heavy = told.heavy
                known.residents = told.residents
        return table


def _copy(load: DecodeLoad) -> DecodeLoad:
    return DecodeLoad(
        pod=load.pod,
        address=load.address,
        epoch=load.epoch,
        accepting=load.accepting,
        block_size=load.block_size,
        free_kv_blocks=load.free_kv_blocks,
        heavy=load.heavy,
        residents=load.residents,
    )


@final
class Deflector:
    """The gateway's choice between the prefill path and a decode worker (K1-K3)."""

    def __init__(self, scenario: Scenario) -> None:
        self._settings = scenario.deflection
        self._slos = scenario.slos
        self._network = scenario.network
        self._chunk_tokens = scenario.prefill.limit_tokens
        self._budget = scenario.decode.token_budget
        self._paths: list[DecodePath] = []
        self._free: list[int] = []
        """KV tokens free, by worker."""
        self._open: list[bool] = []
        self._squares: list[float] = []
        """Share in t2 of what is queued, by prefill worker, as reported and sent since."""
        self._links_ms: list[float] = []
        """How long each worker's sending link was busy ahead, when it reported."""
        self._admission_wait_ms = 0.0

    def hear(self, workers: list[Worker], now_ms: float) -> None:
        """All workers report."""
        if self._settings is None:
            return
        while len(self._paths) < len(workers):
            self._paths.append(_unreported_path(workers[len(self._paths)], self._budget))
            self._free.append(0)
            self._open.append(False)
            self._squares.append(0.0)
            self._links_ms.append(0.0)
        for worker in workers:
            index = worker.index
            worker.report_path(self._paths[index])
            self._free[index] = worker.free_blocks * worker.kv.block_tokens
            self._open[index] = worker.accepting and worker.duty is Duty.DECODE and not worker.decode.waiting
            self._squares[index] = worker.prefill.queued_squares
            self._links_ms[index] = max(0.0, worker.send_free_ms - now_ms)

    def note_wait(self, request: SimRequest) -> None:
        """Learn from a request how long admission takes."""
        waited_ms = request.admitted_ms - request.first_token_ms
        self._admission_wait_ms += WAIT_MEMORY * (waited_ms - self._admission_wait_ms)

    def choose(self, request: SimRequest, prefill: int, gateway: list[PrefillWorker], workers: list[Worker]) -> int:
        """The decode worker that computes the prompt in place, or NOWHERE for the prefill path."""
        if self._settings is None or prefill < 0:
            return NOWHERE
        prompt = request.whole_prompt_tokens
        need = prompt + request.bound_tokens
        for index, path in enumerate(self._paths):
            path.accepting = self._open[index] and need <= self._free[index]
        slo = self._slos[request.slo_class]
        decision = decide(
            self._prefill_path(prompt, prefill, gateway[prefill], workers[prefill]),
            self._paths,
            prompt,
            slo_ttft_ms=slo.ttft_ms,
            class_tbt_ms=slo.tpot_ms,
            settings=self._settings,
        )
        if decision.index < 0:
            self._squares[prefill] += squares(0, prompt)
            return NOWHERE
        chosen = self._paths[decision.index]
        chosen.deflecting = True
        self._free[decision.index] -= need
        return decision.index

    def _prefill_path(self, prompt: int, index: int, seen: PrefillWorker, worker: Worker) -> PrefillPath:
        network = self._network
        transfer_ms = 0.0
        if network is not None:
            transfer_ms = network.latency_ms + network.kv_bytes_per_token * prompt / network.bytes_per_ms
        return PrefillPath(
            queued_tokens=seen.queued_prefill_tokens + seen.running_tokens,
            queued_squares=self._squares[index],
            cached_tokens=0,
            chunk_tokens=self._chunk_tokens,
            transfer_ms=transfer_ms,
            link_queue_ms=self._links_ms[index],
            admission_wait_ms=self._admission_wait_ms,
            costs=worker.pool.instance.costs,
        )


def _unreported_path(worker: Worker, token_budget: int) -> DecodePath:
    return DecodePath(
        requests=0,
        kv_tokens=0,
        strictest_tbt_ms=math.inf,
        deflecting=False,
        cached_tokens=0,
        token_budget=token_budget,
        accepting=False,
        costs=worker.pool.instance.costs,
    )
