"""Decode workers and requests for the tests of the dispatcher."""

from __future__ import annotations

from headrace_core.policy.dispatch import DecodeLoad, Request

LIGHT = Request(prompt_tokens=100, bound_tokens=60, heavy=False)  # 10 blocks of 16
HEAVY = Request(prompt_tokens=100, bound_tokens=600, heavy=True)  # 44 blocks of 16


def worker(
    pod: str, *, free: int = 100, heavy: int = 0, residents: int = 0, block: int = 16, accepting: bool = True
) -> DecodeLoad:
    """A decode worker."""
    return DecodeLoad(
        pod=pod,
        address=f"{pod}:8000",
        epoch=0,
        accepting=accepting,
        block_size=block,
        free_kv_blocks=free,
        heavy=heavy,
        residents=residents,
    )
