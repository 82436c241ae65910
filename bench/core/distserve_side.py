"""Runs DistServe's own simulator on the workloads of `parity.py`, in an environment that has what it imports.

Reads a JSON document on the standard input, {"model", "tensor", "most_prefill_tokens", "workloads": [{"arrival_ms",
"prompt_tokens", "output_tokens"}]}, and writes {"seconds", "workloads": [{"ttft_ms", "tpot_ms"}]}. Calls its functions:
its command line hangs on two cores.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any


def main() -> None:
    """Simulate each workload with one prefill and one decode instance."""
    import simpy  # noqa: PLC0415 - neither is among the project's requirements
    from simdistserve.base.scheduler import put_requests_with_interarrivals  # noqa: PLC0415
    from simdistserve.base.worker import WorkerConfig  # noqa: PLC0415
    from simdistserve.base.workload import convert_pd_pair_to_request  # noqa: PLC0415
    from simdistserve.clusters.disagg import DisaggCluster  # noqa: PLC0415
    from simdistserve.constants import ModelTypes  # noqa: PLC0415

    asked: dict[str, Any] = json.load(sys.stdin)
    results = []
    started = time.process_time()
    for workload in asked["workloads"]:
        env = simpy.Environment()
        config = WorkerConfig(
            model_type=ModelTypes.model_str_to_object(asked["model"]),
            TP=asked["tensor"],
            TP_Prefill=asked["tensor"],
            TP_Decode=asked["tensor"],
            prefill_max_batch_size=10**7,
            decode_max_batch_size=10**7,
            prefill_max_tokens=asked["most_prefill_tokens"],
            decode_max_tokens=asked["most_prefill_tokens"],
            enable_chunked_prefill=False,
            engine_type="distserve",
        )
        cluster = DisaggCluster(env=env, PP_prefill=1, PP_decode=1, worker_configs=config)
        cluster.run()
        requests = convert_pd_pair_to_request(
            list(zip(workload["prompt_tokens"], workload["output_tokens"], strict=True))
        )
        arrivals = workload["arrival_ms"]
        gaps = [arrivals[0], *(later - earlier for earlier, later in itertools.pairwise(arrivals))]
        put_requests_with_interarrivals(env, cluster.scheduler, gaps, requests)
        env.run()
        results.append(_times(requests))
    json.dump({"seconds": time.process_time() - started, "workloads": results}, sys.stdout)


def _times(requests: list[Any]) -> dict[str, list[float]]:
    ttft_ms, tpot_ms = [], []
    for request in requests:
        first: dict[str, float] = {}
        for at_ms, event, _ in request.log:
            first.setdefault(event, at_ms)
        ttft_ms.append(first["wait_decode"] - first["init"])
        tpot_ms.append((first["exit_system"] - first["wait_decode"]) / request.output_lens)
    return {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}


if __name__ == "__main__":
    main()
