"""Measures the switch of a role on real vLLM: from the end of the drain until the scheduler has read the new epoch.

    python -m bench.flip_switch [--flips 100] [--busy]

The worker measures it and says so in `/v1/pd_role`. Exits with 1 when the median is above 5 ms. `--busy` keeps the
worker answering between two changes, so that each change has requests to drain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import httpx

from e2e.quickstart import tiny_model
from e2e.traffic import Prompt
from e2e.worker.process import MODEL_NAME, Worker, loopback
from headrace_core.api.names import Role

MEDIAN_LIMIT_MS = 5.0
BUSY_CLIENTS = 2


def main() -> int:
    """Runs the measurement, prints it, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--busy", action="store_true", help="send requests while the role changes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        worker = Worker(loopback(1), Role.PREFILL, tiny_model(), Path(directory), {})
        try:
            print(f"worker ready after {worker.wait_until_ready():.1f} s")
            switches_ms, drains_ms = _flip(worker, arguments.flips, busy=arguments.busy)
        finally:
            worker.stop()
    median = statistics.median(switches_ms)
    print(f"flips {len(switches_ms)}, {'busy' if arguments.busy else 'idle'}")
    print(f"switch p50 {median:.2f} ms, p99 {_percentile(switches_ms, 99):.2f} ms, most {max(switches_ms):.2f} ms")
    print(f"drain  p50 {statistics.median(drains_ms):.2f} ms, p99 {_percentile(drains_ms, 99):.2f} ms")
    if median > MEDIAN_LIMIT_MS:
        print(f"the median is above {MEDIAN_LIMIT_MS} ms", file=sys.stderr)
        return 1
    return 0


def _flip(worker: Worker, flips: int, *, busy: bool) -> tuple[list[float], list[float]]:
    stop = threading.Event()
    clients = [threading.Thread(target=_ask_on, args=(worker, stop)) for _ in range(BUSY_CLIENTS if busy else 0)]
    for client in clients:
        client.start()
    switches, drains = [], []
    try:
        for number in range(flips):
            done = worker.change_role(Role.PREFILL if number % 2 else Role.DECODE).last_switch
            if done is None or done.outcome != "Succeeded":
                raise RuntimeError(f"flip {number} ended with {done}")
            switches.append(1e3 * done.switch_seconds)
            drains.append(1e3 * done.drain_seconds)
    finally:
        stop.set()
        for client in clients:
            client.join()
    return switches, drains


def _ask_on(worker: Worker, stop: threading.Event) -> None:
    """Asks one request after the other; those that come during a change are turned away."""
    prompt = Prompt("text", "a mill wheel turns " * 20, max_tokens=16)
    with httpx.Client(base_url=worker.url, headers=worker.http.headers, timeout=60, trust_env=False) as http:
        while not stop.is_set():
            status = http.post(prompt.path, json=prompt.body(MODEL_NAME)).status_code
            if status not in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE):
                raise RuntimeError(f"an answer with status {status}")


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    raise SystemExit(main())
