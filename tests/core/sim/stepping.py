"""A cluster of one prefill and one decode worker, token by token and block by block: what the closed form must equal.

Slow and literal on purpose. The prefill worker takes whole prompts in the order of arrival, its KV cache is endless,
and the network sends one request's KV after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_core.perf.costs import squares
from headrace_core.policy.admission import DecodeMemory, Reason, decide
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.workload import Workload


@dataclass
class One:
    """A request."""

    number: int
    prompt: int
    output: int
    bound: int
    first_ms: float = 0.0
    made: int = 1
    fetch: bool = True
    to_compute: int = 0
    blocks: int = 0
    second_ms: float | None = None
    last_ms: float | None = None
    newest_ms: float = 0.0
    largest_gap_ms: float = 0.0
    preemptions: int = 0
    rejected: bool = False


@dataclass
class Stepper:
    """The decode worker."""

    scenario: Scenario
    waiting: list[One] = field(default_factory=list)
    fetching: list[tuple[float, One]] = field(default_factory=list)
    computing: list[One] = field(default_factory=list)
    ready: list[One] = field(default_factory=list)
    running: list[One] = field(default_factory=list)
    link_free_ms: float = 0.0
    least_free: int = 1 << 60

    def __post_init__(self) -> None:
        pool = next(pool for pool in self.scenario.pools if pool.duty == "Decode")
        self.costs = pool.instance.costs
        self.block = pool.instance.block_tokens
        self.total = self.free = pool.instance.kv_blocks

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def hold(self, one: One, tokens: int) -> None:
        self.free -= self.blocks(tokens) - one.blocks
        one.blocks = self.blocks(tokens)
        assert self.free >= 0
        self.least_free = min(self.least_free, self.free)

    def drop(self, one: One) -> None:
        self.free += one.blocks
        one.blocks = 0

    def remaining(self, one: One) -> int:
        if one in self.running:
            self.rebucket(one)
        return max(1, one.bound - one.made)

    def rebucket(self, one: One) -> None:
        granularity = self.scenario.prediction.granularity
        if one.made >= one.bound:
            one.bound = (one.made // granularity + 1) * granularity

    def admit(self, now: float) -> None:
        rules, network = self.scenario.decode, self.scenario.network
        while self.waiting:
            one = self.waiting[0]
            here = [other for _, other in self.fetching] + self.computing + self.ready
            memory = DecodeMemory(
                block_size=self.block,
                total_blocks=self.total,
                free_blocks=self.free,
                running=len(self.running) + len(here),
                fewest_remaining=min([self.remaining(other) for other in self.running + here], default=0),
                max_running=rules.max_running,
            )
            context = one.prompt + one.made - one.fetch
            verdict = decide(rules.admission, memory, context, max(1, one.bound - one.made))
            if verdict.reason is Reason.NEVER_FITS:
                self.waiting.pop(0)
                one.rejected = True
                continue
            if not verdict.admits:
                return
            self.waiting.pop(0)
            self.hold(one, context + 1)
            if not one.fetch:
                one.to_compute = context
                self.computing.append(one)
            elif network is None:
                self.ready.append(one)
            else:
                start = max(now, self.link_free_ms)
                self.link_free_ms = start + one.prompt * network.kv_bytes_per_token / network.bytes_per_ms
                self.fetching.append((self.link_free_ms + network.latency_ms, one))

    def token(self, one: One, now: float) -> None:
        one.made += 1
        one.largest_gap_ms = max(one.largest_gap_ms, now - one.newest_ms)
        one.newest_ms = now
        if one.second_ms is None:
            one.second_ms = now

    def finish(self, one: One, now: float) -> None:
        one.last_ms = now
        self.drop(one)

    def step(self) -> tuple[float, list[tuple[One, int]]]:
        """The next step's length, and the tokens of context that it computes anew."""
        room = self.scenario.decode.token_budget - len(self.running)
        pieces = []
        for one in self.computing:
            tokens = min(one.to_compute, room)
            if tokens < 1:
                break
            pieces.append((one, tokens))
            room -= tokens
        tokens = sum(count for _, count in pieces)
        t2 = sum(squares(one.prompt + one.made - one.to_compute, count) for one, count in pieces)
        kv = sum(one.prompt + one.made for one in self.running)
        return self.costs.mixed_ms(tokens, t2, len(self.running), kv), pieces

    def after_step(self, now: float, pieces: list[tuple[One, int]]) -> None:
        for one in list(self.running):
            self.token(one, now)
            if one.made == one.output:
                self.running.remove(one)
                self.finish(one, now)
        while sum(self.blocks(one.prompt + one.made) - one.blocks for one in self.running) > self.free:
            victim = self.running.pop()
            self.drop(victim)
            victim.preemptions += 1
            victim.fetch = False
            self.rebucket(victim)
            self.waiting.insert(0, victim)
        for one in self.running:
            self.hold(one, one.prompt + one.made)
        for one, count in pieces:
            one.to_compute -= count
            if one.to_compute == 0:
                self.computing.remove(one)
                self.token(one, now)
                if one.made == one.output:
                    self.finish(one, now)
                else:
                    self.ready.append(one)

    def run(self, arrivals: list[tuple[float, One]]) -> None:
        """All of them, until each has ended."""
        now, end, pieces = 0.0, None, []
        arrivals = sorted(arrivals, key=lambda pair: pair[0])
        while arrivals or self.waiting or self.fetching or self.running or self.ready or self.computing:
            coming = [at for at, _ in arrivals[:1]] + [at for at, _ in self.fetching]
            now = end if end is not None else min(coming)
            self.waiting += [one for at, one in arrivals if at <= now]
            arrivals = [(at, one) for at, one in arrivals if at > now]
            self.ready += [one for at, one in sorted(self.fetching, key=lambda pair: pair[0]) if at <= now]
            self.fetching = [(at, one) for at, one in self.fetching if at > now]
            if end is not None:
                self.after_step(now, pieces)
            self.admit(now)
            self.running += self.ready
            self.ready = []
            end = None
            if self.running or self.computing:
                length, pieces = self.step()
                end = now + length


def run(scenario: Scenario, workload: Workload, bounds: list[int]) -> list[One]:
    """Every request, after all have ended. `bounds` are the predicted lengths."""
    prefill = next(pool for pool in scenario.pools if pool.duty == "Prefill").instance.costs
    requests = [
        One(number, prompt, output, bound)
        for number, (prompt, output, bound) in enumerate(
            zip(workload.prompt_tokens, workload.output_tokens, bounds, strict=True)
        )
    ]
    queue, free_ms, arrivals = list(zip(workload.arrival_ms, requests, strict=True)), 0.0, []
    while queue:
        now = max(free_ms, queue[0][0])
        batch: list[One] = []
        while queue and queue[0][0] <= now:
            room = scenario.prefill.limit_tokens - sum(one.prompt for one in batch)
            if batch and queue[0][1].prompt > room:
                break
            batch.append(queue.pop(0)[1])
        free_ms = now + prefill.prefill_ms(sum(one.prompt for one in batch), sum(float(one.prompt**2) for one in batch))
        for one in batch:
            one.first_ms = one.newest_ms = free_ms
            if one.output == 1:
                one.last_ms = free_ms
            else:
                arrivals.append((free_ms, one))
    stepper = Stepper(scenario)
    stepper.run(arrivals)
    return requests
