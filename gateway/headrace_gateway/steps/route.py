"""Chooses the prefill worker: the least loaded (TetriInfer's global scheduler, arXiv 2401.11181, section 3.2).

The decode worker is not chosen here: the prefill worker's dispatcher does that when the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from headrace_core.api.names import Role
from headrace_core.policy.routing import load_key
from headrace_gateway.registry import Standing, WorkerView


class RouteReason(StrEnum):
    """Why this worker, or why none."""

    LEAST_LOADED = "least_loaded"
    ONLY_SUSPECT = "only_suspect"
    """Nobody else is left but suspect workers, or those that have already failed this request."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_DECODE_WORKER = "no_decode_worker"
    """Nobody could take the KV: computing it would be work for nothing."""


@dataclass(frozen=True, slots=True)
class Route:
    """The choice; no worker where nobody can take the request now."""

    worker: WorkerView | None
    reason: RouteReason


_NO_PREFILL = Route(None, RouteReason.NO_PREFILL_WORKER)
_NO_DECODE = Route(None, RouteReason.NO_DECODE_WORKER)


def choose_prefill(workers: Iterable[WorkerView], failed: frozenset[str] = frozenset()) -> Route:
    """The accepting prefill worker with the fewest queued prefill tokens, then running tokens, then by name.

    `failed` are the addresses of workers that have failed this request: they come last, like suspect ones.
    """
    accepting = [worker for worker in workers if worker.can_take]
    prefill = [worker for worker in accepting if worker.role is Role.PREFILL]
    if not prefill:
        return _NO_PREFILL
    if not any(worker.role is Role.DECODE for worker in accepting):
        return _NO_DECODE
    best = min(prefill, key=lambda worker: (_is_second_choice(worker, failed), *load_key(worker)))
    second = _is_second_choice(best, failed)
    return Route(best, RouteReason.ONLY_SUSPECT if second else RouteReason.LEAST_LOADED)


def explain(route: Route) -> str:
    """The choice in words, for an error or a log."""
    match route.reason:
        case RouteReason.NO_PREFILL_WORKER:
            return "no prefill worker is accepting requests"
        case RouteReason.NO_DECODE_WORKER:
            return "no decode worker is accepting requests"
    worker = route.worker
    return f"{worker.pod if worker else 'nobody'}: {route.reason}"


def _is_second_choice(worker: WorkerView, failed: frozenset[str]) -> bool:
    return worker.standing is Standing.SUSPECT or worker.address in failed
