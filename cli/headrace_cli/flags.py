"""Adds the flags that `headrace simulate` and `headrace plan` share; `inputs` reads them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from headrace_core.perf.shape import Dtype
from headrace_core.policy.admission import Admission, Bound
from headrace_core.policy.chunking import Batching
from headrace_core.policy.dispatch import Dispatching
from headrace_core.policy.prefill_order import Order
from headrace_core.sim.length_fits import LENGTH_FITS
from headrace_core.sim.lengths import LengthClass
from headrace_core.sim.scenario import Colocation

DEFAULT_COUNT: Final = 3000
"""Requests of synthetic traffic."""
DEFAULT_CHUNK_TOKENS: Final = 2048
"""Tokens of a prefill pass."""
POOL_FORM: Final = "N[:tpT][:ppP][:ACCELERATOR[@PRICE]]"
"""Workers of a pool, their tensor and pipeline degree, and what they run on."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, its data types, and the engine's memory."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="YAML with an InferenceCluster; flags go before it"
    )
    group.add_argument("--model", metavar="NAME|PATH", help="Hugging Face name, or the path of a config.json")
    group.add_argument("--weight-dtype", type=_dtype, metavar="DTYPE", help="of weights (default: config.json's)")
    group.add_argument("--kv-dtype", type=_dtype, metavar="DTYPE", help="of the KV cache (default: config.json's)")
    group.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="of the GPU's memory for the engine (default 0.9)"
    )
    group.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="measured step times of your own, before the shipped ones; may be repeated",
    )


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """The pools, their accelerators and the network between them."""
    group = parser.add_argument_group("workers")
    for flag, words in (
        ("prefill", "workers that prefill, such as 2:tp4"),
        ("decode", "workers that decode"),
        ("colocated", "workers that do both, instead"),
    ):
        group.add_argument(f"--{flag}", action="append", default=[], metavar="POOL", help=f"{words}; {POOL_FORM}")
    group.add_argument(
        "--accelerator", metavar="NAME[@PRICE]", help="of pools that name none; the price is of one GPU and hour"
    )
    group.add_argument(
        "--colocation", type=Colocation, choices=list(Colocation), default=Colocation.MIXED, help="default Mixed"
    )
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    group.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of a GPU's link between workers (default: a usual NIC)"
    )
    group.add_argument("--same-node", action="store_true", help="KV moves over the links inside a node")
    group.add_argument(
        "--prefix-cache-tokens", type=int, default=0, metavar="N", help="that a prefill worker remembers (default 0)"
    )
    group.add_argument(
        "--calibrate", metavar="TTFT,TPOT", help="observed means in ms under this load; step times are scaled to them"
    )


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """A trace, or arrivals and lengths."""
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Azure CSV, Mooncake JSONL, or CSV with arrival_s,prompt,output; .gz too",
    )
    group.add_argument("--rate", type=float, metavar="R", help="requests/s; with --trace: its time is scaled to it")
    group.add_argument(
        "--count", type=int, metavar="N", help=f"requests (default {DEFAULT_COUNT}; with --trace: all of it)"
    )
    group.add_argument(
        "--lengths",
        metavar="P,O|FILE|NAME",
        help=f"prompt and output tokens: fixed, from a table or trace, or a fit ({', '.join(LENGTH_FITS)})",
    )
    group.add_argument(
        "--length-class", type=LengthClass, choices=list(LengthClass), help="only these lengths (TetriInfer's classes)"
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="LAW",
        help="poisson (default), gamma:VARIATION, or bursts:PERIOD_S,SHARE,FACTOR",
    )
    group.add_argument("--from", dest="from_s", type=float, metavar="S", help="with --trace: start here")
    group.add_argument("--until", dest="until_s", type=float, metavar="S", help="with --trace: end here")
    group.add_argument("--repeat", type=int, metavar="N", help="with --trace: play it N times")


def add_slo_arguments(parser: argparse.ArgumentParser) -> None:
    """One SLO, or several classes."""
    group = parser.add_argument_group("SLO")
    group.add_argument("--ttft", type=float, metavar="MS", help="time to first token")
    group.add_argument("--tpot", type=float, metavar="MS", help="time per output token after the first")
    group.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=TTFT,TPOT[,SHARE]",
        help="an SLO class in ms, in place of --ttft and --tpot; may be repeated, in the order of a trace's slo_class",
    )


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """What workers and gateway do."""
    group = parser.add_argument_group("rules")
    group.add_argument("--order", type=Order, choices=list(Order), default=Order.FCFS, help="of prefill (default FCFS)")
    group.add_argument("--batching", type=Batching, choices=list(Batching), default=Batching.CHUNKED)
    group.add_argument(
        "--chunk-tokens", type=int, metavar="N", help=f"tokens of a prefill pass (default {DEFAULT_CHUNK_TOKENS})"
    )
    group.add_argument(
        "--admission",
        type=Admission,
        choices=list(Admission),
        help="to decode (default ReserveDynamic; of colocated workers Greedy)",
    )
    group.add_argument("--bound", type=Bound, choices=list(Bound), default=Bound.UPPER, help="of the predicted bucket")
    group.add_argument("--max-running", type=int, metavar="N", help="requests of a decode batch (default 256)")
    group.add_argument("--dispatching", type=Dispatching, choices=list(Dispatching), default=Dispatching.DEFAULT)
    group.add_argument("--deflect", choices=("ours", "kairos"), help="compute prompts on decode workers when faster")
    group.add_argument(
        "--prediction-accuracy", type=float, default=1.0, metavar="SHARE", help="of output-length buckets (default 1)"
    )


def _dtype(text: str) -> Dtype:
    try:
        return Dtype(text.lower())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Dtype)}") from None
