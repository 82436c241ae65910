"""A simulated decode worker: admission at step boundaries, batches in closed form, prompts computed beside them.

Also the colocated worker of the baselines, which is a decode worker that computes all its prompts itself.
"""

from __future__ import annotations

from collections import deque
from typing import final

from headrace_core.perf.costs import StepCosts
from headrace_core.policy import admission
from headrace_core.policy.admission import Admission, DecodeMemory
from headrace_core.sim.batch import Batch
from headrace_core.sim.lane import Lane, Prompts
from headrace_core.sim.outcome import Status
from headrace_core.sim.request import KvCache, SimRequest, Surroundings
from headrace_core.sim.scenario import Scenario
from headrace_core.sim.turns import Turns


@final
class DecodeReplica:
    """The decode side of one worker."""

    __slots__ = (
        "_around",
        "_committed",
        "_limits_ms",
        "_memory",
        "_policy",
        "_prompts",
        "_residents_by_class",
        "busy_ms",
        "costs",
        "heavy",
        "kv",
        "lanes",
        "running",
        "steps",
        "to_compute_tokens",
        "waiting",
        "worker",
    )

    def __init__(
        self,
        worker: int,
        costs: StepCosts,
        kv: KvCache,
        around: Surroundings,
        *,
        requests: list[SimRequest],
        scenario: Scenario,
    ) -> None:
        rules = scenario.decode
        self.worker = worker
        self.costs = costs
        self.kv = kv
        self.waiting: deque[SimRequest] = deque()
        """For admission."""
        self.heavy = 0
        """Requests here, waiting ones included, that are predicted to be heavy."""
        self.running = 0
        """Requests in a batch."""
        self.busy_ms = 0.0
        self.steps = 0
        self.to_compute_tokens = 0
        self._around = around
        self._policy = rules.admission
        self._prompts = Prompts(costs, scenario)
        self._limits_ms = self._prompts.limits_ms
        self._residents_by_class = [0] * len(scenario.slos)
        self._committed: list[SimRequest] = []
        """Admitted requests that are not in a batch yet."""
        self._memory = DecodeMemory(
            block_size=kv.block_tokens,
            total_blocks=kv.total_blocks,
            free_blocks=0,
            running=0,
            fewest_remaining=0,
            max_running=rules.max_running,
        )
        predicts = rules.admission is Admission.RESERVE_DYNAMIC
        granularity = scenario.prediction.granularity
        self.lanes = [
            Lane(
                index,
                Batch(costs, kv.block_tokens, requests, lane=index, granularity=granularity, predicts=predicts),
                Turns(rules.max_batch_tokens),
            )
            for index in range(costs.stages)
        ]

    # --- as others see it ---------------------------------------------------------------------------------------------

    def residents(self) -> int:
        """All requests here, waiting ones included."""
        return self.running + len(self._committed) + len(self.waiting)

    def is_idle(self) -> bool:
        """Whether nothing is here: what a drain waits for."""
        return self.residents() == 0

    def strictest_tbt_ms(self) -> float:
        """The lowest time-between-tokens SLO, times beta, of those in a batch; infinite when there is none."""
        strictest = float("inf")
        for index, count in enumerate(self._residents_by_class):
            if count > 0:
                strictest = min(strictest, self._limits_ms[index])
        return strictest

    def at(self, now_ms: float) -> tuple[int, int]:
        """Free blocks, and the sum of the contexts in the batches, with the steps that are done by now."""
        free, tokens = self.kv.free_blocks, 0
        for lane in self.lanes:
            batch = lane.batch
            done = 0
            if lane.steps > 1 and not lane.pieces:
                done = batch.steps_until(lane.start_ms, now_ms, lane.steps)
                if batch.end_of_step_ms(lane.start_ms, done) > now_ms:
                    done -= 1
            tokens += batch.kv_tokens + done * batch.size
            if done > 0:
                free -= batch.blocks_opened(0, done)
        return free, tokens

    def deflecting(self) -> bool:
        """Whether the context of an admitted or waiting request is to be computed here."""
        return self.to_compute_tokens > 0

    # --- requests arrive ----------------------------------------------------------------------------------------------

    def add(self, request: SimRequest, now_ms: float) -> None:
        """Let a request wait for admission."""
        request.decode_worker = self.worker
        self.heavy += request.heavy
        if not request.needs_fetch:
            self.to_compute_tokens += request.context_tokens()
        self.waiting.append(request)
        if len(self.waiting) == 1:  # one that waits already is looked at when something changes for it
            self.poke(self._emptiest(), now_ms)

    def fetched(self, request: SimRequest, now_ms: float) -> None:
        """The KV of an admitted request is here."""
        lane = self.lanes[request.lane]
        lane.ready.append(request)
        self.poke(lane, now_ms)

    def poke(self, lane: Lane, now_ms: float) -> None:
        """Look at what is new at the next step boundary."""
        if lane.idle:
            lane.idle = False
            self._wake_at(lane, now_ms)
        elif not lane.pieces and lane.steps > 1:
            steps = lane.batch.steps_until(lane.start_ms, now_ms, lane.steps)
            if steps < lane.steps:
                lane.steps = steps
                self._wake_at(lane, lane.batch.end_of_step_ms(lane.start_ms, steps))

    def _emptiest(self) -> Lane:
        best = self.lanes[0]
        for lane in self.lanes:
            if lane.requests() < best.requests():
                best = lane
        return best

    def _wake_at(self, lane: Lane, at_ms: float) -> None:
        lane.stamp += 1
        self._around.wake_lane(self.worker, lane.index, at_ms, lane.stamp)

    # --- a step boundary ----------------------------------------------------------------------------------------------

    def wake(self, index: int, now_ms: float, stamp: int) -> None:
        """A boundary of a lane: end what was planned, admit, let join, plan on."""
        lane = self.lanes[index]
        if stamp != lane.stamp:
            return
        if lane.steps > 0:
            self._end_steps(lane, now_ms)
        if lane.pieces:
            self._end_pass(lane, now_ms)
        self._admit(lane, now_ms)
        self._join(lane, now_ms)
        self._plan(lane, now_ms)

    def _end_steps(self, lane: Lane, now_ms: float) -> None:
        batch, steps = lane.batch, lane.steps
        lane.steps = 0
        self.steps += steps
        self.busy_ms += (now_ms - lane.start_ms) / len(self.lanes)
        self.kv.promised_blocks -= lane.promised_blocks
        lane.promised_blocks = 0
        last_ms = lane.pass_ms if lane.pieces else batch.step_ms() + batch.growth_ms() * (steps - 1)
        batch.advance(steps, self.kv, now_ms, last_ms + lane.stalled_ms)
        lane.stalled_ms = 0.0
        for request in batch.finished():
            self.running -= 1
            self._residents_by_class[request.slo_class] -= 1
            self._finish(request, request.held_tokens(), now_ms)
        opening = batch.blocks_to_open_now()
        while opening > self.kv.available_blocks():
            self._preempt(batch.newest(), batch, now_ms)
            opening = batch.blocks_to_open_now()
        self.kv.take(opening, now_ms)

    def _preempt(self, request: SimRequest, batch: Batch, now_ms: float) -> None:
        """Give a request's blocks away. It is the next to be admitted, and then computes its context anew."""
        batch.leave(request)
        self.running -= 1
        self._residents_by_class[request.slo_class] -= 1
        self.kv.give_back(self.kv.blocks(request.held_tokens()), now_ms)
        request.preemptions += 1
        request.last_token_ms = now_ms
        request.needs_fetch = False
        request.cached_tokens = 0
        self.to_compute_tokens += request.context_tokens()
        self.waiting.appendleft(request)

    def _end_pass(self, lane: Lane, now_ms: float) -> None:
        """Prompt tokens were computed; a request whose context is complete has one more token."""
        if lane.batch.size > 0 and lane.stalled_ms == 0.0 and self._prompts.go_first:
            lane.stalled_ms = now_ms - lane.start_ms
        pieces, lane.pieces = lane.pieces, []
        for request, tokens in pieces:
            request.prefilled_tokens += tokens
            self.to_compute_tokens -= tokens
            if request.prefilled_tokens < request.prompt_tokens:
                continue
            lane.to_compute.remove(request)
            request.generated_tokens += 1
            if request.generated_tokens == 1:
                request.first_token_ms = now_ms
            else:
                request.note_gap(now_ms - request.last_token_ms)
                if request.generated_tokens == 2:  # noqa: PLR2004 - the second token
                    request.second_token_ms = now_ms
            request.last_token_ms = now_ms
            if request.generated_tokens >= request.output_tokens:
                self._committed.remove(request)
                self._finish(request, request.context_tokens(), now_ms)
            else:
                lane.ready.append(request)

    def _finish(self, request: SimRequest, held_tokens: int, now_ms: float) -> None:
        """The request has its last token."""
        request.last_token_ms = now_ms
        request.status = int(Status.FINISHED)
        self.heavy -= request.heavy
        self.kv.give_back(self.kv.blocks(held_tokens), now_ms)
        self._around.ended(request, now_ms)

    def _reject(self, request: SimRequest, now_ms: float) -> None:
        request.status = int(Status.REJECTED)
        self.heavy -= request.heavy
        if not request.needs_fetch:
            self.to_compute_tokens -= request.context_tokens()
        self._around.ended(request, now_ms)

    def _admit(self, lane: Lane, now_ms: float) -> None:
        lane.again_steps = 0
        memory = self._memory
        while self.waiting:
            request = self.waiting[0]
            context = request.held_tokens() if request.needs_fetch else request.context_tokens()
            memory.free_blocks = self.kv.available_blocks()
            memory.running = self.running + len(self._committed)
            memory.fewest_remaining = self._fewest_remaining() if self._policy is Admission.RESERVE_DYNAMIC else 0
            verdict = admission.decide(self._policy, memory, context, request.remaining_bound())
            if verdict.reason is admission.Reason.NEVER_FITS:
                self.waiting.popleft()
                self._reject(request, now_ms)
                continue
            if not verdict.admits:
                lane.again_steps = verdict.ask_again_steps
                return
            self.waiting.popleft()
            self.kv.take(self.kv.blocks(context + 1), now_ms)
            if request.preemptions == 0:
                request.admitted_ms = now_ms
            self._committed.append(request)
            self._start_getting_kv(request, now_ms, lane)

    def _start_getting_kv(self, request: SimRequest, now_ms: float, here: Lane) -> None:
        lane = self._emptiest()
        request.lane = lane.index
        if request.needs_fetch:
            self._around.fetch(request, now_ms)
            return
        request.prompt_tokens = request.context_tokens() - request.cached_tokens
        request.prefilled_tokens = 0
        self.to_compute_tokens -= request.cached_tokens
        lane.to_compute.append(request)
        if lane is not here:
            self.poke(lane, now_ms)

    def _fewest_remaining(self) -> int:
        """The fewest predicted remaining tokens of an admitted request; 0 where there is none."""
        fewest = 0
        for lane in self.lanes:
            remaining = lane.batch.fewest_remaining()
            if remaining > 0 and (fewest == 0 or remaining < fewest):
                fewest = remaining
        for request in self._committed:
            if fewest == 0 or request.remaining_bound() < fewest:
                fewest = request.remaining_bound()
        return fewest

    def _join(self, lane: Lane, now_ms: float) -> None:
        newcomers: list[SimRequest] = []
        while lane.ready:
            request = lane.ready.popleft()
            lane.batch.join(request)
            self._committed.remove(request)
            self.running += 1
            self._residents_by_class[request.slo_class] += 1
            newcomers.append(request)
        if lane.turns.limit_tokens > 0:
            lane.joined.extend(lane.turns.choose(lane.batch, newcomers, now_ms))
        else:
            lane.joined.extend(newcomers)

    # --- what comes next ----------------------------------------------------------------------------------------------

    def _plan(self, lane: Lane, now_ms: float) -> None:
        batch = lane.batch
        lane.start_ms = now_ms
        if lane.to_compute and self._plan_pass(lane, now_ms):
            return
        if batch.size == 0:
            lane.idle = True
            return
        steps = batch.steps_within(self.kv.available_blocks() // len(self.lanes), batch.steps_to_next_finish())
        if 0 < lane.again_steps < steps:
            steps = lane.again_steps
        if lane.stalled_ms > 0.0:
            steps = 1  # the step with the stall is the longest of no other request but those that waited
        elif lane.turns.limit_tokens > 0:
            steps = min(steps, lane.turns.steps_together(batch))
        lane.steps = steps
        if len(self.lanes) > 1:  # nobody else takes blocks before the boundary of an only batch
            lane.promised_blocks = batch.blocks_opened(0, steps - 1)
            self.kv.promised_blocks += lane.promised_blocks
        self._note_first_step(lane, now_ms + batch.step_ms())
        self._wake_at(lane, batch.end_of_step_ms(now_ms, steps))

    def _note_first_step(self, lane: Lane, end_ms: float) -> None:
        """Those who joined get their next token when the first step ends."""
        for request in lane.joined:
            request.note_gap(end_ms - request.last_token_ms)
            if request.generated_tokens == 1:
                request.second_token_ms = end_ms
        lane.joined.clear()

    def _plan_pass(self, lane: Lane, now_ms: float) -> bool:
        """Plan a pass with prompt tokens, and with the batch unless prompts go first; False where none may ride."""
        pieces = self._prompts.choose(lane, self.strictest_tbt_ms())
        if not pieces:
            return False
        for request, _ in pieces:
            if request.prefilled_tokens == 0 and request.generated_tokens == 0:
                request.prefill_start_ms = now_ms
                request.prefill_worker = self.worker
        lane.pieces = pieces
        lane.pass_ms = self._prompts.pass_ms(lane)
        lane.steps = 0 if self._prompts.go_first or lane.batch.size == 0 else 1
        if lane.steps > 0:
            self._note_first_step(lane, now_ms + lane.pass_ms)
        else:
            self.steps += 1
            self.busy_ms += lane.pass_ms / len(self.lanes)
        self._wake_at(lane, now_ms + lane.pass_ms)
        return True
