"""Times the way of a request's KV from one worker to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from headrace_core.perf.errors import PerfError
from headrace_core.perf.memory import kv_bytes, kv_copies
from headrace_core.perf.shape import ModelShape


@final
@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two GPUs."""

    bytes_per_ms: float
    latency_ms: float
    """Once a transfer, from the wish to the first byte."""


NVLINK_300: Final = Link(300e6, 0.01)
"""Within a server, 300 GB/s: the faster link that TetriInfer emulates (arXiv 2401.11181, section 5.1)."""
ROCE_200: Final = Link(25e6, 0.05)
"""Between servers, 200 Gb/s with RDMA: the slower one there."""


def wire_bytes(shape: ModelShape, tokens: int, decode_tensor: int = 1) -> float:
    """Bytes that a request's KV takes on its way: each GPU of the decode worker pulls what it will hold, copies too."""
    return kv_bytes(shape, tokens) * kv_copies(shape, decode_tensor)


def transfer_ms(wanted_bytes: float, link: Link, links: int = 1) -> float:
    """Time for `wanted_bytes` spread over `links` equal links. A worker has one a GPU; the side with fewer counts.

    Raises:
        PerfError: a link without bandwidth, or no link.
    """
    if link.bytes_per_ms <= 0:
        raise PerfError("bytes_per_ms: a link needs a bandwidth above 0")
    if links < 1:
        raise PerfError("links: at least one is needed")
    return link.latency_ms + wanted_bytes / (link.bytes_per_ms * links)
