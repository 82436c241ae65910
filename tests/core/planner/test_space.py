"""Which shapes there are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_core.perf.accelerators import accelerator
from headrace_core.perf.errors import PerfError
from headrace_core.perf.hf_config import known
from headrace_core.perf.memory import Engine, fit, kv_bytes_per_token
from headrace_core.perf.profiles import Kind
from headrace_core.planner.errors import PlanError
from headrace_core.planner.space import Nodes, Offer, Sources, degrees, network_between, space_of
from tests.core.planner.builders import A100, priced, shape, space

OPT_66B = known("facebook/opt-66b")
"""72 heads, 64 layers."""


def test_tensor_divides_the_heads_and_pipeline_the_layers() -> None:
    """Every pair within four nodes of eight GPUs, one by one."""
    literal = {
        (tensor, pipeline)
        for tensor in range(1, 9)
        for pipeline in range(1, 33)
        if 72 % tensor == 0
        and 64 % pipeline == 0
        # a stage's tensor group stays within a node, so a node holds whole groups only
        and pipeline <= 4 * (8 // tensor)
    }
    found = degrees(OPT_66B, Nodes(gpus=8, per_worker=4))
    assert set(found) == literal
    assert len(found) == len(literal)
    assert {(4, 1), (2, 2)} <= literal, "the paper's own answer for OPT-66B"


def test_shapes_hold_what_memory_says() -> None:
    found = space_of(OPT_66B, [A100], Nodes(), Engine(), Sources(estimates_beside_measured=True))
    for one in found.shapes:
        memory = fit(OPT_66B, A100.accelerator, one.tensor, one.pipeline, Engine())
        assert one.instance.kv_blocks == memory.kv_blocks
        assert one.instance.gpus == one.gpus == one.tensor * one.pipeline
    assert found.one("A100-80G", 1, 1) is None
    assert len(found.refused) == 1
    assert "does not fit on 1 A100-80G" in found.refused[0]


def test_measured_shapes_stand_alone_unless_asked_otherwise() -> None:
    only = space_of(OPT_66B, [A100], Nodes(), Engine())
    both = space_of(OPT_66B, [A100], Nodes(), Engine(), Sources(estimates_beside_measured=True))
    assert {one.profile.provenance.kind for one in only.shapes} == {Kind.MEASURED}
    assert Kind.ESTIMATED in {one.profile.provenance.kind for one in both.shapes}
    assert len(only.shapes) + len(only.refused) == len(both.shapes) + len(both.refused)
    h100 = space_of(OPT_66B, [Offer(accelerator=accelerator("H100-SXM"))], Nodes(), Engine())
    assert {one.profile.provenance.kind for one in h100.shapes} == {Kind.ESTIMATED}, (
        "nothing measured: estimates stand in"
    )


def test_accelerators_that_there_are_few_of_make_no_larger_shapes() -> None:
    few = Offer(accelerator=A100.accelerator, gpus=4)
    assert max(one.gpus for one in space_of(OPT_66B, [few], Nodes(), Engine()).shapes) == 4


@pytest.mark.parametrize(
    ("offers", "nodes", "message"),
    [
        ([], Nodes(), r"accelerator: none is offered"),
        ([A100, A100], Nodes(), r"A100-80G is offered twice"),
        ([priced("A100-80G", -1.0)], Nodes(), r"price: it must be 0 or more"),
        ([priced("A100-80G", 1.0), priced("L40S", 0.0)], Nodes(), r"price: .* L40S has none; write NAME@PRICE"),
        ([A100], Nodes(gpus=0), r"gpus-per-node"),
        ([A100], Nodes(between_bytes_per_ms=-1.0), r"bandwidth between nodes"),
        ([A100], Nodes(gpus=1), r"model: .*does not fit on 1 A100-80G.*raise --gpus-per-node"),
    ],
    ids=["none", "twice", "negative price", "one price", "no node", "bandwidth", "does not fit"],
)
def test_bad_input_names_field_and_remedy(offers: list[Offer], nodes: Nodes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        space_of(OPT_66B, offers, nodes, Engine())


def test_an_unknown_profile_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text("{}")
    with pytest.raises(PerfError, match="profile"):
        space_of(OPT_66B, [A100], Nodes(), Engine(), Sources(own_profiles=(path,)))


def own_profile() -> dict[str, Any]:
    return {
        "schema_version": 1,
        "source": "my own",
        "profiles": [
            {
                "model": "facebook/opt-66b",
                "accelerator": "A100-80G",
                "tensor": 4,
                "prefill": {"base_ms": 1.0, "token_ms": 1.0, "square_ms": 0.0},
                "decode": {"base_ms": 2.0, "kv_token_ms": 0.0, "request_ms": 0.0},
            }
        ],
    }


def test_own_profiles_come_first(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own_profile()))
    found = space_of(OPT_66B, [A100], Nodes(), Engine(), Sources(own_profiles=(path,))).one("A100-80G", 4, 1)
    assert found is not None
    assert (found.profile.provenance.source, found.instance.costs.decode_base_ms) == ("my own", 2.0)


def test_the_network_has_a_link_for_each_gpu_of_the_smaller_side() -> None:
    one = space(shape(4), shape(2, 4), nodes=Nodes(between_bytes_per_ms=1e6))
    prefill, decode = one.shapes
    between = network_between(one, prefill, decode, same_node=False)
    assert between.bytes_per_ms == 4e6
    assert between.kv_bytes_per_token == kv_bytes_per_token(one.model)
    within = network_between(one, prefill, decode, same_node=True)
    assert within.bytes_per_ms == 4 * A100.accelerator.link_bytes_per_ms
    usual = network_between(space(*one.shapes), prefill, decode, same_node=False)
    assert usual.bytes_per_ms == 4 * A100.accelerator.nic_bytes_per_ms
