"""Runs a scenario on a workload: events between gateway, workers and links, and the policies that decide at each."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final, final

from headrace_core.policy.routing import PrefillWorker, least_loaded
from headrace_core.sim.clock import Clock
from headrace_core.sim.decisions import Deflector, Dispatcher
from headrace_core.sim.elastic import Fleet
from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.prediction import Predictor
from headrace_core.sim.request import NOWHERE, SimRequest, Surroundings
from headrace_core.sim.scenario import Duty, Scenario
from headrace_core.sim.worker import Worker
from headrace_core.sim.workload import Workload, checked

_PREFILL: Final = 1
_LANE: Final = 2
_TRANSFERRED: Final = 3
_REPORT: Final = 4
_DECIDE: Final = 5
_SWITCHED: Final = 6
_STARTED: Final = 7

Progress = Callable[[int], None]
"""Called now and then with the number of requests that have ended."""
PROGRESS_EVERY: Final = 4096


def simulate(scenario: Scenario, workload: Workload, progress: Progress | None = None) -> Outcome:
    """Run the scenario until every request has ended; the same arguments give the same outcome, to the last bit.

    Raises:
        headrace_core.sim.workload.WorkloadError: the workload is not sound.
        headrace_core.sim.scenario.ScenarioError: the workload names an SLO class that the scenario lacks.
    """
    return Simulation(scenario, checked(workload), progress).run()


@final
class Simulation(Surroundings):
    """One run."""

    def __init__(self, scenario: Scenario, workload: Workload, progress: Progress | None) -> None:
        self._scenario = scenario
        self._workload = workload
        self._progress = progress
        self._clock = Clock()
        self._requests: list[SimRequest] = []
        self._open = 0
        """Requests that have arrived and not ended."""
        self._ended = 0
        self._misses = 0
        self._events = 0
        self._undispatched: list[SimRequest] = []
        """Prefilled requests for which no decode worker accepts."""
        self._network = scenario.network
        self._transfer_bytes = 0.0
        self._outcome = _empty_outcome(workload)
        self._fleet = Fleet(scenario, self, self._requests, workload.prefix_block_tokens)
        self._workers: list[Worker] = self._fleet.workers
        self._colocated = any(worker.duty is Duty.COLOCATED for worker in self._workers)
        self._gateway: list[PrefillWorker] = []
        """What the gateway knows of the workers: their last reports, and what it has sent since."""
        self._predictor = Predictor(scenario.prediction, scenario.decode.bound, _stream(scenario, "lengths"))
        self._dispatcher = Dispatcher(scenario.dispatching, _stream(scenario, "dispatch"))
        self._deflector = Deflector(scenario)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every request has ended, or the verdict is certain."""
        arrivals = self._workload.arrival_ms
        count, next_arrival = len(arrivals), 0
        clock = self._clock
        self._tell_everyone(0.0)
        self._put_first_events()
        while next_arrival < count or self._open > 0:
            next_ms = clock.next_ms()
            if next_arrival < count and arrivals[next_arrival] <= next_ms:
                clock.now_ms = arrivals[next_arrival]
                self._arrive(next_arrival)
                next_arrival += 1
            elif math.isinf(next_ms) or not self._step(more_arrive=next_arrival < count):
                break
            self._events += 1
            if self._fleet.is_draining():
                self._switch_drained()
            if self._scenario.stop_after_misses is not None and self._misses > self._scenario.stop_after_misses:
                self._outcome.stopped_early = True
                break
        return self._collect()

    def _put_first_events(self) -> None:
        if math.isfinite(self._scenario.report_interval_ms):
            self._clock.put(self._scenario.report_interval_ms, _REPORT)
        if self._scenario.elasticity is not None:
            self._clock.put(self._scenario.elasticity.interval_ms, _DECIDE)

    def _step(self, *, more_arrive: bool) -> bool:
        """Let the next event happen; False when there is none that could still change anything."""
        now_ms, _, kind, first, second, third = self._clock.pop()
        if kind == _LANE:
            self._workers[first].decode.wake(second, now_ms, third)
        elif kind == _PREFILL:
            self._workers[first].prefill.wake(now_ms, second)
        elif kind == _TRANSFERRED:
            self._transferred(self._requests[first], now_ms)
        elif kind == _REPORT:
            self._tell_everyone(now_ms)
            if not more_arrive and math.isinf(self._clock.next_ms()):
                return False
            self._clock.put(now_ms + self._scenario.report_interval_ms, _REPORT)
        else:
            self._change_fleet(kind, first, now_ms)
        return True

    def _arrive(self, number: int) -> None:
        workload, now_ms = self._workload, self._clock.now_ms
        output_tokens = workload.output_tokens[number]
        slo_class = workload.class_of(number)
        request = SimRequest(number, now_ms, workload.prompt_tokens[number], output_tokens, slo_class)
        self._predictor.predict(request)
        if not self._scenario.prefill_gives_first_token:
            request.output_tokens += 1
            request.bound_tokens += 1
        self._requests.append(request)
        self._open += 1
        chosen = least_loaded(self._gateway)
        if self._colocated:
            self._gateway[chosen].queued_prefill_tokens += request.whole_prompt_tokens
            self._workers[chosen].decode.add(request, now_ms)
            return
        deflected = self._deflector.choose(request, chosen, self._gateway, self._workers)
        if deflected != NOWHERE:
            request.deflected = True
            self._workers[deflected].decode.add(request, now_ms)
            return
        self._gateway[chosen].queued_prefill_tokens += request.whole_prompt_tokens
        hashes = workload.prefix[number] if workload.prefix else ()
        self._workers[chosen].prefill.add(request, hashes, now_ms)

    # --- what workers ask for -----------------------------------------------------------------------------------------

    def wake_prefill(self, worker: int, at_ms: float, stamp: int) -> None:
        """Put the call among the events."""
        self._clock.put(at_ms, _PREFILL, worker, stamp)

    def wake_lane(self, worker: int, lane: int, at_ms: float, stamp: int) -> None:
        """Put the call among the events."""
        self._clock.put(at_ms, _LANE, worker, lane, stamp)

    def prefilled(self, request: SimRequest, now_ms: float) -> None:
        """Dispatch the request, unless its first token is its only one."""
        worker = self._workers[request.prefill_worker]
        request.first_token_ms = now_ms
        request.last_token_ms = now_ms
        request.generated_tokens = 1
        request.needs_fetch = True
        if self._workload.prefix:
            worker.prefill.cache.remember(self._workload.prefix[request.number])
        if request.output_tokens == 1:
            request.status = int(Status.FINISHED)
            worker.prefill.release(request, now_ms)
            self.ended(request, now_ms)
        else:
            self._dispatch(request, now_ms)

    def _dispatch(self, request: SimRequest, now_ms: float) -> None:
        chosen = self._dispatcher.choose(request)
        if chosen == NOWHERE:
            self._undispatched.append(request)
        else:
            self._workers[chosen].decode.add(request, now_ms)

    def fetch(self, request: SimRequest, now_ms: float) -> None:
        """Send the KV as soon as both links are free."""
        network = self._network
        source, target = self._workers[request.prefill_worker], self._workers[request.decode_worker]
        if network is None or source is target:
            self._transferred(request, now_ms)
            return
        size = network.kv_bytes_per_token * request.whole_prompt_tokens
        start_ms = max(now_ms, source.send_free_ms, target.receive_free_ms)
        end_ms = start_ms + size / network.bytes_per_ms
        source.send_free_ms = target.receive_free_ms = end_ms
        self._transfer_bytes += size
        self._clock.put(end_ms + network.latency_ms, _TRANSFERRED, request.number)

    def _transferred(self, request: SimRequest, now_ms: float) -> None:
        request.transferred_ms = now_ms
        self._deflector.note_wait(request)
        self._workers[request.prefill_worker].prefill.release(request, now_ms)
        self._workers[request.decode_worker].decode.fetched(request, now_ms)

    def ended(self, request: SimRequest, now_ms: float) -> None:
        """Count it, and free what a prefill worker still holds for a rejected one."""
        if request.status == Status.REJECTED and request.needs_fetch:
            self._workers[request.prefill_worker].prefill.release(request, now_ms)
        self._open -= 1
        self._ended += 1
        self._misses += self._missed(request)
        if self._progress is not None and self._ended % PROGRESS_EVERY == 0:
            self._progress(self._ended)

    def _missed(self, request: SimRequest) -> bool:
        if request.status != Status.FINISHED:
            return True
        slo = self._scenario.slos[request.slo_class]
        steps = request.output_tokens - 1
        tpot_ms = (request.last_token_ms - request.first_token_ms) / steps if steps > 0 else 0.0
        return request.first_token_ms - request.arrival_ms > slo.ttft_ms or tpot_ms > slo.tpot_ms

    # --- reports and the fleet ----------------------------------------------------------------------------------------

    def _tell_everyone(self, now_ms: float) -> None:
        """All workers report; gateway and dispatchers forget what they had added themselves."""
        queued_prefill = queued_decode = 0
        while len(self._gateway) < len(self._workers):
            self._gateway.append(PrefillWorker(0, 0, accepting=False))
        for worker in self._workers:
            worker.look(now_ms)
            if self._colocated:
                worker.report_colocated(self._gateway[worker.index])
            else:
                worker.report_prefill(self._gateway[worker.index])
            queue = worker.prefill.queue
            queued_prefill += len(queue.raw) + len(queue.scheduled)
            queued_decode += len(worker.decode.waiting)
        if not self._colocated:
            self._dispatcher.hear(self._workers)
            self._deflector.hear(self._workers, now_ms)
            waiting, self._undispatched = self._undispatched, []
            for request in waiting:
                self._dispatch(request, now_ms)
        self._outcome.queue_ms.append(now_ms)
        self._outcome.queued_prefill.append(queued_prefill)
        self._outcome.queued_decode.append(queued_decode + len(self._undispatched))

    def _change_fleet(self, kind: int, worker: int, now_ms: float) -> None:
        fleet, elasticity = self._fleet, self._scenario.elasticity
        if elasticity is None:
            return
        if kind == _DECIDE:
            for started in fleet.decide(elasticity, now_ms):
                self._clock.put(now_ms + elasticity.start_ms, _STARTED, started)
            self._clock.put(now_ms + elasticity.interval_ms, _DECIDE)
        elif kind == _SWITCHED:
            fleet.switched(worker, now_ms)
        else:
            fleet.started(worker, now_ms)

    def _switch_drained(self) -> None:
        elasticity, now_ms = self._scenario.elasticity, self._clock.now_ms
        if elasticity is not None:
            for worker in self._fleet.drained(now_ms):
                self._clock.put(now_ms + elasticity.switch_ms, _SWITCHED, worker)

    def _collect(self) -> Outcome:
        outcome = self._outcome
        outcome.end_ms = self._clock.now_ms
        outcome.events = self._events
        outcome.transfer_bytes = self._transfer_bytes
        for request in self._requests:
            number = request.number
            outcome.prefill_start_ms[number] = request.prefill_start_ms
            outcome.first_token_ms[number] = request.first_token_ms
            outcome.admitted_ms[number] = request.admitted_ms
            outcome.transferred_ms[number] = request.transferred_ms
            outcome.second_token_ms[number] = request.second_token_ms
            if request.status == Status.FINISHED:
                outcome.last_token_ms[number] = request.last_token_ms
            outcome.largest_gap_ms[number] = request.largest_gap_ms
            outcome.cached_tokens[number] = request.cached_tokens
            outcome.prefill_worker[number] = request.prefill_worker
            outcome.decode_worker[number] = request.decode_worker
            outcome.preemptions[number] = request.preemptions
            outcome.deflected[number] = request.deflected
            outcome.status[number] = request.status
        outcome.workers = [worker.close(outcome.end_ms) for worker in self._workers]
        outcome.role_changes = self._fleet.role_changes
        return outcome


def _stream(scenario: Scenario, purpose: str) -> Random:
    """Random numbers for one purpose: drawing more for one changes nothing for another."""
    return Random(f"{purpose} {scenario.seed}")  # noqa: S311 - a simulation keeps no secret


def _empty_outcome(workload: Workload) -> Outcome:
    count = len(workload)
    return Outcome(
        arrival_ms=list(workload.arrival_ms),
        prefill_start_ms=[math.nan] * count,
        first_token_ms=[math.nan] * count,
        admitted_ms=[math.nan] * count,
        transferred_ms=[math.nan] * count,
        second_token_ms=[math.nan] * count,
        last_token_ms=[math.nan] * count,
        largest_gap_ms=[0.0] * count,
        prompt_tokens=list(workload.prompt_tokens),
        output_tokens=list(workload.output_tokens),
        cached_tokens=[0] * count,
        slo_class=list(workload.slo_class) if workload.slo_class else [0] * count,
        prefill_worker=[NOWHERE] * count,
        decode_worker=[NOWHERE] * count,
        preemptions=[0] * count,
        deflected=[False] * count,
        status=[int(Status.UNFINISHED)] * count,
    )
