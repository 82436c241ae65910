"""Turns `--prefill 2:tp4 --decode 4:H100-SXM` or an InferenceCluster's pools into the scenario to simulate."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from headrace_cli.cluster_file import accelerator_name, engine_settings, model_name, read_cluster
from headrace_cli.errors import CliError
from headrace_cli.flags import POOL_FORM
from headrace_cli.inputs import (
    SloClass,
    engine_of,
    latency_of,
    model_of,
    offer_of,
    rules_of,
    slo_classes_of,
    workload_of,
)
from headrace_core.api.resources import InferenceCluster
from headrace_core.api.spec import PoolRole
from headrace_core.planner.question import Rules
from headrace_core.planner.space import Nodes, Shape, Sources, Space, network_between, shape_of
from headrace_core.policy.admission import Admission
from headrace_core.sim.calibration import calibrate_to, corrected_scenario
from headrace_core.sim.report import ProfileUse
from headrace_core.sim.reporting import profile_use
from headrace_core.sim.scenario import Duty, Network, Pool, Scenario
from headrace_core.sim.workload import Workload

GB_PER_S: Final = 1e6
"""Bytes a ms."""
DUTY_FLAGS: Final = {"prefill": Duty.PREFILL, "decode": Duty.DECODE, "colocated": Duty.COLOCATED}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWish:
    """A pool as the user describes it."""

    name: str
    duty: Duty
    workers: int
    tensor: int = 1
    pipeline: int = 1
    accelerator: str | None = None
    """NAME or NAME@PRICE; None: that of `--accelerator`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What `headrace simulate` simulates."""

    scenario: Scenario
    workload: Workload
    profiles: tuple[ProfileUse, ...]
    model: str


def run_of(arguments: argparse.Namespace) -> Run:
    """Everything that the flags and the cluster's file say, ready to simulate.

    Raises:
        CliError: flags are missing or contradict one another.
        ValueError: the core's own errors, see `inputs.user_errors`.
    """
    cluster = read_cluster(arguments.file) if arguments.file else None
    settings = engine_settings(cluster) if cluster else None
    model = model_of(arguments, model_name(cluster) if cluster else None, settings)
    wishes = pool_wishes(arguments, cluster)
    classes = slo_classes_of(arguments)
    workload = workload_of(arguments, classes, arguments.seed)
    context = math.ceil((sum(workload.prompt_tokens) + sum(workload.output_tokens)) / len(workload))
    engine = engine_of(arguments, settings, context)
    nodes = Nodes(gpus=arguments.gpus_per_node, between_bytes_per_ms=_bandwidth(arguments.bandwidth))
    sources = Sources(own_profiles=tuple(arguments.profile))
    shapes = [
        shape_of(
            model,
            offer_of(_accelerator(wish, arguments.accelerator)),
            (wish.tensor, wish.pipeline),
            nodes=nodes,
            engine=engine,
            sources=sources,
        )
        for wish in wishes
    ]
    space = Space(model=model, nodes=nodes, shapes=tuple(shapes), refused=())
    network = _network(wishes, shapes, space, same_node=arguments.same_node)
    scenario = _scenario(arguments, rules_of(arguments, settings), _pools(wishes, shapes), network, classes)
    check_floors(scenario, workload, shapes)
    correction = None
    if arguments.calibrate:
        correction = calibrate_to(latency_of(arguments.calibrate), scenario, workload)
        scenario = corrected_scenario(scenario, correction)
    uses = (profile_use(wish.name, shape.profile, correction) for wish, shape in zip(wishes, shapes, strict=True))
    return Run(scenario=scenario, workload=workload, profiles=tuple(uses), model=model.name)


def _pools(wishes: Sequence[PoolWish], shapes: Sequence[Shape]) -> tuple[Pool, ...]:
    return tuple(
        Pool(name=wish.name, duty=wish.duty, instance=shape.instance, workers=wish.workers)
        for wish, shape in zip(wishes, shapes, strict=True)
    )


def _scenario(
    arguments: argparse.Namespace,
    rules: Rules,
    pools: tuple[Pool, ...],
    network: Network | None,
    classes: tuple[SloClass, ...],
) -> Scenario:
    decode = rules.decode
    if arguments.admission is None and any(pool.duty is Duty.COLOCATED for pool in pools):
        decode = replace(decode, admission=Admission.GREEDY)
    return Scenario(
        pools=pools,
        slos=tuple(one.slo for one in classes),
        network=network,
        prefill=rules.prefill,
        decode=decode,
        colocation=arguments.colocation,
        dispatching=rules.dispatching,
        prediction=rules.prediction,
        deflection=rules.deflection,
        prefix_cache_tokens=arguments.prefix_cache_tokens,
        seed=arguments.seed,
    )


def pool_wishes(arguments: argparse.Namespace, cluster: InferenceCluster | None) -> list[PoolWish]:
    """The pools of the flags; for a duty that no flag names, those of the cluster's file.

    Raises:
        CliError: a pool cannot be read, or there are none.
    """
    given = {duty: getattr(arguments, flag) for flag, duty in DUTY_FLAGS.items()}
    wishes: list[PoolWish] = []
    for duty, texts in given.items():
        for number, text in enumerate(texts):
            name = duty.lower() if len(texts) == 1 else f"{duty.lower()}-{number}"
            wishes.append(pool_wish(text, name, duty))
    if cluster is not None and not given[Duty.COLOCATED]:
        for pool in cluster.spec.pools:
            duty = Duty.PREFILL if pool.role is PoolRole.PREFILL else Duty.DECODE
            if given[duty]:
                continue
            wishes.append(
                PoolWish(
                    name=pool.name,
                    duty=duty,
                    workers=pool.replicas,
                    tensor=pool.parallelism.tensor,
                    pipeline=pool.parallelism.pipeline,
                    accelerator=accelerator_name(pool),
                )
            )
    if not wishes:
        raise CliError("workers: none are given; add --prefill N --decode N, --colocated N, or -f FILE")
    return wishes


def pool_wish(text: str, name: str, duty: Duty) -> PoolWish:
    """A pool from POOL_FORM.

    Raises:
        CliError: it does not have that form.
    """
    count, *parts = text.split(":")
    degrees = {"tp": 1, "pp": 1}
    accelerator: str | None = None
    for part in parts:
        kind = part[:2].lower()
        if kind in degrees and part[2:].isdigit():
            degrees[kind] = int(part[2:])
        elif part and accelerator is None:
            accelerator = part
        else:
            raise CliError(f"--{name}: {part!r} of {text!r} is not understood; give {POOL_FORM}, such as 2:tp4")
    if not count.isdigit():
        raise CliError(f"--{name}: {count!r} of {text!r} is no number of workers; give {POOL_FORM}, such as 2:tp4")
    return PoolWish(
        name=name,
        duty=duty,
        workers=int(count),
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        accelerator=accelerator,
    )


def check_floors(scenario: Scenario, workload: Workload, shapes: Sequence[Shape]) -> None:
    """Refuses an SLO that the shortest request alone on a worker misses.

    Raises:
        CliError: TTFT or TPOT is under what every shape takes.
    """
    shortest = min(workload.prompt_tokens)
    pairs = list(zip(scenario.pools, shapes, strict=True))
    prefill = [shape for pool, shape in pairs if pool.duty is not Duty.DECODE]
    decode = [shape for pool, shape in pairs if pool.duty is not Duty.PREFILL]
    if not prefill or not decode:
        return  # the scenario says what is missing
    pass_ms, first = min(
        ((one.instance.costs.prefill_ms(shortest, float(shortest) ** 2), one) for one in prefill),
        key=lambda pair: pair[0],
    )
    step_ms, second = min(
        ((one.instance.costs.decode_ms(1, shortest + 1), one) for one in decode), key=lambda pair: pair[0]
    )
    for slo in scenario.slos:
        if slo.tpot_ms < step_ms:
            raise CliError(
                f"slo: TPOT {slo.tpot_ms:g} ms is under the {step_ms:.3g} ms that one decode step takes on "
                f"{second.name}; raise it, or take a faster shape or accelerator"
            )
        if slo.ttft_ms < pass_ms:
            raise CliError(
                f"slo: TTFT {slo.ttft_ms:g} ms is under the {pass_ms:.3g} ms that the shortest prompt ({shortest} "
                f"tokens) takes on {first.name}; raise it, or take a faster shape or accelerator"
            )


def _accelerator(wish: PoolWish, default: str | None) -> str:
    name = wish.accelerator or default
    if name is None:
        raise CliError(
            f"accelerator: pool {wish.name} names none; add --accelerator NAME[@PRICE], or a nodeSelector with "
            "nvidia.com/gpu.product to its template"
        )
    return name


def _network(wishes: Sequence[PoolWish], shapes: Sequence[Shape], space: Space, *, same_node: bool) -> Network | None:
    """One network for all: the slowest pair of a prefill and a decode shape."""
    sides = {duty: [shape for wish, shape in zip(wishes, shapes, strict=True) if wish.duty is duty] for duty in Duty}
    pairs = [
        network_between(space, prefill, decode, same_node=same_node)
        for prefill in sides[Duty.PREFILL]
        for decode in sides[Duty.DECODE]
    ]
    return max(pairs, key=lambda one: one.kv_bytes_per_token / one.bytes_per_ms, default=None)


def _bandwidth(gb_per_s: float | None) -> float | None:
    if gb_per_s is None:
        return None
    if not 0 < gb_per_s < math.inf:
        raise CliError(f"bandwidth: {gb_per_s:g} GB/s cannot be; give a number above 0")
    return gb_per_s * GB_PER_S
