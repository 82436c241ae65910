"""Compares our simulator with DistServe's own, on the same profile, lengths and arrivals, from light load to overload.

    git clone https://github.com/LLMServe/DistServe DIR
    python -m bench.core.parity --distserve DIR [--requests 3000]

Runs both in one go: DistServe's in an environment of its own, made with uv. Exits with 1 when an attainment differs by
more than 0.5 points. Prints the attainments, and the CPU seconds of both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.hf_config import known
from headrace_core.perf.model import Placement
from headrace_core.perf.profiles import measured_kv_tokens, profile_for
from headrace_core.sim.arrivals import poisson
from headrace_core.sim.attainment import judge
from headrace_core.sim.baselines import as_distserve_simulates
from headrace_core.sim.cluster import simulate
from headrace_core.sim.lengths import Lengths, draw
from headrace_core.sim.scenario import Instance, Slo
from headrace_core.sim.traces import read_lengths
from headrace_core.sim.workload import Workload

LIMIT_POINTS = 0.5
OPT_CONTEXT_TOKENS = 2048
LENGTHS = Path(__file__).parents[2] / "tests" / "data" / "sharegpt_lengths_500.csv.gz"


@dataclass(frozen=True)
class Case:
    """One shape, the SLOs of DistServe's Table 1 for it, and rates from light load to overload."""

    model: str
    tensor: int
    slo: Slo
    rates_per_s: tuple[float, ...]


CASES = (
    Case("facebook/opt-13b", 1, Slo(ttft_ms=200.0, tpot_ms=100.0), (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)),
    Case("facebook/opt-13b", 2, Slo(ttft_ms=200.0, tpot_ms=100.0), (1.0, 2.0, 3.0, 4.0, 5.0, 8.0)),
    Case("facebook/opt-66b", 4, Slo(ttft_ms=400.0, tpot_ms=100.0), (0.5, 1.0, 1.5, 2.0, 3.0, 5.0)),
)


def main() -> int:
    """Run all cases; the exit code says whether all attainments agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distserve", type=Path, required=True, metavar="DIR", help="checkout of LLMServe/DistServe")
    parser.add_argument("--requests", type=int, default=3000, help="of each rate (default: %(default)s)")
    options = parser.parse_args()
    if not (options.distserve / "simdistserve").is_dir():
        parser.error(f"--distserve: {options.distserve} has no folder simdistserve; clone LLMServe/DistServe there")
    table = within_context(read_lengths(LENGTHS))
    worst = 0.0
    for case in CASES:
        worst = max(worst, compare(case, table, options.requests, options.distserve))
    print(f"largest difference: {worst:.2f} points (limit {LIMIT_POINTS})")
    return 0 if worst <= LIMIT_POINTS else 1


def compare(case: Case, table: Lengths, count: int, checkout: Path) -> float:
    """Print a line a rate; returns the largest difference of attainment, in points."""
    placement = Placement(shape=known(case.model), accelerator=accelerator("A100-80G"), tensor=case.tensor)
    instance = Instance(costs=profile_for(placement, engine="DistServe").costs, kv_blocks=1)
    most = measured_kv_tokens(case.model, case.tensor, 1)
    if most is None:
        raise LookupError(f"DistServe has no table of KV tokens for {case.model} at tensor degree {case.tensor}")
    workloads = [traffic_at(table, count, rate) for rate in case.rates_per_s]
    theirs = _theirs(case, workloads, most, checkout)
    scenario = as_distserve_simulates(instance, instance, (case.slo,), most_prefill_tokens=most)
    started = time.process_time()
    ours = [judge(scenario, simulate(scenario, workload)) for workload in workloads]
    seconds = time.process_time() - started
    print(f"{case.model}, tensor {case.tensor}: CPU seconds {seconds:.2f} against {theirs['seconds']:.2f}")
    print("   rate   TTFT ours/theirs   TPOT ours/theirs   both ours/theirs")
    worst = 0.0
    for rate, mine, yours in zip(case.rates_per_s, ours, theirs["workloads"], strict=True):
        ttft = [found <= case.slo.ttft_ms for found in yours["ttft_ms"]]
        tpot = [found <= case.slo.tpot_ms for found in yours["tpot_ms"]]
        both = [one and other for one, other in zip(ttft, tpot, strict=True)]
        pairs = [(mine.ttft_met, ttft), (mine.tpot_met, tpot), (mine.met, both)]
        shares = [(100.0 * sum(a) / count, 100.0 * sum(b) / count) for a, b in pairs]
        worst = max(worst, *(abs(a - b) for a, b in shares))
        print(f"  {rate:5.1f}" + "".join(f"   {a:7.2f} / {b:6.2f}" for a, b in shares))
    return worst


def within_context(table: Lengths) -> Lengths:
    """The rows that OPT can serve."""
    pairs = zip(table.prompt_tokens, table.output_tokens, strict=True)
    rows = [(prompt, output) for prompt, output in pairs if prompt + output <= OPT_CONTEXT_TOKENS]
    prompts, outputs = [prompt for prompt, _ in rows], [output for _, output in rows]
    return Lengths(prompts, outputs, f"{table.source}, within {OPT_CONTEXT_TOKENS} tokens")


def traffic_at(table: Lengths, count: int, rate_per_s: float) -> Workload:
    """Poisson arrivals and drawn lengths; the same for the same count and rate."""
    randomness = Random(f"parity {rate_per_s}")
    lengths = draw(table, count, randomness, stratified=False)
    return Workload(
        arrival_ms=poisson(count, rate_per_s, randomness),
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
        slo_class=[],
        prefix=[],
        prefix_block_tokens=0,
        source=f"{table.source} at {rate_per_s} requests/s",
    )


def _theirs(case: Case, workloads: list[Workload], most: int, checkout: Path) -> dict[str, Any]:
    asked = {
        "model": case.model,
        "tensor": case.tensor,
        "most_prefill_tokens": most,
        "workloads": [
            {"arrival_ms": one.arrival_ms, "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens}
            for one in workloads
        ],
    }
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        raise FileNotFoundError("uv is not there: run make setup")
    command = [uv, "run", "-q", "--no-project", "--with", "simpy,numpy,pandas", "--python", sys.executable, "python"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("distserve_side.py"))],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"DistServe's simulator failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
