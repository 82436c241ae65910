"""Measures how long the planner searches, compiled and interpreted: OPT-66B on 32 A100-80G, Algorithms 1 and 2.

    python -m bench.core.planner [--rounds 1] [--rate R] [--pure]

Four nodes of eight GPUs, workers over all of them, ShareGPT's lengths, and the SLOs of DistServe (OSDI 2024, table 1:
TTFT 2.5 s, TPOT 0.15 s). Each search includes the colocated workers beside. Without `--rate` it looks for what 32 GPUs
can serve. Seconds on the clock and CPU seconds over all processes; on a machine that is busy only the latter say much.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from random import Random

from bench.core.compiled import NoCompilerError, environment
from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.hf_config import known
from headrace_core.perf.memory import Engine
from headrace_core.planner.goodput import WANTED_HALF_WIDTH
from headrace_core.planner.question import Layout, Question
from headrace_core.planner.runner import Processes
from headrace_core.planner.search import search
from headrace_core.planner.space import Nodes, Offer, space_of
from headrace_core.sim.cluster import simulate
from headrace_core.sim.length_fits import length_fit
from headrace_core.sim.lengths import draw_log_normal
from headrace_core.sim.scenario import Slo
from headrace_core.sim.traffic import Traffic

GPUS = 32
PAIRS_OF_LENGTHS = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in child processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of each search (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="requests/s to be served, in place of all that the GPUs can")
    parser.add_argument("--pure", action="store_true", help="interpreted too (minutes)")
    parser.add_argument("--case", type=Layout, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print(json.dumps(run_case(options.case, options.rate)))
        return 0
    print(f"{'search':24} {'form':12} {'seconds':>8} {'CPU s':>7} {'simulations':>12}  best plan, goodput/s")
    for compiled in (True, False) if options.pure else (True,):
        for layout in (Layout.APART, Layout.PAIRED):
            for _ in range(options.rounds):
                try:
                    found = _child(layout, options.rate, compiled=compiled)
                except NoCompilerError as error:
                    print(f"{layout.value:24} {'compiled':12} {error}")
                    break
                name = "Algorithm 1" if layout is Layout.APART else "Algorithm 2"
                form = "compiled" if compiled else "interpreted"
                print(
                    f"{name:24} {form:12} {found['seconds']:8.1f} {found['cpu_s']:7.1f} {found['trials']:12}  "
                    f"{found['best']}",
                    flush=True,
                )
    return 0


def run_case(layout: Layout, rate_per_s: float | None) -> dict[str, object]:
    """One search in this process and its pool."""
    table = draw_log_normal(length_fit("sharegpt"), PAIRS_OF_LENGTHS, Random(1), stratified=True)
    question = Question(
        traffic=Traffic(lengths=table),
        slos=(Slo(ttft_ms=2500.0, tpot_ms=150.0),),
        rate_per_s=rate_per_s,
        gpus=GPUS,
        layouts=(layout,),
    )
    offer = Offer(accelerator=accelerator("A100-80G"))
    began_s = time.perf_counter()
    space = space_of(known("facebook/opt-66b"), [offer], Nodes(gpus=8, per_worker=4), Engine())
    with Processes(question.traffic, simulate) as runner:
        results = search(question, space, runner)
    seconds = time.perf_counter() - began_s
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    best = results.found[0]
    widths = [one.goodput.half_width / one.goodput.mean for one in results.found]
    assert max(widths) <= 1.5 * WANTED_HALF_WIDTH, widths
    sides = " + ".join(f"{side.workers} {side.shape.name}" for side in best.deployment.sides)
    return {
        "seconds": seconds,
        "cpu_s": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "trials": runner.trials,
        "best": f"{best.deployment.layout.value}: {sides}, {best.goodput.mean:.2f} ± {best.goodput.half_width:.2f}",
    }


def _child(layout: Layout, rate_per_s: float | None, *, compiled: bool) -> dict[str, object]:
    rate = ["--rate", str(rate_per_s)] if rate_per_s is not None else []
    done = subprocess.run(
        [sys.executable, "-m", "bench.core.planner", "--case", layout.value, *rate],
        env=environment(compiled=compiled),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()
    found: dict[str, object] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
