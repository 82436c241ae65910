"""A simulated worker: its duty, its two sides over one KV cache, its links, and the reports that it sends of itself."""

from __future__ import annotations

from typing import Final, final

from headrace_core.policy.deflection import DecodePath
from headrace_core.policy.dispatch import DecodeLoad
from headrace_core.policy.routing import PrefillWorker
from headrace_core.sim.decode import DecodeReplica
from headrace_core.sim.outcome import WorkerTotals
from headrace_core.sim.prefill import PrefillReplica, PrefixCache
from headrace_core.sim.request import KvCache, SimRequest, Surroundings
from headrace_core.sim.scenario import Duty, Pool, Scenario, WorkerReport

INFINITE: Final = float("inf")


@final
class Worker:
    """One worker. Both sides are there from the start; the duty says which one takes requests."""

    __slots__ = (
        "accepting",
        "asked_busy_ms",
        "asked_ms",
        "decode",
        "duty",
        "free_blocks",
        "index",
        "kv",
        "kv_tokens",
        "next_duty",
        "pool",
        "prefill",
        "receive_free_ms",
        "send_free_ms",
        "totals",
    )

    def __init__(
        self,
        index: int,
        pool: Pool,
        around: Surroundings,
        *,
        scenario: Scenario,
        requests: list[SimRequest],
        prefix_block_tokens: int,
        now_ms: float,
    ) -> None:
        instance = pool.instance
        self.index = index
        self.pool = pool
        self.duty = pool.duty
        self.next_duty: Duty | None = None
        """While it drains for a flip."""
        self.accepting = True
        self.kv = KvCache(instance.kv_blocks, instance.block_tokens)
        self.kv.last_ms = now_ms
        cache = PrefixCache(scenario.prefix_cache_tokens, prefix_block_tokens)
        self.prefill = PrefillReplica(index, instance.costs, self.kv, cache, around=around, rules=scenario.prefill)
        self.decode = DecodeReplica(index, instance.costs, self.kv, around, requests=requests, scenario=scenario)
        self.free_blocks = instance.kv_blocks
        """When it last looked at itself, with the sum of its batches' contexts below."""
        self.kv_tokens = 0
        self.send_free_ms = 0.0
        """When its links have done with the transfers that are under way."""
        self.receive_free_ms = 0.0
        self.totals = WorkerTotals(
            pool=pool.name,
            gpus=instance.gpus,
            price_per_hour=instance.price_per_hour,
            kv_blocks=instance.kv_blocks,
            from_ms=now_ms,
            to_ms=INFINITE,
        )
        self.asked_ms = now_ms
        """When an elasticity policy last saw it, and how busy it had been until then."""
        self.asked_busy_ms = 0.0

    def is_idle(self) -> bool:
        """Whether it holds nothing of any request: what a drain waits for."""
        return self.prefill.is_idle() and self.decode.is_idle()

    def queued_tokens(self) -> int:
        """Prompt tokens that wait here or are being computed."""
        prefill = self.prefill
        return prefill.queue.queued_tokens + prefill.under_way_tokens + self.decode.to_compute_tokens

    def look(self, now_ms: float) -> None:
        """Bring up to now what moves between two events; the reports are made from it."""
        self.free_blocks, self.kv_tokens = self.decode.at(now_ms)

    def report_prefill(self, seen: PrefillWorker) -> None:
        """Write into a report what routing reads."""
        seen.queued_prefill_tokens = self.prefill.queue.queued_tokens
        seen.running_tokens = self.prefill.under_way_tokens
        seen.accepting = self.accepting and self.duty is Duty.PREFILL

    def report_colocated(self, seen: PrefillWorker) -> None:
        """The same of a worker that computes its prompts beside its decodes."""
        seen.queued_prefill_tokens = self.decode.to_compute_tokens
        seen.running_tokens = self.kv_tokens
        seen.accepting = self.accepting

    def report_decode(self, seen: DecodeLoad) -> None:
        """Write into a report what dispatch reads."""
        seen.accepting = self.accepting and self.duty is Duty.DECODE
        seen.free_kv_blocks = self.free_blocks
        seen.heavy = self.decode.heavy
        seen.residents = self.decode.residents()

    def report_path(self, seen: DecodePath) -> None:
        """Write into a report what deflection reads; the caller adds whether it has room."""
        decode = self.decode
        seen.requests = decode.running
        seen.kv_tokens = self.kv_tokens
        seen.strictest_tbt_ms = decode.strictest_tbt_ms()
        seen.deflecting = decode.to_compute_tokens > 0

    def report(self, now_ms: float) -> WorkerReport:
        """All that an elasticity policy reads, and a new start of the window of its busy share."""
        self.look(now_ms)
        busy_ms = self.prefill.busy_ms + self.decode.busy_ms
        window_ms = now_ms - self.asked_ms
        share = (busy_ms - self.asked_busy_ms) / window_ms if window_ms > 0 else 0.0
        self.asked_ms, self.asked_busy_ms = now_ms, busy_ms
        return WorkerReport(
            worker=self.index,
            duty=self.duty,
            accepting=self.accepting,
            queued_tokens=self.queued_tokens(),
            queued_requests=len(self.decode.waiting),
            running_requests=self.decode.running,
            free_kv_blocks=self.free_blocks,
            total_kv_blocks=self.kv.total_blocks,
            busy_share=min(1.0, max(0.0, share)),
        )

    def close(self, end_ms: float) -> WorkerTotals:
        """What it did until the end of the run, or until it was removed."""
        totals = self.totals
        totals.to_ms = min(totals.to_ms, end_ms)
        self.kv.pass_time(totals.to_ms)
        totals.busy_ms = self.prefill.busy_ms + self.decode.busy_ms
        totals.steps = self.prefill.passes + self.decode.steps
        totals.block_ms = self.kv.block_ms
        totals.peak_blocks = self.kv.total_blocks - self.kv.least_free
        return totals


def unreported(worker: Worker) -> DecodeLoad:
    """A report of a decode worker that is filled later."""
    return DecodeLoad(
        pod=f"{worker.pool.name}-{worker.index}",
        address="",
        epoch=0,
        accepting=False,
        block_size=worker.kv.block_tokens,
        free_kv_blocks=worker.kv.total_blocks,
        heavy=0,
        residents=0,
    )
