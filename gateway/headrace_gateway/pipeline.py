"""Takes one request through its steps: route, prefill, decode, and again after a failure that another can mend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_core.api.wire import WorkerRef
from headrace_gateway.errors import (
    SERVER_ERROR,
    KvUnavailable,
    NobodyAccepts,
    Retryable,
    StreamBroken,
    WorkerLost,
    error_body,
)
from headrace_gateway.metrics import Metrics
from headrace_gateway.openai import ClientRequest, error_event
from headrace_gateway.ports import Answer, Client, Workers
from headrace_gateway.registry import Registry, Standing, WorkerView
from headrace_gateway.release import Releases
from headrace_gateway.requests import Entry, RequestPhase, RequestTable
from headrace_gateway.steps.decode import DecodeWatch, Handover, decode
from headrace_gateway.steps.prefill import Prefilled, prefill
from headrace_gateway.steps.recover import Bounds, Progress, Recovery, error_of, recover
from headrace_gateway.steps.route import choose_prefill, explain

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Journey:
    """One request on its way."""

    request: ClientRequest
    client: Client
    entry: Entry
    progress: Progress = field(default_factory=Progress)
    failed: set[str] = field(default_factory=set)
    """Addresses of workers that have failed this request."""
    routing_since_s: float = 0.0
    first_event_at_s: float | None = None
    last_event_at_s: float = 0.0
    events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Serves requests. `clock` gives monotonic seconds, `chance` a number in [0, 1)."""

    workers: Workers
    registry: Registry
    releases: Releases
    table: RequestTable
    metrics: Metrics
    bounds: Bounds
    handoff_max_age_s: float
    clock: Callable[[], float]
    chance: Callable[[], float]

    async def serve(self, request: ClientRequest, client: Client, arrived_at_s: float) -> Answer | None:
        """The answer to a request; None when it was streamed to the client.

        Raises Final when the request cannot be served, and ClientGone.
        """
        with self.table.entered(request, arrived_at_s) as entry:
            journey = _Journey(request, client, entry)
            try:
                return await self._travel(journey)
            except StreamBroken as broken:
                await self._end_broken_stream(journey, broken)
                return None
            finally:
                self._observe_stream(journey)

    async def _travel(self, journey: _Journey) -> Answer | None:
        journey.routing_since_s = self.clock()
        while True:
            try:
                return await self._attempt(journey)
            except Retryable as failure:
                await self._recover(journey, failure)

    async def _attempt(self, journey: _Journey) -> Answer | None:
        # 1. Route.
        journey.entry.phase = RequestPhase.ROUTE
        worker = self._route(journey)
        # 2. Prefill.
        journey.entry.phase, journey.entry.prefill_worker = RequestPhase.PREFILL, worker.pod
        prefilled = await self._prefill(journey, worker)
        if isinstance(prefilled, Answer):
            return prefilled
        # 3. Decode.
        journey.entry.phase = RequestPhase.DECODE
        return await self._decode(journey, prefilled)

    def _route(self, journey: _Journey) -> WorkerView:
        now_s = self.clock()
        route = choose_prefill(self.registry.views(now_s), frozenset(journey.failed))
        if route.worker is None:
            raise NobodyAccepts(explain(route))
        self.metrics.stage.labels("route").observe(now_s - journey.routing_since_s)
        return route.worker

    async def _prefill(self, journey: _Journey, worker: WorkerView) -> Prefilled | Answer:
        sent_at_s = self.clock()
        tokens = journey.request.estimated_prompt_tokens
        placement = self.registry.place(worker.address, tokens, sent_at_s)
        try:
            prefilled = await prefill(journey.request, worker, self.workers)
        finally:
            self.registry.unplace(worker.address, placement)
        self.metrics.stage.labels("prefill").observe(self.clock() - sent_at_s)
        return prefilled

    async def _decode(self, journey: _Journey, prefilled: Prefilled) -> Answer | None:
        held_since_s = self.clock()
        fetched = False

        def on_fetched() -> None:
            nonlocal fetched
            fetched = True
            journey.entry.phase = RequestPhase.STREAM
            self.metrics.stage.labels("decode_first_byte").observe(self.clock() - held_since_s)

        def on_trying(target: WorkerRef) -> None:
            journey.entry.decode_worker = target.pod

        handover = Handover(
            request=journey.request,
            prefilled=prefilled,
            is_fresh=lambda: self.clock() - held_since_s < self.handoff_max_age_s,
            is_reachable=lambda address: self.registry.standing(address, self.clock()) is not Standing.OUT,
        )
        watch = DecodeWatch(
            trying=on_trying,
            failed=self.registry.close,
            fetched=on_fetched,
            passed=lambda chunk: self._note_passed(journey, chunk),
        )
        try:
            return await decode(handover, self.workers, journey.client, watch)
        finally:
            # Whatever ends the hand-off, a client that leaves included: the prefill worker need not hold the KV.
            if not fetched:
                self.releases.submit(prefilled, journey.request.request_id)

    async def _recover(self, journey: _Journey, failure: Retryable) -> None:
        """Wait before the next attempt. Raises Final when there is none."""
        progress = journey.progress
        progress.tries += 1
        progress.failed_attempts += failure.counts
        journey.entry.failed_attempts = progress.failed_attempts
        if failure.address:
            self.registry.close(failure.address)
            if isinstance(failure, WorkerLost | KvUnavailable):
                journey.failed.add(failure.address)
        plan = recover(progress, self.bounds, failure, self.chance())
        if plan.recovery is not Recovery.AGAIN:
            self.metrics.lost.labels(plan.recovery).inc()
            log.warning("request %s is lost: %s", journey.request.request_id, failure)
            raise error_of(plan.recovery, failure) from failure
        if not isinstance(failure, NobodyAccepts):
            self.metrics.retried.labels(failure.reason).inc()
            log.info("request %s goes on: %s", journey.request.request_id, failure)
            journey.routing_since_s = self.clock()
        if plan.wait_s:
            await asyncio.sleep(plan.wait_s)
            progress.waited_s += plan.wait_s

    async def _end_broken_stream(self, journey: _Journey, broken: StreamBroken) -> None:
        self.metrics.lost.labels("stream_broken").inc()
        log.warning("request %s is lost: %s", journey.request.request_id, broken or "error event")
        if str(broken):
            body = error_body(str(broken), kind=SERVER_ERROR, code="stream_broken")
            await journey.client.write(error_event(body))

    def _note_passed(self, journey: _Journey, chunk: bytes) -> None:
        journey.last_event_at_s = self.clock()
        if journey.first_event_at_s is None:
            journey.first_event_at_s = journey.last_event_at_s
            self.metrics.ttft.observe(journey.last_event_at_s - journey.entry.arrived_at_s)
        journey.events += chunk.count(b"data: {")

    def _observe_stream(self, journey: _Journey) -> None:
        if journey.first_event_at_s is not None and journey.events > 1:
            span_s = journey.last_event_at_s - journey.first_event_at_s
            self.metrics.tpot.observe(span_s / (journey.events - 1))
