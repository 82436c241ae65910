"""Measures how fast the simulator runs, compiled and interpreted, in CPU seconds.

    python -m bench.core.simulator [--rounds 3] [--trace MOONCAKE.jsonl.gz] [--growth]

Requests a second on one prefill and one decode worker, and on four of each with all policies on; the whole of
Mooncake's conversation trace on four of each, if it is given; with `--growth`, how the cost grows with requests and
workers. The rounds of all cases are interleaved; a figure is the median, with the least and the most beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from bench.core.compiled import NoCompilerError, environment
from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.hf_config import known
from headrace_core.perf.memory import fit, kv_bytes_per_token
from headrace_core.perf.model import Placement
from headrace_core.perf.profiles import profile_for
from headrace_core.policy.admission import Admission
from headrace_core.policy.deflection import DeflectionSettings
from headrace_core.policy.prefill_order import Order
from headrace_core.sim.cluster import simulate
from headrace_core.sim.scenario import (
    DecodeRules,
    Duty,
    Instance,
    Network,
    Pool,
    Prediction,
    PrefillRules,
    Scenario,
    Slo,
)
from headrace_core.sim.traces import read_trace
from headrace_core.sim.workload import Workload

RATE_PER_PAIR = 3.0
"""Requests a second for each prefill and decode worker: about two thirds of what OPT-13B on an A100 takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in child processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=20_000, help="of a case (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace, as JSON lines")
    parser.add_argument("--growth", action="store_true", help="1k to 1M requests, and 2 to 256 workers (minutes)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print(json.dumps(run_case(json.loads(options.case))))
        return 0
    cases = [{"pairs": 1, "requests": options.requests}, {"pairs": 4, "requests": options.requests, "policies": True}]
    if options.trace:
        cases.append({"pairs": 4, "trace": str(options.trace)})
    if options.growth:
        cases += [{"pairs": 1, "requests": 10**power} for power in (3, 4, 5, 6)]
        cases += [{"pairs": pairs, "requests": 50_000, "policies": True} for pairs in (1, 2, 8, 32, 128)]
    kinds = [True, False]
    try:
        environment(compiled=True)
    except NoCompilerError as error:
        print(f"{error}. Only the interpreted core is measured.", file=sys.stderr)
        kinds = [False]
    found: dict[tuple[int, bool], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for index, case in enumerate(cases):
            for compiled in kinds:
                if not compiled and options.growth and index > 1:
                    continue
                found.setdefault((index, compiled), []).append(_measure(case, compiled=compiled))
    _print(cases, found)
    return 0


def _measure(case: dict[str, object], *, compiled: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.core.simulator", "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment(compiled=compiled), capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _print(cases: list[dict[str, object]], found: dict[tuple[int, bool], list[dict[str, float]]]) -> None:
    print(
        "case                                    core         requests/s, median (least to most)   CPU s   events/req"
    )
    for (index, compiled), results in sorted(found.items(), key=lambda item: (item[0][0], not item[0][1])):
        speeds = [one["requests"] / one["seconds"] for one in results]
        seconds = statistics.median(one["seconds"] for one in results)
        print(
            f"{_name(cases[index]):38}  {'compiled' if compiled else 'interpreted':11}"
            f" {statistics.median(speeds):10,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            f"   {seconds:7.2f}   {results[0]['events'] / results[0]['requests']:5.1f}"
        )


def _name(case: dict[str, object]) -> str:
    what = "Mooncake conversation" if "trace" in case else f"{case['requests']} requests"
    return f"{case['pairs']}P{case['pairs']}D, {what}{', all policies' if case.get('policies') else ''}"


def run_case(case: dict[str, object]) -> dict[str, float]:
    """Simulate one case, and say how many CPU seconds it took."""
    pairs = int(str(case["pairs"]))
    if "trace" in case:
        workload = read_trace(Path(str(case["trace"])), Random("mooncake"))
        scenario = mooncake_scenario(pairs)
    else:
        workload = opt_traffic(int(str(case["requests"])), RATE_PER_PAIR * pairs)
        scenario = opt_scenario(pairs, policies=bool(case.get("policies")))
    started = time.process_time()
    outcome = simulate(scenario, workload)
    seconds = time.process_time() - started
    return {"requests": len(workload), "seconds": seconds, "events": outcome.events}


def opt_scenario(pairs: int, *, policies: bool) -> Scenario:
    """OPT-13B on A100-80G by DistServe's measured fit; with `policies`, every mechanism that costs time is on."""
    placement = Placement(shape=known("facebook/opt-13b"), accelerator=accelerator("A100-80G"))
    instance = Instance(
        costs=profile_for(placement, engine="DistServe").costs,
        kv_blocks=fit(placement.shape, placement.accelerator, 1).kv_blocks,
    )
    rules: dict[str, object] = {}
    if policies:
        rules = {
            "prefill": PrefillRules(order=Order.SJF, limit_tokens=2048),
            "decode": DecodeRules(admission=Admission.RESERVE_DYNAMIC),
            "prediction": Prediction(accuracy=0.75),
            "deflection": DeflectionSettings(),
        }
    return Scenario(
        pools=_pools(instance, pairs),
        slos=(Slo(ttft_ms=250.0, tpot_ms=100.0),),
        network=Network(kv_bytes_per_token=kv_bytes_per_token(placement.shape), bytes_per_ms=25e6),
        **rules,  # type: ignore[arg-type]
    )


def mooncake_scenario(pairs: int) -> Scenario:
    """Llama 3.1 70B on four H100, with a prefix cache of half a million tokens a prefill worker."""
    placement = Placement(shape=known("meta-llama/Llama-3.1-70B"), accelerator=accelerator("H100-SXM"), tensor=4)
    instance = Instance(
        costs=profile_for(placement).costs, kv_blocks=fit(placement.shape, placement.accelerator, 4).kv_blocks, gpus=4
    )
    return Scenario(
        pools=_pools(instance, pairs),
        slos=(Slo(ttft_ms=10_000.0, tpot_ms=100.0),),
        network=Network(kv_bytes_per_token=kv_bytes_per_token(placement.shape), bytes_per_ms=100e6),
        prefill=PrefillRules(limit_tokens=8192),
        prefix_cache_tokens=500_000,
        prediction=Prediction(accuracy=0.75),
    )


def _pools(instance: Instance, pairs: int) -> tuple[Pool, Pool]:
    return (
        Pool(name="prefill", duty=Duty.PREFILL, instance=instance, workers=pairs),
        Pool(name="decode", duty=Duty.DECODE, instance=instance, workers=pairs),
    )


def opt_traffic(count: int, rate_per_s: float) -> Workload:
    """Poisson arrivals, log-normal lengths with medians of 150 tokens."""
    randomness = Random(f"bench {count} {rate_per_s}")
    arrivals, prompts, outputs, now_ms = [], [], [], 0.0
    for _ in range(count):
        arrivals.append(now_ms)
        now_ms += randomness.expovariate(rate_per_s) * 1000.0
        prompts.append(max(1, min(1024, round(randomness.lognormvariate(5.0, 1.0)))))
        outputs.append(max(1, min(1024, round(randomness.lognormvariate(5.0, 1.0)))))
    return Workload(arrivals, prompts, outputs, [], [], 0, "bench")


if __name__ == "__main__":
    sys.exit(main())
