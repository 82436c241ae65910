"""Asks a worker itself in which role it is, past all labels."""

from __future__ import annotations

import httpx

from e2e.deployed import Deployed, Worker
from headrace_core.api.wire import PATH_ROLE, RoleState


def role_and_epoch(deployed: Deployed, worker: Worker) -> tuple[str, int]:
    """What the worker says of itself."""
    headers = {"Authorization": f"Bearer {deployed.token()}"}
    answer = httpx.get(f"{deployed.worker_url(worker)}{PATH_ROLE}", headers=headers, trust_env=False)
    state = RoleState.model_validate_json(answer.raise_for_status().content)
    return state.role.value, state.epoch
