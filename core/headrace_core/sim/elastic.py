"""The workers of a run, and how an elasticity policy changes their number and duties while it goes on."""

from __future__ import annotations

from typing import final

from headrace_core.sim.outcome import RoleChange
from headrace_core.sim.request import SimRequest, Surroundings
from headrace_core.sim.scenario import Action, Duty, Elasticity, Lever, Pool, Scenario
from headrace_core.sim.worker import Worker


@final
class Fleet:
    """All workers, those that were removed included: an index stays a worker's for the whole run."""

    def __init__(
        self, scenario: Scenario, around: Surroundings, requests: list[SimRequest], prefix_block_tokens: int
    ) -> None:
        self.workers: list[Worker] = []
        self.role_changes: list[RoleChange] = []
        self._scenario = scenario
        self._around = around
        self._requests = requests
        self._prefix_block_tokens = prefix_block_tokens
        self._draining: list[Worker] = []
        for pool in scenario.pools:
            for _ in range(pool.workers):
                self.role_changes.append(RoleChange(0.0, len(self.workers), pool.duty))
                self._add(pool, 0.0)

    def _add(self, pool: Pool, now_ms: float) -> Worker:
        worker = Worker(
            len(self.workers),
            pool,
            self._around,
            scenario=self._scenario,
            requests=self._requests,
            prefix_block_tokens=self._prefix_block_tokens,
            now_ms=now_ms,
        )
        self.workers.append(worker)
        return worker

    def decide(self, elasticity: Elasticity, now_ms: float) -> list[int]:
        """Ask the policy and do what it says; returns the workers that begin to start.

        An action on a worker that does not accept requests, or is the last of its duty that does, is left undone.
        """
        present = [worker for worker in self.workers if now_ms < worker.totals.to_ms]
        reports = [worker.report(now_ms) for worker in present]
        starting: list[int] = []
        for action in elasticity.policy.decide(now_ms, reports):
            worker = self.workers[action.worker]
            if action.lever is Lever.START:
                begun = self._add(worker.pool, now_ms)
                begun.duty = worker.duty
                begun.accepting = False
                starting.append(begun.index)
            elif self._can_spare(worker):
                self._drain(worker, action, now_ms)
        return starting

    def _can_spare(self, worker: Worker) -> bool:
        same = [one for one in self.workers if one.accepting and one.duty is worker.duty]
        return worker.accepting and len(same) > 1

    def _drain(self, worker: Worker, action: Action, now_ms: float) -> None:
        worker.accepting = False
        worker.next_duty = None
        if action.lever is Lever.FLIP:
            worker.next_duty = Duty.DECODE if worker.duty is Duty.PREFILL else Duty.PREFILL
        self._draining.append(worker)
        self.role_changes.append(RoleChange(now_ms, worker.index, None))

    def is_draining(self) -> bool:
        """Whether a worker drains."""
        return len(self._draining) > 0

    def drained(self, now_ms: float) -> list[int]:
        """The workers whose drain ends now, and who switch; one that stops is removed at once."""
        switching: list[int] = []
        still: list[Worker] = []
        for worker in self._draining:
            if not worker.is_idle():
                still.append(worker)
            elif worker.next_duty is None:
                worker.totals.to_ms = now_ms
            else:
                switching.append(worker.index)
        self._draining = still
        return switching

    def switched(self, index: int, now_ms: float) -> None:
        """A worker takes requests of its new duty, with a cold prefix cache."""
        worker = self.workers[index]
        if worker.next_duty is not None:
            worker.duty = worker.next_duty
            worker.next_duty = None
        worker.prefill.cache.forget()
        self._accept(worker, now_ms)

    def started(self, index: int, now_ms: float) -> None:
        """A new worker has loaded its model."""
        self._accept(self.workers[index], now_ms)

    def _accept(self, worker: Worker, now_ms: float) -> None:
        worker.accepting = True
        self.role_changes.append(RoleChange(now_ms, worker.index, worker.duty))
