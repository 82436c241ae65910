"""Names the accelerators that are known, with what their makers' datasheets promise: peaks, memory, links."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Final, final

from headrace_core.perf.errors import PerfError

_GB_PER_S: Final = 1e6
"""Bytes a millisecond."""
_TERA_PER_S: Final = 1e9
"""Operations a millisecond."""
_MIB: Final = 1 << 20
_NIC_GB_PER_S: Final = 25.0
"""200 Gb/s, one NIC a GPU, where a server of that class has no other usual one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU. Peaks are dense (without sparsity), links one direction."""

    name: str
    flops_per_ms: float
    """16-bit matrix products: bfloat16, or float16 where the part has no bfloat16."""
    flops_8bit_per_ms: float
    """8-bit floating point. Equal to `flops_per_ms` where the part has none: weights are then widened first."""
    hbm_bytes_per_ms: float
    memory_bytes: int
    """What the driver shows, a little under the datasheet's round number."""
    link_bytes_per_ms: float
    """Between GPUs of one server: NVLink, Infinity Fabric or PCIe."""
    nic_bytes_per_ms: float = _NIC_GB_PER_S * _GB_PER_S
    """To another server, a usual one."""


def _gpu(name: str, tflops: tuple[float, float], *, hbm_gb_s: float, mib: int, link_gb_s: float) -> Accelerator:
    return Accelerator(
        name=name,
        flops_per_ms=tflops[0] * _TERA_PER_S,
        flops_8bit_per_ms=tflops[1] * _TERA_PER_S,
        hbm_bytes_per_ms=hbm_gb_s * _GB_PER_S,
        memory_bytes=mib * _MIB,
        link_bytes_per_ms=link_gb_s * _GB_PER_S,
    )


ACCELERATORS: Final = {
    one.name: one
    for one in (
        # TFLOP/s with 16 and with 8 bits
        _gpu("V100-16G", (125, 125), hbm_gb_s=900, mib=16_144, link_gb_s=150),
        _gpu("V100-32G", (125, 125), hbm_gb_s=900, mib=32_494, link_gb_s=150),
        _gpu("T4", (65, 65), hbm_gb_s=300, mib=14_915, link_gb_s=16),
        _gpu("A10", (125, 125), hbm_gb_s=600, mib=22_516, link_gb_s=32),
        _gpu("A10G", (70, 70), hbm_gb_s=600, mib=22_516, link_gb_s=32),
        _gpu("A100-40G", (312, 312), hbm_gb_s=1_555, mib=40_326, link_gb_s=300),
        _gpu("A100-80G", (312, 312), hbm_gb_s=2_039, mib=81_050, link_gb_s=300),
        _gpu("A100-PCIE-80G", (312, 312), hbm_gb_s=1_935, mib=81_050, link_gb_s=32),
        _gpu("L4", (121, 242), hbm_gb_s=300, mib=22_563, link_gb_s=32),
        _gpu("L40S", (362, 733), hbm_gb_s=864, mib=45_458, link_gb_s=32),
        _gpu("H100-SXM", (989, 1_979), hbm_gb_s=3_350, mib=81_004, link_gb_s=450),
        _gpu("H100-PCIE", (756, 1_513), hbm_gb_s=2_000, mib=81_004, link_gb_s=64),
        _gpu("H100-NVL", (835, 1_671), hbm_gb_s=3_900, mib=95_307, link_gb_s=300),
        _gpu("H200", (989, 1_979), hbm_gb_s=4_800, mib=143_156, link_gb_s=450),
        _gpu("B200", (2_250, 4_500), hbm_gb_s=8_000, mib=182_642, link_gb_s=900),
        _gpu("MI300X", (1_307, 2_614), hbm_gb_s=5_300, mib=196_592, link_gb_s=448),
        _gpu("MI325X", (1_307, 2_614), hbm_gb_s=6_000, mib=262_128, link_gb_s=448),
    )
}
"""By name. Sources: the makers' datasheets (NVIDIA V100, T4, A10, A10G on AWS G5, A100, L4, L40S, H100, H200, B200 HGX;
AMD MI300X, MI325X)."""

_ALIASES: Final = {
    "a100": "A100-80G",
    "a10080gb": "A100-80G",
    "a10040gb": "A100-40G",
    "a100sxm480gb": "A100-80G",
    "a100sxm440gb": "A100-40G",
    "a10080gbpcie": "A100-PCIE-80G",
    "a100pcie80gb": "A100-PCIE-80G",
    "h100": "H100-SXM",
    "h10080gb": "H100-SXM",
    "h10080gbhbm3": "H100-SXM",
    "h100sxm5": "H100-SXM",
    "h200sxm": "H200",
    "v100": "V100-32G",
    "v100sxm216gb": "V100-16G",
    "v100sxm232gb": "V100-32G",
    "mi300xoam": "MI300X",
}
"""Other spellings, the `nvidia.com/gpu.product` labels among them, as `_key` leaves them."""


@functools.lru_cache(maxsize=256)
def accelerator(name: str) -> Accelerator:
    """The accelerator of a name, in any case, with or without the maker's name in front.

    Raises:
        PerfError: no such accelerator is known; the message names the nearest.
    """
    key = _key(name)
    by_key = {_key(known): known for known in ACCELERATORS}
    found = by_key.get(key) or _ALIASES.get(key)
    if found is not None:
        return ACCELERATORS[found]
    near = difflib.get_close_matches(key, list(by_key), n=3, cutoff=0.4)
    names = [by_key[one] for one in near] or sorted(ACCELERATORS)
    raise PerfError(f"accelerator: {name!r} is not known; the nearest are {', '.join(names)}")


def _key(name: str) -> str:
    lowered = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|tesla|amdinstinct|amd|instinct)+", "", lowered)
