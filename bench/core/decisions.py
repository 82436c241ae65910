"""Times one deflection decision and one dispatch, compiled and interpreted, in CPU time of the thread.

Deflection stands beside the literal search over the same states, and again with the decode workers in the order that
spares it nothing: the slowest first, behind a prefill queue that never ends. Run: `python -m bench.core.decisions`.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random

from bench.core.compiled import environment
from headrace_core.perf.costs import StepCosts
from headrace_core.policy import deflection, dispatch
from headrace_core.policy.deflection import DecodePath, DeflectionSettings, PrefillPath
from headrace_core.policy.dispatch import DecodeLoad, Dispatching, Request

WORKERS = (2, 8, 32, 128)
PROMPTS = (2048, 8192, 32_768)
STATES = 400
LIMITS_US = {(32, 8192): 100.0, (128, 32_768): 200.0}
"""p99 of one compiled decision."""
DISPATCH_US = 2.0
SETTINGS = DeflectionSettings()
COSTS = StepCosts(
    prefill_base_ms=8.0,
    prefill_token_ms=0.08,
    prefill_square_ms=2e-6,
    decode_base_ms=12.0,
    decode_kv_token_ms=5e-5,
    decode_request_ms=0.05,
    large_decode_base_ms=14.0,
    large_decode_kv_token_ms=4e-5,
    large_decode_request_ms=0.04,
    large_decode_from=96,
    scheduler_ms=2.0,
    scheduler_token_ms=1e-4,
)
"""A 13B model on one A100, about."""

State = tuple[PrefillPath, list[DecodePath]]


def state(source: Random, workers: int) -> State:
    """A pool in the middle of its work: 1 to 127 residents of 200 to 3,000 tokens, three service classes."""
    paths = []
    for _ in range(workers):
        requests = source.randrange(1, 128)
        paths.append(
            DecodePath(
                requests=requests,
                kv_tokens=requests * source.randrange(200, 3000),
                strictest_tbt_ms=source.choice((50.0, 100.0, 200.0)),
                deflecting=source.random() < 0.1,
                cached_tokens=0,
                token_budget=8192,
                accepting=True,
                costs=COSTS,
            )
        )
    queued = source.randrange(60_000)
    return prefill(queued), paths


def prefill(queued_tokens: int) -> PrefillPath:
    """A prefill worker with that queue."""
    return PrefillPath(
        queued_tokens=queued_tokens,
        queued_squares=queued_tokens * 2000.0,
        cached_tokens=0,
        chunk_tokens=2048,
        transfer_ms=50.0,
        link_queue_ms=0.0,
        admission_wait_ms=0.0,
        costs=COSTS,
    )


def slowest_first(one: State, prompt: int) -> State:
    """The same pool with nothing to prune."""
    times = {id(path): deflection.decode_ttft_ms(path, prompt, 1.0, 100.0) for path in one[1]}
    return prefill(10_000_000), sorted(one[1], key=lambda path: -times[id(path)])


def decide(one: State, prompt: int) -> int:
    """The decision."""
    return deflection.decide(*one, prompt, slo_ttft_ms=math.inf, class_tbt_ms=100.0, settings=SETTINGS).index


def literal(one: State, prompt: int) -> int:
    """The same by the literal search on every decode worker."""
    best, best_ms = -1, deflection.prefill_ttft_ms(one[0], prompt, SETTINGS.rule)
    for index, path in enumerate(one[1]):
        ttft_ms = deflection.summed_ttft_ms(path, prompt, 1.0, 100.0)
        if ttft_ms < best_ms:
            best, best_ms = index, ttft_ms
    return best


def timed(function: Callable[[State, int], int], states: list[State], prompt: int) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    taken = []
    for one in states:
        before = time.thread_time_ns()
        function(one, prompt)
        taken.append((time.thread_time_ns() - before) / 1000)
    taken.sort()
    return taken[len(taken) // 2], taken[len(taken) * 99 // 100]


def measure() -> bool:
    """Print the table of this core; whether the limits hold."""
    holds = True
    print(f"{'decision':>22} {'p50':>9} {'p99':>9} {'worst order p99':>16} {'literal p50':>12} {'p99':>9}  (µs)")
    for workers in WORKERS:
        for prompt in PROMPTS:
            source = Random(f"{workers} {prompt}")
            states = [state(source, workers) for _ in range(STATES)]
            assert [decide(one, prompt) for one in states] == [literal(one, prompt) for one in states]
            p50, p99 = timed(decide, states, prompt)
            _, worst = timed(decide, [slowest_first(one, prompt) for one in states], prompt)
            slow, slower = timed(literal, states, prompt)
            limit = LIMITS_US.get((workers, prompt), math.inf)
            holds = holds and p99 <= limit
            name = f"{workers}P{workers}D, {prompt} tokens"
            print(f"{name:>22} {p50:9.1f} {p99:9.1f} {worst:16.1f} {slow:12.1f} {slower:9.1f}", end="")
            print(f"  limit {limit:g}" if limit < math.inf else "")
    return dispatches() and holds


def dispatches() -> bool:
    """Print the mean time of a dispatch by each policy at 128 workers, most with room; whether the limit holds."""
    source = Random(5)
    workers = [
        DecodeLoad(
            pod=f"w{number:03}",
            address="",
            epoch=0,
            accepting=True,
            block_size=16,
            free_kv_blocks=source.randrange(2000),
            heavy=source.randrange(10),
            residents=source.randrange(10, 50),
        )
        for number in range(128)
    ]
    request = Request(prompt_tokens=1000, bound_tokens=200, heavy=True)
    turns = 20_000
    means = {}
    for policy in Dispatching:
        before = time.thread_time_ns()
        for turn in range(turns):
            dispatch.pick(workers, request, policy, source, turn)
        means[policy] = (time.thread_time_ns() - before) / 1000 / turns
    print("dispatch at 128 workers, mean µs: " + ", ".join(f"{name} {mean:.2f}" for name, mean in means.items()))
    return means[Dispatching.DEFAULT] <= DISPATCH_US


def main() -> int:
    """Measure both cores, each in a process of its own; 1 when a limit of the compiled one is passed."""
    if "--measure" in sys.argv:
        return 0 if measure() else 1
    codes = {}
    for kind in ("interpreted", "compiled"):
        print(f"-- {kind}", flush=True)
        command = [sys.executable, "-m", "bench.core.decisions", "--measure"]
        codes[kind] = subprocess.run(command, env=environment(compiled=kind == "compiled"), check=False).returncode
    return codes["compiled"]


if __name__ == "__main__":
    sys.exit(main())
