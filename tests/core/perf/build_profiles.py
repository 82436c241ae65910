"""Writes the shipped profiles from the published tables: `python -m tests.core.perf.build_profiles SHARED_DATA`.

SHARED_DATA is the folder that holds `profiles/` as the public repositories have it. What is written: DistServe's
coefficients, only reshaped; condensed tables of Splitwise's and Vidur's measurements, next to the tests; and from those
condensed tables the fitted profiles. A test fits again from the condensed tables and compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
SHIPPED = HERE.parents[2] / "core" / "headrace_core" / "perf" / "data"


def write(path: Path, source: str, licence: str, profiles: list[dict[str, object]]) -> None:
    document = {"schema_version": 1, "source": source, "licence": licence, "profiles": profiles}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def distserve(raw: Path) -> None:
    """The published coefficients, unchanged; the scheduler cost and the hop are those of its simulator."""
    profiles: list[dict[str, object]] = []
    for engine, file in (("DistServe", "distserve"), ("vLLM", "vllm")):
        table = json.loads((raw / f"distserve_profiler-a100-80g.{file}.json").read_text())
        for model, by_tensor in table.items():
            for tensor, row in by_tensor.items():
                profiles.append(
                    {
                        "model": model,
                        "accelerator": "A100-80G",
                        "tensor": int(tensor),
                        "engine": engine,
                        "prefill": dict(zip(("base_ms", "token_ms", "square_ms"), row["prefill"], strict=True)),
                        "decode": _decode(row["decoding_smallbs"], 1),
                        "large_decode": _decode(row["decoding_largebs"], row["decoding_large_small_bs_threshold"]),
                        "scheduler_ms": 2.0,
                        "scheduler_token_ms": 0.0001,
                        "hop_ms_times_stages": 1.0,
                    }
                )
    write(
        SHIPPED / "distserve_profile.json",
        "DistServe's simulator, github.com/LLMServe/DistServe, simdistserve/estimators",
        "Apache-2.0",
        profiles,
    )
    rows = (raw / "distserve_max_num_tokens.csv").read_text().splitlines()
    (SHIPPED / "distserve_kv_tokens.csv").write_text("\n".join(["model,tensor,pipeline,kv_tokens", *rows[1:]]) + "\n")


def _decode(row: list[float], from_requests: int) -> dict[str, object]:
    return {
        **dict(zip(("base_ms", "kv_token_ms", "request_ms"), row, strict=True)),
        "from_requests": from_requests,
    }


if __name__ == "__main__":
    distserve(Path(sys.argv[1]) / "profiles")
