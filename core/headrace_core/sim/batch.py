"""A decode batch in closed form: where it stands after any number of steps, without taking them one by one.

Between two changes of a batch each of its n requests gains one token a step, so a step takes B ms longer than the one
before, with B the cost of n more KV tokens. The end of step k is a sum of an arithmetic series; the blocks that the
batch opens repeat with the block size. A test holds all of it against stepping token by token.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Final, final

from headrace_core.perf.costs import StepCosts
from headrace_core.policy.length import next_bound
from headrace_core.sim.request import KvCache, SimRequest

MOST_TOKENS: Final = 1 << 60
"""Workloads carry no `max_tokens`."""

_UNKNOWN: Final = -1.0


@final
class Batch:
    """The requests that one lane of a decode worker advances together.

    `step` counts steps since the start of the run. A request's context in the coming step, the token computed there
    included, is `join_context + step - join_step`.
    """

    __slots__ = (
        "_block_tokens",
        "_by_phase",
        "_finishes",
        "_gaps",
        "_granularity",
        "_growth_ms",
        "_lane",
        "_predicted_ends",
        "_predicts",
        "_requests",
        "_stack",
        "_step_ms",
        "costs",
        "kv_tokens",
        "size",
        "step",
    )

    def __init__(
        self,
        costs: StepCosts,
        block_tokens: int,
        requests: list[SimRequest],
        *,
        lane: int,
        granularity: int,
        predicts: bool,
    ) -> None:
        self.costs = costs
        self.size = 0
        self.kv_tokens = 0
        """Sum of the contexts in the coming step."""
        self.step = 0
        self._step_ms = _UNKNOWN
        self._growth_ms = 0.0
        self._lane = lane
        self._block_tokens = block_tokens
        self._requests = requests
        self._granularity = granularity
        self._predicts = predicts
        self._by_phase = [0] * block_tokens
        """Requests by (join_context - join_step) modulo the block size: the phase in which they open blocks."""
        self._finishes: list[tuple[int, int]] = []
        """Step after which a request has its last token, and its number. Stale entries are skipped."""
        self._predicted_ends: list[tuple[int, int]] = []
        self._gaps: list[tuple[int, float]] = []
        """Steps by falling length, each with the count of steps at its end: the longest one since any step is the
        first entry after it."""
        self._stack: list[SimRequest] = []
        """Requests in the order in which they joined. Those that left are skipped."""

    # --- requests come and go -----------------------------------------------------------------------------------------

    def join(self, request: SimRequest) -> None:
        """Let a request take part from the coming step on."""
        self._rebucket(request)
        request.running = True
        request.join_step = self.step
        request.join_context = request.whole_prompt_tokens + request.generated_tokens
        request.finish_step = self.step + request.output_tokens - request.generated_tokens
        self.size += 1
        self._step_ms = _UNKNOWN
        self.kv_tokens += request.join_context
        self._by_phase[(request.join_context - self.step) % self._block_tokens] += 1
        heappush(self._finishes, (request.finish_step, request.number))
        if self._predicts:
            heappush(self._predicted_ends, (self.step + request.remaining_bound(), request.number))
        if len(self._stack) > 4 * self.size + 64:
            self._stack = [one for one in self._stack if self._holds(one)]
        self._stack.append(request)

    def leave(self, request: SimRequest) -> None:
        """Take a request out, and keep what it has."""
        context = self.context(request)
        self.size -= 1
        self._step_ms = _UNKNOWN
        self.kv_tokens -= context
        self._by_phase[(context - self.step) % self._block_tokens] -= 1
        request.running = False
        request.generated_tokens += self.step - request.join_step
        self._rebucket(request)
        # how long its first step made it wait was noted when that step was planned
        request.note_gap(self.longest_step_since(request.join_step + 1))

    def newest(self) -> SimRequest:
        """The request that joined last: the one to preempt, as vLLM does. Raises IndexError when there is none."""
        while not self._holds(self._stack[-1]):
            self._stack.pop()
        return self._stack[-1]

    def newest_first(self) -> list[SimRequest]:
        """All requests: those of the latest step first, and in the order in which they joined within a step."""
        found = {one.number: one for one in self._stack if self._holds(one)}
        return sorted(found.values(), key=_latest_join)

    def finished(self) -> list[SimRequest]:
        """The requests that have their last token; they have left."""
        done: list[SimRequest] = []
        while self._finishes and self._finishes[0][0] <= self.step:
            finish_step, number = heappop(self._finishes)
            request = self._requests[number]
            if self._holds(request) and request.finish_step == finish_step:
                self.leave(request)
                done.append(request)
        return done

    def _holds(self, request: SimRequest) -> bool:
        """Whether a request is in this batch, and not out of any or, after a preemption, in another one's."""
        return request.running and request.lane == self._lane

    # --- what lies ahead ----------------------------------------------------------------------------------------------

    def context(self, request: SimRequest) -> int:
        """A resident's context in the coming step."""
        return request.join_context + self.step - request.join_step

    def step_ms(self) -> float:
        """The coming step."""
        if self._step_ms < 0.0:
            self._time()
        return self._step_ms

    def growth_ms(self) -> float:
        """By how much each step is longer than the one before."""
        if self._step_ms < 0.0:
            self._time()
        return self._growth_ms

    def _time(self) -> None:
        costs = self.costs
        self._step_ms = costs.decode_ms(self.size, self.kv_tokens)
        token_ms = costs.decode_kv_token_ms if self.size < costs.large_decode_from else costs.large_decode_kv_token_ms
        self._growth_ms = (token_ms + costs.scheduler_token_ms) * self.size

    def steps_to_next_finish(self) -> int:
        """Steps until the first request has its last token. Raises IndexError for an empty batch."""
        while True:
            finish_step, number = self._finishes[0]
            request = self._requests[number]
            if self._holds(request) and request.finish_step == finish_step:
                return finish_step - self.step
            heappop(self._finishes)

    def fewest_remaining(self) -> int:
        """The fewest predicted remaining tokens; a request past its bucket gets the next one. 0 for an empty batch."""
        ends = self._predicted_ends
        while ends:
            end, number = ends[0]
            request = self._requests[number]
            if not self._holds(request) or end != request.join_step + request.remaining_bound():
                heappop(ends)
            elif end <= self.step:
                heappop(ends)
                generated = request.generated_tokens + self.step - request.join_step
                request.bound_tokens = next_bound(generated, self._granularity, MOST_TOKENS)
                heappush(ends, (request.join_step + request.remaining_bound(), number))
            else:
                return end - self.step
        return 0

    def _rebucket(self, request: SimRequest) -> None:
        """A request that has passed the bound of its bucket is expected to end with the next one."""
        if request.generated_tokens >= request.bound_tokens:
            request.bound_tokens = next_bound(request.generated_tokens, self._granularity, MOST_TOKENS)

    def blocks_opened(self, first: int, steps: int) -> int:
        """Blocks that open after each of `steps` steps, from the one `first` steps ahead on, if all go on."""
        rounds, rest = divmod(steps, self._block_tokens)
        phases, size = self._by_phase, self._block_tokens
        opened = rounds * self.size
        for ahead in range(first, first + rest):
            opened += phases[-(self.step + ahead) % size]
        return opened

    def steps_within(self, free_blocks: int, most: int) -> int:
        """How many of at most `most` steps can follow one another before more blocks would open than are free.

        The first step's blocks are held already, so at least 1.
        """
        if self.size * ((most - 1) // self._block_tokens + 1) <= free_blocks:
            return most
        phases, size = self._by_phase, self._block_tokens
        rounds = free_blocks // self.size
        free = free_blocks - rounds * self.size
        steps = 1 + rounds * size
        while steps < most:
            free -= phases[-(self.step + steps - 1) % size]
            if free < 0:
                break
            steps += 1
        return min(steps, most)

    def end_of_step_ms(self, start_ms: float, steps: int) -> float:
        """When `steps` steps are done that begin at `start_ms`."""
        if self._step_ms < 0.0:
            self._time()
        return start_ms + steps * self._step_ms + self._growth_ms * (0.5 * steps * (steps - 1))

    def steps_until(self, start_ms: float, at_ms: float, most: int) -> int:
        """The first step, of those that begin at `start_ms`, that ends at `at_ms` or later; at most `most`."""
        if at_ms >= self.end_of_step_ms(start_ms, most):
            return most
        first_ms, growth_ms = self.step_ms(), self.growth_ms()
        elapsed_ms = at_ms - start_ms
        if growth_ms <= 0.0:
            guess = elapsed_ms / first_ms
        else:
            b = first_ms - 0.5 * growth_ms
            guess = (math.sqrt(b * b + 2.0 * growth_ms * elapsed_ms) - b) / growth_ms
        steps = max(1, math.ceil(guess))
        while steps > 1 and self.end_of_step_ms(start_ms, steps - 1) >= at_ms:
            steps -= 1
        while self.end_of_step_ms(start_ms, steps) < at_ms:
            steps += 1
        return min(steps, most)

    # --- time passes --------------------------------------------------------------------------------------------------

    def advance(self, steps: int, kv: KvCache, now_ms: float, longest_ms: float) -> None:
        """Be `steps` further, of which the last one took longest; between them, blocks were opened."""
        if steps > 1:
            kv.grow(self.blocks_opened(0, steps - 1), now_ms)
        self.step += steps
        self.kv_tokens += steps * self.size
        self._step_ms = _UNKNOWN
        gaps = self._gaps
        while gaps and gaps[-1][1] <= longest_ms:
            gaps.pop()
        gaps.append((self.step, longest_ms))

    def blocks_to_open_now(self) -> int:
        """Blocks that the coming step needs beyond those that are held."""
        return self._by_phase[(1 - self.step) % self._block_tokens]

    def longest_step_since(self, step: int) -> float:
        """The longest step after `step`, in ms; 0 where there was none."""
        gaps = self._gaps
        low, high = 0, len(gaps)
        while low < high:
            middle = (low + high) // 2
            if gaps[middle][0] > step:
                high = middle
            else:
                low = middle + 1
        return gaps[low][1] if low < len(gaps) else 0.0


def _latest_join(request: SimRequest) -> int:
    return -request.join_step
