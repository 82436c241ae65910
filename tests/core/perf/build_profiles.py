"""Writes the shipped profiles from the published tables: `python -m tests.core.perf.build_profiles SHARED_DATA`.

SHARED_DATA is the folder that holds `profiles/` as the public repositories have it. What is written: DistServe's
coefficients, only reshaped; condensed tables of Splitwise's and Vidur's measurements, next to the tests; and from those
condensed tables the fitted profiles. A test fits again from the condensed tables and compares.
"""

from __future__ import annotations

import csv
import gzip
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from headrace_core.perf.costs import squares
from headrace_core.perf.fit import Line, Step, fit_decode, fit_large_decode, fit_prefill
from headrace_core.perf.hf_config import known
from headrace_core.perf.model import Efficiency

MEASURED = Path(__file__).parent / "measured"
SHIPPED = Path(__file__).parents[3] / "core" / "headrace_core" / "perf" / "data"

SPLITWISE_MODELS = {"llama2-70b": "meta-llama/Llama-2-70b-hf", "bloom-176b": "bigscience/bloom"}
SPLITWISE_GPUS = {"a100-80gb": "A100-80G", "h100-80gb": "H100-SXM"}
ONE_PASS_BATCH = 4
"""Prompts of 512 up to which Splitwise's engine ran them in one pass: the times of larger batches grow in jumps."""
LARGE_BATCH = 32
"""Between its batches of 32 and of 64 a step turns from reading weights to arithmetic."""
LLAMA_3_8B = "meta-llama/Meta-Llama-3-8B"
LAYER_OPS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    yield from csv.DictReader(text.splitlines())


def write_table(name: str, header: str, rows: list[tuple[object, ...]]) -> None:
    MEASURED.mkdir(exist_ok=True)
    lines = [header, *(",".join(str(value) for value in row) for row in rows)]
    (MEASURED / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def document(source: str, licence: str, profiles: list[dict[str, object]]) -> str:
    whole = {"schema_version": 1, "source": source, "licence": licence, "profiles": profiles}
    return json.dumps(whole, indent=1) + "\n"


def distserve(raw: Path) -> None:
    """The published coefficients, unchanged; the scheduler cost and the hop are those of its simulator."""
    profiles: list[dict[str, object]] = []
    for engine, file in (("DistServe", "distserve"), ("vLLM", "vllm")):
        table = json.loads((raw / f"distserve_profiler-a100-80g.{file}.json").read_text())
        for model, by_tensor in table.items():
            for tensor, row in by_tensor.items():
                large_from = row["decoding_large_small_bs_threshold"]
                profiles.append(
                    {
                        "model": model,
                        "accelerator": "A100-80G",
                        "tensor": int(tensor),
                        "engine": engine,
                        "prefill": dict(zip(("base_ms", "token_ms", "square_ms"), row["prefill"], strict=True)),
                        "decode": _published_decode(row["decoding_smallbs"], 1),
                        "large_decode": _published_decode(row["decoding_largebs"], large_from),
                        "scheduler_ms": 2.0,
                        "scheduler_token_ms": 0.0001,
                        "hop_ms_times_stages": 1.0,
                    }
                )
    source = "DistServe's simulator (github.com/LLMServe/DistServe, simdistserve/estimators)"
    (SHIPPED / "distserve_profile.json").write_text(document(source, "Apache-2.0", profiles))
    rows = (raw / "distserve_max_num_tokens.csv").read_text().splitlines()
    (SHIPPED / "distserve_kv_tokens.csv").write_text("\n".join(["model,tensor,pipeline,kv_tokens", *rows[1:]]) + "\n")


def condense_splitwise(raw: Path) -> None:
    """The median of each setting's repetitions; the power-capped GPUs are left out."""
    repeated: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows_of(raw / "splitwise_perf_model.csv.gz"):
        if row["hardware"] in SPLITWISE_GPUS:
            key = (
                SPLITWISE_MODELS[row["model"]],
                SPLITWISE_GPUS[row["hardware"]],
                *(int(row[name]) for name in ("tensor_parallel", "prompt_size", "batch_size", "token_size")),
            )
            repeated[key].append((float(row["prompt_time"]), float(row["token_time"])))
    write_table(
        "splitwise.csv",
        "model,accelerator,tensor,prompt_tokens,requests,output_tokens,prompt_ms,token_ms",
        [
            (*key, *(round(statistics.median(time[part] for time in times), 3) for part in (0, 1)))
            for key, times in sorted(repeated.items(), key=lambda item: tuple(map(str, item[0])))
        ],
    )


def splitwise_steps() -> dict[tuple[str, str, int], tuple[list[Step], list[Step]]]:
    """Prefill passes and decode steps of each shape. A request's mean context is its prompt and half its output.

    Left out: prefill of more than ONE_PASS_BATCH prompts, and all of tensor degree 2 with 64 requests, which did not
    run together (prefill and steps take less time there than with 32).
    """
    shapes: dict[tuple[str, str, int], tuple[list[Step], list[Step]]] = defaultdict(lambda: ([], []))
    for row in rows_of(MEASURED / "splitwise.csv"):
        tensor, prompt, requests, output = (
            int(row[name]) for name in ("tensor", "prompt_tokens", "requests", "output_tokens")
        )
        if tensor == 2 and requests == 2 * LARGE_BATCH:
            continue
        prefill, decode = shapes[row["model"], row["accelerator"], tensor]
        if requests <= ONE_PASS_BATCH:
            prefill.append(
                Step(
                    measured_ms=float(row["prompt_ms"]),
                    tokens=prompt * requests,
                    squares=squares(0, prompt) * requests,
                )
            )
        context = prompt + output // 2
        decode.append(Step(measured_ms=float(row["token_ms"]), requests=requests, kv_tokens=requests * context))
    return dict(shapes)


def splitwise_document() -> str:
    profiles = []
    for (model, gpu, tensor), (prefill, decode) in splitwise_steps().items():
        small = fit_decode([step for step in decode if step.requests <= LARGE_BATCH])
        entry = {
            "model": model,
            "accelerator": gpu,
            "tensor": tensor,
            "engine": "vLLM",
            "prefill": _line(fit_prefill(prefill), ("base_ms", "token_ms", "square_ms")),
            "decode": {**_line(small, ("base_ms", "kv_token_ms", "request_ms")), "from_requests": 1},
        }
        large = [step for step in decode if step.requests >= LARGE_BATCH]
        if len({step.requests for step in large}) > 1:
            line = fit_large_decode(large, small.first_ms)
            entry["large_decode"] = {
                **_line(line, ("base_ms", "kv_token_ms", "request_ms")),
                "from_requests": LARGE_BATCH + 1,
            }
        profiles.append(entry)
    source = (
        "fitted to the medians of Splitwise's measurements (github.com/Mutinifni/splitwise-sim, data/perf_model.csv)"
    )
    return document(source, "MIT, Copyright (c) 2024 Pratyush Patel", profiles)


def condense_vidur(raw: Path) -> None:
    """Whole passes of Llama-3-8B on one A100 put together from operator times, and single operators to compare with."""
    folder = raw / "vidur_profiling"
    passes = list(_vidur_passes(folder))
    write_table("vidur_llama3_8b_a100.csv", "offset,tokens,requests,context_tokens,pass_ms", passes)
    products = []
    for gpu, name in (
        ("A100-80G", "compute_a100_meta-llama_Meta-Llama-3-8B_mlp.csv.gz"),
        ("H100-SXM", "compute_h100_meta-llama_Llama-2-70b-hf_mlp.csv.gz"),
    ):
        for row in rows_of(folder / name):
            tokens = int(row["num_tokens"])
            if tokens & (tokens - 1) == 0 and tokens <= 4096:
                times = [row[f"time_stats.{op}.median"] for op in PRODUCTS]
                products.append((gpu, row["num_tensor_parallel_workers"], tokens, *map(float, times)))
    write_table("vidur_products.csv", "accelerator,tensor,tokens," + ",".join(PRODUCTS), products)
    reduces = []
    for gpu, name in (("A100-80G", "a100"), ("H100-SXM", "h100")):
        for row in rows_of(folder / f"network_{name}_dgx_all_reduce.csv.gz"):
            size = int(row["size"])
            if row["num_workers"] == row["devices_per_node"] and size % (1 << 23) == 0:
                reduces.append((gpu, row["num_workers"], size, float(row["time_stats.all_reduce.median"])))
    write_table("vidur_all_reduce.csv", "accelerator,gpus,bytes,time_ms", reduces)


def _vidur_passes(folder: Path) -> Iterator[tuple[int, int, int, int, float]]:
    shape = known(LLAMA_3_8B)
    compute = {
        int(row["num_tokens"]): {op: float(row[f"time_stats.{op}.median"]) for op in (*LAYER_OPS, "emb")}
        for row in rows_of(folder / "compute_a100_meta-llama_Meta-Llama-3-8B_mlp.csv.gz")
        if row["num_tensor_parallel_workers"] == "1"
    }
    # One of two GPUs with Llama-2-70B: 32 query heads and 4 KV heads of 128. Llama-3-8B has 32 and 8. Prefill goes by
    # query heads; decode by KV heads, so that n requests of one are 2n of the other.
    prefill: dict[tuple[int, int], float] = {}
    decode: dict[tuple[int, int], float] = {}
    for row in rows_of(folder / "a100_attention_e2d00e9_70b_tp2.csv.gz"):
        kind = "prefill" if row["is_prefill"] == "True" else "decode"
        total = sum(float(row[f"time_stats.attn_{op}.median"]) for op in ("input_reshape", kind, "output_reshape"))
        cached = int(row["kv_cache_size"])
        if kind == "prefill":
            prefill[int(row["prefill_chunk_size"]), cached] = total
        else:
            decode[int(row["batch_size"]), cached] = total
    # The output matrix was not timed: it is a product as mlp_up_proj is, so many times wider.
    wider = shape.vocab / (2 * shape.intermediate)

    def whole(tokens: int, rows: int, attention_ms: float) -> float:
        layer = sum(compute[tokens][op] for op in LAYER_OPS) + attention_ms
        return round(shape.layers * layer + compute[tokens]["emb"] + wider * compute[rows]["mlp_up_proj"], 4)

    for tokens in (128, 256, 512, 1024, 2048, 4096):
        for offset in (0, 512, 1024, 2048):
            if (tokens, offset) in prefill:
                yield offset, tokens, 0, 0, whole(tokens, 1, prefill[tokens, offset])
    for requests in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64):
        for context in (128, 256, 512, 1024, 2048):
            if (2 * requests, context) in decode:
                yield 0, 0, requests, context, whole(requests, requests, decode[2 * requests, context])


def vidur_steps() -> tuple[list[Step], list[Step]]:
    """Prefill passes and decode steps."""
    prefill, decode = [], []
    for row in rows_of(MEASURED / "vidur_llama3_8b_a100.csv"):
        offset, tokens, requests, context = (
            int(row[name]) for name in ("offset", "tokens", "requests", "context_tokens")
        )
        time_ms = float(row["pass_ms"])
        if tokens:
            prefill.append(Step(measured_ms=time_ms, tokens=tokens, squares=squares(offset, tokens)))
        else:
            decode.append(Step(measured_ms=time_ms, requests=requests, kv_tokens=requests * context))
    return prefill, decode


def vidur_document() -> str:
    prefill, decode = vidur_steps()
    entry = {
        "model": LLAMA_3_8B,
        "accelerator": "A100-80G",
        "tensor": 1,
        "engine": "kernels",
        "prefill": _line(fit_prefill(prefill), ("base_ms", "token_ms", "square_ms")),
        "decode": {**_line(fit_decode(decode), ("base_ms", "kv_token_ms", "request_ms")), "from_requests": 1},
        "scheduler_ms": Efficiency().scheduler_ms,
        "assumed": "kernels alone were timed: the time between two steps is that of an estimate",
    }
    source = "fitted to passes put together from Vidur's kernel times (github.com/microsoft/vidur, data/profiling)"
    return document(source, "MIT, Copyright (c) Microsoft Corporation", [entry])


def _published_decode(row: list[float], from_requests: int) -> dict[str, object]:
    named = dict(zip(("base_ms", "kv_token_ms", "request_ms"), row, strict=True))
    return {**named, "from_requests": from_requests}


def _line(line: Line, names: tuple[str, str, str]) -> dict[str, object]:
    values = (line.base_ms, line.first_ms, line.second_ms)
    residual = line.residual
    return {
        **{name: float(f"{value:.9g}") for name, value in zip(names, values, strict=True)},
        "residual": {"mape": round(residual.mape, 6), "p95": round(residual.p95, 6), "samples": residual.samples},
    }


if __name__ == "__main__":
    tables = Path(sys.argv[1]) / "profiles"
    distserve(tables)
    condense_splitwise(tables)
    condense_vidur(tables)
    (SHIPPED / "splitwise_profile.json").write_text(splitwise_document())
    (SHIPPED / "vidur_profile.json").write_text(vidur_document())
