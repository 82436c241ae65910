"""The way of KV between workers, and the names of accelerators."""

from __future__ import annotations

import pytest

from headrace_core.perf.accelerators import ACCELERATORS, accelerator
from headrace_core.perf.errors import PerfError
from headrace_core.perf.hf_config import known
from headrace_core.perf.transfer import NVLINK_300, ROCE_200, Link, transfer_ms, wire_bytes


@pytest.mark.parametrize(
    ("link", "links", "expected_ms"),
    [
        (ROCE_200, 1, 0.05 + 1024 * 327_680 / 25e6),
        (ROCE_200, 4, 0.05 + 1024 * 327_680 / 100e6),
        (NVLINK_300, 1, 0.01 + 1024 * 327_680 / 300e6),
    ],
    ids=["one NIC: 13.5 ms", "four NICs", "NVLink: 1.1 ms"],
)
def test_a_prompt_of_llama_2_70b_on_its_way(link: Link, links: int, expected_ms: float) -> None:
    wanted = wire_bytes(known("meta-llama/Llama-2-70b-hf"), 1024)
    assert transfer_ms(wanted, link, links) == pytest.approx(expected_ms)


def test_copies_travel_too() -> None:
    grouped, latent = known("meta-llama/Llama-2-70b-hf"), known("deepseek-ai/DeepSeek-V3")
    assert wire_bytes(grouped, 100, 8) == wire_bytes(grouped, 100)
    assert wire_bytes(grouped, 100, 16) == 2 * wire_bytes(grouped, 100)
    assert wire_bytes(latent, 100, 8) == 8 * wire_bytes(latent, 100)


def test_a_link_that_cannot_be_is_refused() -> None:
    with pytest.raises(PerfError, match="bandwidth above 0"):
        transfer_ms(1.0, Link(0.0, 0.0))
    with pytest.raises(PerfError, match="links"):
        transfer_ms(1.0, ROCE_200, 0)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100", "A100-80G"),
        ("a100-80gb", "A100-80G"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA-A100-80GB-PCIe", "A100-PCIE-80G"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM"),
        ("H100 PCIe", "H100-PCIE"),
        ("NVIDIA-H200", "H200"),
        ("h200", "H200"),
        ("NVIDIA-B200", "B200"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-A10G", "A10G"),
        ("Tesla-T4", "T4"),
        ("Tesla-V100-SXM2-16GB", "V100-16G"),
        ("AMD-Instinct-MI300X-OAM", "MI300X"),
    ],
)
def test_accelerators_by_the_names_they_go_by(spelling: str, name: str) -> None:
    assert accelerator(spelling) is ACCELERATORS[name]


@pytest.mark.parametrize(("typo", "near"), [("H10O-SXM", "H100-SXM"), ("H20O", "H200"), ("L40", "L40S")])
def test_an_unknown_accelerator_is_told_the_nearest(typo: str, near: str) -> None:
    with pytest.raises(PerfError, match=rf"accelerator: '{typo}' is not known; the nearest are") as caught:
        accelerator(typo)
    named = str(caught.value).rpartition(" are ")[2].split(", ")
    assert near in named
    assert len(named) <= 3


def test_a_name_like_none_is_told_all() -> None:
    with pytest.raises(PerfError, match=r"A100-80G.*MI300X"):
        accelerator("###")


def test_datasheets_are_plausible() -> None:
    for one in ACCELERATORS.values():
        ridge = one.flops_per_ms / one.hbm_bytes_per_ms
        assert 100 < ridge < 450, one.name
        assert one.flops_8bit_per_ms in (one.flops_per_ms, pytest.approx(2 * one.flops_per_ms, rel=0.02)), one.name
        assert one.nic_bytes_per_ms <= one.link_bytes_per_ms or one.link_bytes_per_ms <= 64e6, one.name
        assert 14 << 30 < one.memory_bytes < 260 << 30, one.name
