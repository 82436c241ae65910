"""Turns the flags of `headrace plan` and an InferenceCluster into the question, the shapes and what is asked beside."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_cli.cluster_file import accelerator_name, engine_settings, model_name, read_cluster
from headrace_cli.errors import CliError
from headrace_cli.inputs import (
    SloClass,
    engine_of,
    latency_of,
    lengths_of,
    model_of,
    offer_of,
    rules_of,
    slo_classes_of,
    workload_of,
)
from headrace_core.api.resources import InferenceCluster
from headrace_core.api.spec import Pool, PoolRole
from headrace_core.api.values import duration_s
from headrace_core.perf.fit import Correction, corrected
from headrace_core.perf.memory import Engine
from headrace_core.planner.answer import Extras
from headrace_core.planner.deployment import Deployment, Side, scenario_of
from headrace_core.planner.headroom import Surprise
from headrace_core.planner.question import DISAGGREGATED, Layout, Question
from headrace_core.planner.space import Nodes, Offer, Shape, Sources, Space, shape_of, space_of
from headrace_core.sim.calibration import calibrate_to
from headrace_core.sim.lengths import Lengths
from headrace_core.sim.traffic import Traffic, draw_traffic
from headrace_core.sim.workload import Workload

GB_PER_S: Final = 1e6
"""Bytes a ms."""
PEAK_WINDOW_S: Final = 60.0
"""Of which the peak rate of a trace is taken, if no schedule names a window."""
LEAST_IN_WINDOW: Final = 100
"""Arrivals of the busiest window from which its gaps tell how much they vary."""
CALIBRATION_REQUESTS: Final = 2000
_LAYOUTS: Final = {"apart": (Layout.APART,), "paired": (Layout.PAIRED,), "both": DISAGGREGATED}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """All that a plan is made of."""

    question: Question
    space: Space
    extras: Extras


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Arriving:
    """What arrives, and how fast."""

    traffic: Traffic
    rate_per_s: float | None
    rates: tuple[tuple[Surprise, float], ...] = ()
    trace: Workload | None = None


def planning_of(arguments: argparse.Namespace) -> Planning:
    """Everything that flags and the cluster's file say.

    Raises:
        CliError: flags are missing or contradict one another.
        ValueError: the core's own errors, see `inputs.user_errors`.
    """
    cluster = read_cluster(arguments.file) if arguments.file else None
    settings = engine_settings(cluster) if cluster else None
    model = model_of(arguments, model_name(cluster) if cluster else None, settings)
    classes = slo_classes_of(arguments)
    arriving = _arriving(arguments, classes)
    question = Question(
        traffic=arriving.traffic,
        slos=tuple(one.slo for one in classes),
        target=arguments.target,
        rate_per_s=arriving.rate_per_s,
        gpus=arguments.gpus,
        layouts=_LAYOUTS[arguments.layout],
        rules=rules_of(arguments, settings),
    )
    engine = engine_of(arguments, settings, math.ceil(question.work.prompt_tokens + question.work.decode_tokens + 1))
    offers = _offers(arguments, cluster)
    nodes = _nodes(arguments)
    sources = Sources(own_profiles=tuple(arguments.profile), estimates_beside_measured=arguments.estimates)
    space = space_of(model, offers, nodes, engine, sources)
    current = _current(cluster, space, engine, sources) if cluster else None
    if arguments.current and current is None:
        raise CliError("--current: no deployment is known; add -f FILE with an InferenceCluster")
    if arguments.calibrate:
        space, current = _calibrated(arguments, question, space, current)
    extras = Extras(
        current=current,
        pools=cluster.spec.pools if cluster else (),
        rates=arriving.rates,
        trace=arriving.trace if arguments.schedule else None,
        window_s=_window_s(arguments) or PEAK_WINDOW_S,
        only_current=arguments.current,
    )
    return Planning(question=question, space=space, extras=extras)


# --- traffic ----------------------------------------------------------------------------------------------------------


def _arriving(arguments: argparse.Namespace, classes: tuple[SloClass, ...]) -> _Arriving:
    if arguments.trace is not None:
        return _traced(arguments, classes)
    if arguments.schedule is not None:
        raise CliError("--schedule: there is no time to schedule over; add --trace FILE")
    name, _, rest = arguments.arrivals.partition(":")
    if name == "gamma":
        try:
            variation = float(rest)
        except ValueError:
            raise CliError(f"arrivals: {arguments.arrivals!r} is no law; give gamma:VARIATION, as gamma:2") from None
    elif arguments.arrivals == "poisson":
        variation = 1.0
    else:
        raise CliError(
            f"arrivals: {arguments.arrivals!r} cannot be planned for; give poisson, gamma:VARIATION or a --trace"
        )
    traffic = Traffic(
        lengths=lengths_of(arguments), variation=variation, class_shares=tuple(one.share for one in classes)
    )
    return _Arriving(traffic=traffic, rate_per_s=arguments.rate)


def _traced(arguments: argparse.Namespace, classes: tuple[SloClass, ...]) -> _Arriving:
    """The trace's own lengths and classes, and the gaps of its busiest window."""
    trace = workload_of(arguments, classes, arguments.seed)
    mean_per_s = trace.rate_per_s()
    if not 0 < mean_per_s < math.inf:
        raise CliError("trace: all its requests come at once, so it has no rate; give --lengths FILE and --rate")
    busiest = _busiest(trace, (_window_s(arguments) or PEAK_WINDOW_S) * 1000.0)
    shares = tuple(one.share for one in classes)
    if trace.slo_class:
        if max(trace.slo_class) >= len(classes):
            raise CliError(
                f"slo: the trace has class {max(trace.slo_class)}, and {len(classes)} are given; add one --slo each"
            )
        shares = tuple(float(trace.slo_class.count(number)) for number in range(len(classes)))
    traffic = Traffic(
        lengths=Lengths(trace.prompt_tokens, trace.output_tokens, trace.source),
        variation=busiest.variation,
        class_shares=shares,
    )
    peak = arguments.at == "peak"
    return _Arriving(
        traffic=traffic,
        rate_per_s=busiest.rate_per_s if peak else mean_per_s,
        rates=((Surprise.MEAN, mean_per_s),) if peak else ((Surprise.PEAK, busiest.rate_per_s),),
        trace=trace,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Busiest:
    rate_per_s: float
    variation: float


def _busiest(trace: Workload, window_ms: float) -> _Busiest:
    """Rate and variation of the gaps in the window with the most arrivals. A trace that is shorter is one window."""
    times = trace.arrival_ms
    span_ms = times[-1] - times[0]
    if span_ms <= window_ms:
        return _Busiest(rate_per_s=trace.rate_per_s(), variation=_variation(times))
    best, first, row = 0, 0, 0
    for last, time_ms in enumerate(times):
        while times[first] <= time_ms - window_ms:
            first += 1
        if last - first + 1 > best:
            best, row = last - first + 1, first
    return _Busiest(rate_per_s=best * 1000.0 / window_ms, variation=_variation(times[row : row + best]))


def _variation(times_ms: Sequence[float]) -> float:
    """Of the gaps; Poisson's where there are too few to tell."""
    gaps = [after - before for before, after in itertools.pairwise(times_ms)]
    if len(gaps) < LEAST_IN_WINDOW or not sum(gaps):
        return 1.0
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def _window_s(arguments: argparse.Namespace) -> float | None:
    if arguments.schedule is None:
        return None
    try:
        seconds = duration_s(arguments.schedule)
    except ValueError as error:
        raise CliError(f"--schedule: {error}") from error
    if seconds <= 0:
        raise CliError(f"--schedule: a window of {arguments.schedule} has no length; give one such as 15m")
    return seconds


# --- shapes -----------------------------------------------------------------------------------------------------------


def _offers(arguments: argparse.Namespace, cluster: InferenceCluster | None) -> list[Offer]:
    texts = list(arguments.accelerator)
    if not texts and cluster is not None:
        texts = sorted({name for pool in cluster.spec.pools if (name := accelerator_name(pool))})
    if not texts:
        raise CliError(
            "accelerator: none is given; add --accelerator NAME[:COUNT][@PRICE], or a nodeSelector with "
            "nvidia.com/gpu.product to the cluster's pools"
        )
    return [_offer(text) for text in texts]


def _offer(text: str) -> Offer:
    found = re.fullmatch(r"([^:@]+)(?::([^@]*))?(@.*)?", text)
    if found is None:
        raise CliError(f"accelerator: {text!r} is not NAME[:COUNT][@PRICE], such as A100-80G:32@1.8")
    name, count, price = found.groups()
    offer = offer_of(f"{name}{price or ''}")
    if count is None:
        return offer
    if not count.isdigit() or int(count) < 1:
        raise CliError(f"accelerator: {count!r} of {text} is no number of GPUs; give 1 or more, or leave it out")
    return replace(offer, gpus=int(count))


def _nodes(arguments: argparse.Namespace) -> Nodes:
    bandwidth = arguments.bandwidth
    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise CliError(f"bandwidth: {bandwidth:g} GB/s cannot be; give a number above 0")
    return Nodes(
        gpus=arguments.gpus_per_node,
        per_worker=arguments.nodes_per_worker,
        between_bytes_per_ms=None if bandwidth is None else bandwidth * GB_PER_S,
    )


def _current(cluster: InferenceCluster, space: Space, engine: Engine, sources: Sources) -> Deployment | None:
    """The pools of a cluster as one deployment; None where pools of a role differ in shape."""
    sides: list[Side] = []
    for role in (PoolRole.PREFILL, PoolRole.DECODE):
        pools = [pool for pool in cluster.spec.pools if pool.role is role]
        kinds = {(pool.parallelism.tensor, pool.parallelism.pipeline, accelerator_name(pool)) for pool in pools}
        if len(kinds) != 1:
            return None
        offer = _offer_of_pool(pools[0], space)
        if offer is None:
            return None
        degrees = (pools[0].parallelism.tensor, pools[0].parallelism.pipeline)
        shape = shape_of(space.model, offer, degrees, nodes=space.nodes, engine=engine, sources=sources)
        sides.append(Side(shape=shape, workers=sum(pool.replicas for pool in pools)))
    return Deployment(layout=Layout.APART, sides=tuple(sides), token_budget=engine.batched_tokens)


def _offer_of_pool(pool: Pool, space: Space) -> Offer | None:
    """The accelerator that a pool selects, or the only one that is offered."""
    offers = list(dict.fromkeys(shape.offer for shape in space.shapes))
    name = accelerator_name(pool)
    if name is None:
        return offers[0] if len(offers) == 1 else None
    selected = offer_of(name)
    return next((offer for offer in offers if offer.accelerator == selected.accelerator), selected)


def _calibrated(
    arguments: argparse.Namespace, question: Question, space: Space, current: Deployment | None
) -> tuple[Space, Deployment | None]:
    """Step times of all shapes times the factors that explain what the current deployment shows."""
    if current is None or question.rate_per_s is None:
        raise CliError(
            "--calibrate: it needs the deployment that showed these means, and its load: add -f FILE, and --rate or "
            "--trace"
        )
    workload = draw_traffic(question.traffic, CALIBRATION_REQUESTS, question.rate_per_s, arguments.seed)
    scenario = scenario_of(question, space, current)
    correction = calibrate_to(latency_of(arguments.calibrate), scenario, workload)
    shapes = tuple(_corrected(shape, correction) for shape in space.shapes)
    sides = tuple(replace(side, shape=_corrected(side.shape, correction)) for side in current.sides)
    return replace(space, shapes=shapes), replace(current, sides=sides)


def _corrected(shape: Shape, correction: Correction) -> Shape:
    costs = corrected(shape.instance.costs, correction)
    return replace(shape, instance=replace(shape.instance, costs=costs))
