"""Decides which shapes of a worker there are: accelerator, tensor and pipeline degree, where the model fits.

Tensor degrees divide the attention heads and stay within a node, pipeline degrees divide the layers (DistServe, OSDI
2024, Algorithms 1 and 2, and the degrees that its evaluation uses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headrace_core.perf.accelerators import Accelerator
from headrace_core.perf.errors import DoesNotFitError
from headrace_core.perf.memory import Engine, fit, kv_bytes_per_token, kv_copies
from headrace_core.perf.model import Placement
from headrace_core.perf.profiles import Kind, Profile, profile_for
from headrace_core.perf.shape import ModelShape
from headrace_core.planner.errors import PlanError
from headrace_core.sim.scenario import Instance, Network


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An accelerator that may be used."""

    accelerator: Accelerator
    price_per_hour: float = 0.0
    """Of one GPU, in any currency. 0: not known; GPUs are then counted instead."""
    gpus: int | None = None
    """How many there are. None: as many as it takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How GPUs stand together."""

    gpus: int = 8
    """Of one node."""
    per_worker: int = 1
    """Nodes that one worker may span. A worker of an InferenceCluster is one pod, so there it is 1."""
    between_bytes_per_ms: float | None = None
    """Between two nodes, for each GPU. None: what is usual for the accelerator."""
    latency_ms: float = 0.05


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of worker on which the model fits."""

    offer: Offer
    tensor: int
    pipeline: int
    instance: Instance
    profile: Profile

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.instance.gpus

    @property
    def name(self) -> str:
        """Accelerator and degrees, short."""
        return f"{self.offer.accelerator.name} tp{self.tensor} pp{self.pipeline}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The shapes that fit, and why the others do not."""

    model: ModelShape
    nodes: Nodes
    shapes: tuple[Shape, ...]
    refused: tuple[str, ...]

    def one(self, accelerator: str, tensor: int, pipeline: int) -> Shape | None:
        """The shape of these degrees; None where it does not fit or was not looked for."""
        for shape in self.shapes:
            if (shape.offer.accelerator.name, shape.tensor, shape.pipeline) == (accelerator, tensor, pipeline):
                return shape
        return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the step times of shapes come from."""

    own_profiles: tuple[Path, ...] = ()
    """Profile files that come before the shipped ones."""
    estimates_beside_measured: bool = False
    """Whether shapes that nobody measured compete with measured ones of the same model and accelerator. Estimates stand
    for a perfect engine, so that they win."""


def space_of(
    model: ModelShape, offers: Sequence[Offer], nodes: Nodes, engine: Engine, sources: Sources | None = None
) -> Space:
    """All shapes of a model on the accelerators offered.

    Raises:
        PlanError: no accelerator is offered, prices are mixed with none, or the model fits on none of the shapes.
        PerfError: a profile file of one's own is none.
    """
    _check(offers, nodes)
    sources = sources or Sources()
    shapes: list[Shape] = []
    refused: list[str] = []
    for offer in offers:
        for tensor, pipeline in degrees(model, nodes):
            if offer.gpus is not None and tensor * pipeline > offer.gpus:
                continue
            try:
                shapes.append(shape_of(model, offer, (tensor, pipeline), nodes=nodes, engine=engine, sources=sources))
            except DoesNotFitError as error:
                refused.append(str(error))
    if not shapes:
        why = refused[-1] if refused else f"{model.name} has no degrees that fit into {nodes.gpus} GPUs"
        raise PlanError(
            f"model: {why}; raise --gpus-per-node or --nodes-per-worker, or offer an accelerator with more memory"
        )
    if not sources.estimates_beside_measured:
        shapes, unmeasured = _measured_first(shapes)
        refused.extend(unmeasured)
    return Space(model=model, nodes=nodes, shapes=tuple(shapes), refused=tuple(refused))


def degrees(model: ModelShape, nodes: Nodes) -> list[tuple[int, int]]:
    """Tensor and pipeline degrees within `nodes`, fewest GPUs first."""
    found: list[tuple[int, int]] = []
    for tensor in range(1, min(nodes.gpus, model.heads) + 1):
        if model.heads % tensor:
            continue
        stages = nodes.per_worker * (nodes.gpus // tensor)
        found.extend((tensor, pipeline) for pipeline in range(1, stages + 1) if model.layers % pipeline == 0)
    return sorted(found, key=lambda pair: (pair[0] * pair[1], pair[0]))


def shape_of(
    model: ModelShape,
    offer: Offer,
    degree: tuple[int, int],
    *,
    nodes: Nodes,
    engine: Engine,
    sources: Sources,
) -> Shape:
    """One shape: its memory and its step times. `degree`: tensor, pipeline.

    Raises:
        DoesNotFitError: the model leaves no memory for KV.
        PerfError: degrees that no engine runs.
    """
    tensor, pipeline = degree
    memory = fit(model, offer.accelerator, tensor, pipeline, engine)
    placement = Placement(
        shape=model, accelerator=offer.accelerator, tensor=tensor, pipeline=pipeline, gpus_per_node=nodes.gpus
    )
    profile = profile_for(placement, own=sources.own_profiles)
    gpus = tensor * pipeline
    instance = Instance(
        costs=profile.costs,
        kv_blocks=memory.kv_blocks,
        block_tokens=engine.block_tokens,
        gpus=gpus,
        price_per_hour=offer.price_per_hour * gpus,
    )
    return Shape(offer=offer, tensor=tensor, pipeline=pipeline, instance=instance, profile=profile)


def network_between(space: Space, prefill: Shape, decode: Shape, *, same_node: bool) -> Network:
    """The way of the KV: each GPU of the side with fewer of them uses its link, and copies of KV heads travel too."""
    nodes, links = space.nodes, min(prefill.gpus, decode.gpus)
    ends = (prefill.offer.accelerator, decode.offer.accelerator)
    if same_node:
        link_bytes_per_ms = min(end.link_bytes_per_ms for end in ends)
    else:
        link_bytes_per_ms = nodes.between_bytes_per_ms or min(end.nic_bytes_per_ms for end in ends)
    return Network(
        kv_bytes_per_token=kv_bytes_per_token(space.model) * kv_copies(space.model, decode.tensor),
        bytes_per_ms=link_bytes_per_ms * links,
        latency_ms=nodes.latency_ms,
    )


def _measured_first(shapes: list[Shape]) -> tuple[list[Shape], list[str]]:
    """The shapes without the estimates for accelerators where others are measured, and a word on those left out."""
    measured = {shape.offer.accelerator.name for shape in shapes if shape.profile.provenance.kind is Kind.MEASURED}
    kept: list[Shape] = []
    left_out: list[str] = []
    for shape in shapes:
        if shape.profile.provenance.kind is Kind.ESTIMATED and shape.offer.accelerator.name in measured:
            left_out.append(
                f"{shape.name} is left out: nobody measured it, and others on this accelerator are measured"
            )
        else:
            kept.append(shape)
    return kept, left_out


def _check(offers: Sequence[Offer], nodes: Nodes) -> None:
    if not offers:
        raise PlanError("accelerator: none is offered; name at least one")
    names = [offer.accelerator.name for offer in offers]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"accelerator: {name} is offered twice; give it once, with its price and count")
    if any(offer.price_per_hour < 0 for offer in offers):
        raise PlanError("price: it must be 0 or more, for one GPU and hour")
    priced = sum(offer.price_per_hour > 0 for offer in offers)
    if len(offers) > 1 and priced < len(offers):
        missing = ", ".join(offer.accelerator.name for offer in offers if not offer.price_per_hour)
        raise PlanError(
            f"price: several accelerators are compared by price, and {missing} has none; write NAME@PRICE for each"
        )
    if nodes.gpus < 1 or nodes.per_worker < 1:
        raise PlanError("gpus-per-node and nodes-per-worker: write numbers of 1 or more")
    if nodes.between_bytes_per_ms is not None and not nodes.between_bytes_per_ms > 0:
        raise PlanError("bandwidth between nodes: it must be above 0")
