"""A cluster in closed form, in place of the simulator: what the planner must find follows from a formula.

Prefill is a FCFS queue over all prefill workers, one prompt at a time. A decode worker's batch is what Little's law
gives for the workload's mean rate, and every token takes the step of that batch. Requests of one token end at prefill.
"""

from __future__ import annotations

import heapq
import math

from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.scenario import Duty, Instance, Scenario
from headrace_core.sim.workload import Workload

NAN = math.nan


def simulate(scenario: Scenario, workload: Workload) -> Outcome:
    count = len(workload)
    duties = {pool.duty: pool for pool in scenario.pools}
    colocated = duties.get(Duty.COLOCATED)
    prefill, decode = colocated or duties[Duty.PREFILL], colocated or duties[Duty.DECODE]
    step_ms = steady_step_ms(decode.instance, workload, decode.workers)
    free_ms = [0.0] * prefill.workers
    starts: list[float] = []
    firsts: list[float] = []
    for arrival_ms, prompt in zip(workload.arrival_ms, workload.prompt_tokens, strict=True):
        start_ms = max(arrival_ms, heapq.heappop(free_ms))
        end_ms = start_ms + prefill.instance.costs.prefill_ms(prompt, float(prompt * prompt))
        heapq.heappush(free_ms, end_ms)
        starts.append(start_ms)
        firsts.append(end_ms)
    lasts = [first + (tokens - 1) * step_ms for first, tokens in zip(firsts, workload.output_tokens, strict=True)]
    return Outcome(
        arrival_ms=workload.arrival_ms,
        prefill_start_ms=starts,
        first_token_ms=firsts,
        admitted_ms=firsts,
        transferred_ms=firsts,
        second_token_ms=[first + step_ms for first in firsts],
        last_token_ms=lasts,
        largest_gap_ms=[step_ms] * count,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        cached_tokens=[0] * count,
        slo_class=workload.slo_class or [0] * count,
        prefill_worker=[0] * count,
        decode_worker=[0] * count,
        preemptions=[0] * count,
        deflected=[False] * count,
        status=[int(Status.FINISHED)] * count,
        end_ms=max(lasts),
    )


def steady_step_ms(instance: Instance, workload: Workload, workers: int) -> float:
    """The step of the batch b that solves b = rate * tokens * step(b); infinite where there is none."""
    costs = instance.costs
    tokens = sum(output - 1 for output in workload.output_tokens) / len(workload)
    per_ms = workload.rate_per_s() / 1000.0 / workers * tokens
    # step(b) = base + slope * b, so b = per_ms * base / (1 - per_ms * slope)
    slope = costs.decode_request_ms
    if per_ms * slope >= 1:
        return math.inf
    batch = per_ms * costs.decode_base_ms / (1 - per_ms * slope)
    return costs.decode_base_ms + slope * batch
