"""Turns flags and files into what simulator and planner take: model, engine, traffic, SLOs, rules."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final, final

from headrace_cli.cluster_file import EngineSettings
from headrace_cli.errors import CliError
from headrace_cli.flags import DEFAULT_CHUNK_TOKENS, DEFAULT_COUNT
from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.errors import PerfError
from headrace_core.perf.fit import Latency
from headrace_core.perf.hf_config import known, shape_from_file
from headrace_core.perf.memory import Engine
from headrace_core.perf.shape import Dtype, ModelShape
from headrace_core.planner.errors import PlanError
from headrace_core.planner.question import Rules
from headrace_core.planner.space import Offer
from headrace_core.policy.admission import Admission
from headrace_core.policy.deflection import ALPHA, ALPHA_KAIROS, DeflectionSettings, PrefillRule
from headrace_core.sim.arrivals import Bursts, bursty
from headrace_core.sim.length_fits import length_fit
from headrace_core.sim.lengths import Lengths, draw_log_normal, fixed, only
from headrace_core.sim.report_json import ReportError
from headrace_core.sim.scenario import DecodeRules, Prediction, PrefillRules, ScenarioError, Slo
from headrace_core.sim.traces import read_lengths, read_trace
from headrace_core.sim.traffic import Traffic, draw_traffic
from headrace_core.sim.workload import Workload, WorkloadError, cut_time, first, repeat, scale_rate

DRAWN_LENGTHS: Final = 10_000
"""Pairs drawn from a named fit, of which the requests' lengths are then taken."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What the core refuses is the user's to mend: its message names the field and the remedy.

    Raises:
        CliError: in place of the core's own.
    """
    try:
        yield
    except (WorkloadError, ScenarioError, PerfError, PlanError, ReportError) as error:
        raise CliError(str(error)) from error


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """One SLO class, and its share of synthetic traffic."""

    slo: Slo
    share: float


def model_of(arguments: argparse.Namespace, named: str | None, engine: EngineSettings | None) -> ModelShape:
    """The model of `--model`, or else the one that the cluster's file names.

    Raises:
        CliError: neither is given.
        PerfError: it is not known, or its config.json cannot be read.
    """
    name = arguments.model or named
    if not name:
        raise CliError("model: none is given; add --model NAME, or -f FILE with an InferenceCluster")
    path = Path(name)
    shape = shape_from_file(path) if path.exists() else known(name)
    kv_dtype = arguments.kv_dtype or (_kv_cache_dtype(engine.kv_dtype) if engine and engine.kv_dtype else None)
    if arguments.weight_dtype:
        shape = replace(shape, weight_dtype=arguments.weight_dtype, expert_dtype=arguments.weight_dtype)
    return replace(shape, kv_dtype=kv_dtype) if kv_dtype else shape


def engine_of(arguments: argparse.Namespace, settings: EngineSettings | None, context_tokens: int) -> Engine:
    """The engine's memory settings. `context_tokens`: the usual context, which matters for sliding windows."""
    plain, rules = Engine(), rules_of(arguments, settings)
    utilization = arguments.gpu_memory_utilization
    if utilization is None:
        utilization = settings.utilization if settings and settings.utilization is not None else plain.utilization
    return Engine(
        utilization=utilization,
        batched_tokens=max(rules.prefill.limit_tokens, rules.decode.token_budget),
        max_running=rules.decode.max_running,
        block_tokens=(settings.block_tokens if settings else None) or plain.block_tokens,
        context_tokens=context_tokens,
    )


def rules_of(arguments: argparse.Namespace, settings: EngineSettings | None) -> Rules:
    """The rules that the flags name, with the engine's own limits where no flag does."""
    tokens = (settings.batched_tokens if settings else None) or DEFAULT_CHUNK_TOKENS
    chunk_tokens = tokens if arguments.chunk_tokens is None else arguments.chunk_tokens
    running = (settings.max_running if settings else None) or DecodeRules().max_running
    return Rules(
        prefill=PrefillRules(order=arguments.order, batching=arguments.batching, limit_tokens=chunk_tokens),
        decode=DecodeRules(
            admission=arguments.admission or Admission.RESERVE_DYNAMIC,
            bound=arguments.bound,
            max_running=running if arguments.max_running is None else arguments.max_running,
            token_budget=tokens,
        ),
        dispatching=arguments.dispatching,
        prediction=Prediction(accuracy=arguments.prediction_accuracy),
        deflection=_deflection(arguments.deflect),
    )


def slo_classes_of(arguments: argparse.Namespace) -> tuple[SloClass, ...]:
    """The SLO classes.

    Raises:
        CliError: none is given, both ways are used, or one cannot be read.
    """
    if arguments.slo:
        if arguments.ttft is not None or arguments.tpot is not None:
            raise CliError("slo: give either --slo classes or --ttft and --tpot")
        return tuple(_slo_class(text) for text in arguments.slo)
    if arguments.ttft is None or arguments.tpot is None:
        raise CliError("slo: give --ttft MS and --tpot MS, such as --ttft 500 --tpot 50")
    return (SloClass(slo=Slo(ttft_ms=arguments.ttft, tpot_ms=arguments.tpot), share=1.0),)


def workload_of(arguments: argparse.Namespace, classes: tuple[SloClass, ...], seed: int) -> Workload:
    """The requests of a trace or a law.

    Raises:
        CliError: flags of the two are mixed, or what one needs is missing.
        WorkloadError: a file or a number is not sound.
    """
    if arguments.trace is not None:
        return _traced(arguments, seed)
    for flag, value in (("--from", arguments.from_s), ("--until", arguments.until_s), ("--repeat", arguments.repeat)):
        if value is not None:
            raise CliError(f"{flag}: it cuts a trace; add --trace FILE or leave it out")
    if arguments.rate is None:
        raise CliError("rate: no traffic is given; add --rate R with --lengths, or --trace FILE")
    count = DEFAULT_COUNT if arguments.count is None else arguments.count
    variation, bursts = _law(arguments.arrivals)
    shares = tuple(one.share for one in classes)
    traffic = Traffic(lengths=lengths_of(arguments), variation=variation, class_shares=shares)
    drawn = draw_traffic(traffic, count, arguments.rate, seed)
    if bursts is None:
        return drawn
    arrival_ms = bursty(count, arguments.rate, bursts, Random(f"bursts {seed}"))  # noqa: S311 - no secret
    source = f"{traffic.lengths.source}, bursts ({arguments.arrivals}) at {arguments.rate:g}/s, seed {seed}"
    return replace(drawn, arrival_ms=arrival_ms, source=source)


def lengths_of(arguments: argparse.Namespace) -> Lengths:
    """The pairs that `--lengths` names, of the class of `--length-class`.

    Raises:
        CliError: none are given.
        WorkloadError: they cannot be read, or there are none of the class.
    """
    text = arguments.lengths
    if text is None:
        raise CliError("lengths: none are given; add --lengths PROMPT,OUTPUT, a file, or a name such as sharegpt")
    parts = text.split(",")
    if len(parts) == 2 and all(part.strip().isdigit() for part in parts):  # noqa: PLR2004 - prompt and output
        table = fixed(int(parts[0]), int(parts[1]))
    elif Path(text).exists():
        table = read_lengths(Path(text))
    else:
        table = draw_log_normal(length_fit(text), DRAWN_LENGTHS, Random(text), stratified=True)  # noqa: S311 - no secret
    return only(table, arguments.length_class) if arguments.length_class else table


def offer_of(text: str) -> Offer:
    """An accelerator with its price a GPU and hour: NAME or NAME@PRICE.

    Raises:
        CliError: the price is no number.
        PerfError: the accelerator is not known.
    """
    name, _, price = text.partition("@")
    try:
        price_per_hour = float(price) if price else 0.0
    except ValueError:
        raise CliError(f"price: {price!r} of {name} is no number; write {name}@PRICE, of one GPU and hour") from None
    if not 0 <= price_per_hour < math.inf:
        raise CliError(f"price: {price_per_hour:g} of {name} cannot be; give 0 or more, of one GPU and hour")
    return Offer(accelerator=accelerator(name), price_per_hour=price_per_hour)


def latency_of(text: str) -> Latency:
    """Observed mean TTFT and TPOT in ms: TTFT,TPOT.

    Raises:
        CliError: they are not two numbers.
    """
    numbers = _numbers(text)
    if len(numbers) != 2:  # noqa: PLR2004 - TTFT and TPOT
        raise CliError(f"calibrate: {text!r} is not TTFT,TPOT; give the observed means in ms, such as 350,28")
    return Latency(numbers[0], numbers[1])


def _traced(arguments: argparse.Namespace, seed: int) -> Workload:
    unused = {"--lengths": arguments.lengths, "--length-class": arguments.length_class}
    for flag, value in unused.items():
        if value is not None:
            raise CliError(f"{flag}: the trace has its own lengths; leave one of the two out")
    if arguments.arrivals != "poisson":
        raise CliError("--arrivals: the trace has its own; leave one of the two out")
    workload = read_trace(arguments.trace, Random(f"trace {seed}"))  # noqa: S311 - no secret
    if arguments.from_s is not None or arguments.until_s is not None:
        until_ms = math.inf if arguments.until_s is None else arguments.until_s * 1000.0
        workload = cut_time(workload, (arguments.from_s or 0.0) * 1000.0, until_ms)
    if arguments.repeat is not None:
        workload = repeat(workload, arguments.repeat)
    if arguments.count is not None:
        workload = first(workload, arguments.count)
    if arguments.rate is None:
        return workload
    if math.isinf(workload.rate_per_s()):
        raise CliError("rate: all requests of the trace come at once, so its rate cannot be scaled; leave --rate out")
    return scale_rate(workload, arguments.rate / workload.rate_per_s())


def _law(text: str) -> tuple[float, Bursts | None]:
    """The coefficient of variation of the gaps, and the bursts if there are any."""
    name, _, rest = text.partition(":")
    numbers = _numbers(rest) if rest else []
    if name == "poisson" and not rest:
        return 1.0, None
    if name == "gamma" and len(numbers) == 1:
        return numbers[0], None
    if name == "bursts" and len(numbers) == 3:  # noqa: PLR2004 - period, share, factor
        return 1.0, Bursts(period_ms=numbers[0] * 1000.0, share=numbers[1], factor=numbers[2])
    raise CliError(
        f"arrivals: {text!r} is no law; give poisson, gamma:VARIATION (such as gamma:2), or "
        "bursts:PERIOD_S,SHARE,FACTOR (such as bursts:60,0.1,5)"
    )


def _slo_class(text: str) -> SloClass:
    name, separator, rest = text.partition("=")
    numbers = _numbers(rest)
    if not name or not separator or len(numbers) not in (2, 3):
        raise CliError(f"slo: {text!r} is not NAME=TTFT,TPOT[,SHARE]; give ms, such as chat=500,50")
    share = numbers[2] if len(numbers) == 3 else 1.0  # noqa: PLR2004 - the share comes third
    return SloClass(slo=Slo(name=name, ttft_ms=numbers[0], tpot_ms=numbers[1]), share=share)


def _numbers(text: str) -> list[float]:
    """The numbers of a list with commas; none where one of them is no number."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _deflection(name: str | None) -> DeflectionSettings | None:
    if name is None:
        return None
    if name == "kairos":
        return DeflectionSettings(rule=PrefillRule.KAIROS_EQ1, alpha=ALPHA_KAIROS)
    return DeflectionSettings(rule=PrefillRule.OURS, alpha=ALPHA)


def _kv_cache_dtype(name: str) -> Dtype | None:
    """vLLM's `kv-cache-dtype`; `auto` is the model's own."""
    if name == "auto":
        return None
    if name.startswith("fp8"):
        return Dtype.FP8
    if name in set(Dtype):
        return Dtype(name)
    raise CliError(
        f"spec.engine.args: kv-cache-dtype {name!r} is not known; give --kv-dtype, one of {', '.join(Dtype)}"
    )
