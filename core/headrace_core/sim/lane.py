"""One batch of a simulated decode worker, and the prompt tokens that are computed beside it or before it."""

from __future__ import annotations

from collections import deque
from typing import final

from headrace_core.perf.costs import StepCosts, squares
from headrace_core.policy import in_place
from headrace_core.sim.batch import Batch
from headrace_core.sim.request import SimRequest
from headrace_core.sim.scenario import Colocation, Duty, Scenario
from headrace_core.sim.turns import Turns


@final
class Lane:
    """One batch of a decode worker. There are as many as pipeline stages, each in another stage at any time."""

    __slots__ = (
        "again_steps",
        "batch",
        "idle",
        "index",
        "joined",
        "pass_ms",
        "pieces",
        "promised_blocks",
        "ready",
        "stalled_ms",
        "stamp",
        "start_ms",
        "steps",
        "to_compute",
        "turns",
    )

    def __init__(self, index: int, batch: Batch, turns: Turns) -> None:
        self.index = index
        self.batch = batch
        self.turns = turns
        self.idle = True
        self.stamp = 0
        """Of the wake-up that counts; earlier ones were overtaken."""
        self.start_ms = 0.0
        self.steps = 0
        """Decode steps that are planned from `start_ms` on."""
        self.promised_blocks = 0
        """KV blocks that its batch opens within these steps."""
        self.pass_ms = 0.0
        """Length of the pass, when it computes prompt tokens; its step is the only one then."""
        self.pieces: list[tuple[SimRequest, int]] = []
        self.to_compute: deque[SimRequest] = deque()
        """Admitted requests whose context is computed here."""
        self.ready: deque[SimRequest] = deque()
        """Requests whose KV is there, and who join at the next boundary."""
        self.joined: list[SimRequest] = []
        """Who joined and has not taken part in a step yet."""
        self.stalled_ms = 0.0
        """For how long a prompt has kept the batch waiting."""
        self.again_steps = 0
        """Steps after which a waiting request may ask for admission again; 0: when the batch changes."""

    def requests(self) -> int:
        """All that are admitted to this lane and have not ended, but those whose KV is on its way."""
        return self.batch.size + self.turns.parked() + len(self.ready) + len(self.to_compute)


@final
class Prompts:
    """Which prompt tokens a lane computes in its next pass: deflected, colocated or recomputed ones."""

    __slots__ = ("_budget", "_costs", "_ladder", "_pass_tokens", "go_first", "limits_ms")

    def __init__(self, costs: StepCosts, scenario: Scenario) -> None:
        deflection = scenario.deflection
        self._costs = costs
        self._budget = scenario.decode.token_budget
        self._pass_tokens = scenario.prefill.limit_tokens
        self._ladder = deflection.ladder if deflection is not None else (self._budget,)
        beta = deflection.beta if deflection is not None else 1.0
        self.limits_ms = [beta * slo.tpot_ms for slo in scenario.slos]
        """Longest step that a class allows beside a deflected chunk."""
        self.go_first = scenario.colocation is Colocation.PREFILL_FIRST and any(
            pool.duty is Duty.COLOCATED for pool in scenario.pools
        )
        """Whether waiting prompts run alone, before the batch."""

    def choose(self, lane: Lane, strictest_tbt_ms: float) -> list[tuple[SimRequest, int]]:
        """Requests and tokens of each; none where no token may ride on the next step."""
        return self._whole(lane) if self.go_first else self._chunks(lane, strictest_tbt_ms)

    def pass_ms(self, lane: Lane) -> float:
        """How long the pass takes that the lane has planned."""
        tokens, t2 = 0, 0.0
        for request, count in lane.pieces:
            tokens += count
            t2 += squares(request.cached_tokens + request.prefilled_tokens, count)
        if self.go_first:
            return self._costs.prefill_ms(tokens, t2)
        return self._costs.mixed_ms(tokens, t2, lane.batch.size, lane.batch.kv_tokens)

    def _whole(self, lane: Lane) -> list[tuple[SimRequest, int]]:
        """The first prompts, whole, up to the limit of a pass; a longer one alone."""
        pieces: list[tuple[SimRequest, int]] = []
        room = self._pass_tokens
        for request in lane.to_compute:
            if request.prompt_tokens > room and pieces:
                break
            pieces.append((request, request.prompt_tokens))
            room -= request.prompt_tokens
            if room <= 0:
                break
        return pieces

    def _chunks(self, lane: Lane, strictest_tbt_ms: float) -> list[tuple[SimRequest, int]]:
        """What rides on the next step: a deflected prompt by its SLO, others up to the token budget."""
        batch = lane.batch
        pieces: list[tuple[SimRequest, int]] = []
        room = self._budget - batch.size
        for request in lane.to_compute:
            left = request.prompt_tokens - request.prefilled_tokens
            if request.deflected and request.generated_tokens == 0:
                if pieces:
                    break
                limit_ms = strictest_tbt_ms if batch.size > 0 else self.limits_ms[request.slo_class]
                count = in_place.chunk_tokens(
                    self._costs,
                    self._ladder,
                    requests=batch.size,
                    kv_tokens=batch.kv_tokens,
                    done=request.cached_tokens + request.prefilled_tokens,
                    left=left,
                    limit_ms=limit_ms,
                    token_budget=self._budget,
                )
                return [(request, count)] if count > 0 else []
            count = min(left, room)
            if count < 1:
                break
            pieces.append((request, count))
            room -= count
        return pieces
