"""The messages between gateway, worker and operator, and the errors they answer with.

Bodies are JSON. Unknown fields are ignored on reading, so that two versions can talk during a rollout.
Times on the wire are durations (clocks of two nodes differ), in seconds unless the name says otherwise.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace_core.api.names import Role

PATH_ROLE = "/v1/pd_role"
PATH_LOAD = "/v1/load"
PATH_PEERS = "/v1/peers"
PATH_RELEASE = "/v1/release"

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Message(BaseModel):
    """Base of all messages: immutable, lenient towards fields of a later version."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Phase(StrEnum):
    """Where a worker stands between two roles (the phases of vLLM's draft, pull request 56134)."""

    READY = "ready"
    DRAINING = "draining"
    SWITCHING = "switching"
    ROLLING_BACK = "rolling_back"
    FAILED = "failed"


class RoleRequest(Message):
    """Body of `POST /v1/pd_role`: change to `role`, provided that the worker is the one that was meant.

    Answers: 202 when the drain has begun; 409 on a stale epoch, boot id or fence, another pod's uid, the role that the
    worker has, while another change is under way (a repeat of the same one is 202 again), or when the worker has failed
    or is shutting down; 422 on a bad body.
    """

    role: Role
    expected_epoch: NonNegativeInt
    drain_timeout: Annotated[float, Field(gt=0, le=3600)]
    """Seconds after which a worker that is not drained rolls back by itself."""
    pod_uid: str | None = None
    boot_id: str | None = None
    fence: NonNegativeInt = 0
    """The Lease's transition count of the operator that asks. A worker refuses a lower one than it has seen."""


class LastSwitch(Message):
    """What the last finished role change took, as the worker measured it."""

    epoch: NonNegativeInt
    from_role: Role
    to_role: Role
    outcome: str
    """`Succeeded` or `RolledBack`."""
    drain_seconds: NonNegativeFloat
    switch_seconds: NonNegativeFloat
    """From the end of the drain until the engine's scheduler has read the new epoch."""


class RoleState(Message):
    """Body of `GET /v1/pd_role`, and of the 202 of a POST."""

    role: Role
    epoch: NonNegativeInt
    boot_id: str
    phase: Phase
    target_role: Role | None = None
    draining_requests: NonNegativeInt = 0
    """Requests queued or running here, or whose KV is being received."""
    held_kv_blocks: NonNegativeInt = 0
    """KV blocks of finished prefills that a decode worker has yet to pull."""
    last_switch: LastSwitch | None = None


class LoadReport(Message):
    """One event of `GET /v1/load` (server-sent events, `data:` lines, one every 100 ms)."""

    pod: str
    address: str
    """`host:port` of the worker's HTTP server."""
    boot_id: str
    sequence: NonNegativeInt
    """Grows by one a report within one boot id: the higher one is the newer."""
    role: Role
    epoch: NonNegativeInt
    accepting: bool
    """False from the first word of a drain until the switch, and until the engine is ready."""
    queued_requests: NonNegativeInt = 0
    running_requests: NonNegativeInt = 0
    queued_prefill_tokens: NonNegativeInt = 0
    running_tokens: NonNegativeInt = 0
    free_kv_blocks: NonNegativeInt = 0
    total_kv_blocks: NonNegativeInt = 0
    block_size: NonNegativeInt = 0
    heavy_requests: NonNegativeInt = 0
    """Residents that may still generate more than 128 tokens (TetriInfer's bound of a heavy decode)."""
    light_requests: NonNegativeInt = 0


class Peers(Message):
    """One line (NDJSON) of the body of `PUT /v1/peers`: the newest report of every decode worker."""

    decode: tuple[LoadReport, ...] = ()


class WorkerRef(Message):
    """A worker as one hand-off names it: where, and in which role and epoch it is expected."""

    pod: str
    address: str
    epoch: NonNegativeInt


class Handoff(Message):
    """The field `headrace` of a request body, from the gateway to a worker."""

    request_id: str
    expected_role: Role
    expected_epoch: NonNegativeInt
    max_tokens: NonNegativeInt | None = None
    """Output tokens that the client allows; the prefill body itself says 1. None: as many as the context holds."""


class HandoffAnswer(Message):
    """The field `headrace` of a prefill answer: where to decode, best first. The KV handle stands beside it."""

    decode_workers: tuple[WorkerRef, ...]
    """The dispatcher's choice, then where to turn if it refuses. Empty: no decode worker is known here."""
    overcommitted: bool = False
    """No decode worker had free KV for the whole answer; the first is the least loaded."""
    prompt_tokens: NonNegativeInt = 0


class Release(Message):
    """Body of `POST /v1/release`: nobody will come for this KV. Answers 200 with the number of requests freed."""

    kv_transfer_params: dict[str, Any]


class ErrorCode(StrEnum):
    """`error.code` of the answers that a caller acts upon."""

    TRY_ANOTHER = "try_another"
    """503: this worker takes no such work now (draining, another role, another epoch). Ask another at once."""
    NO_WORKERS = "no_workers"
    """503 from the gateway, with Retry-After: no worker of a needed role is ready."""
    UNAUTHORIZED = "unauthorized"
    BODY_TOO_LARGE = "body_too_large"
    STALE_EPOCH = "stale_epoch"
    STALE_BOOT_ID = "stale_boot_id"
    STALE_FENCE = "stale_fence"
    WRONG_POD = "wrong_pod"
    ROLE_CHANGE_UNDER_WAY = "role_change_under_way"
    ALREADY_IN_ROLE = "already_in_role"
    """409: the worker has this role at this epoch. There is nothing to drain, and the epoch stays."""
    SHUTTING_DOWN = "shutting_down"
    """409: the worker ends soon and changes no role any more."""
    WORKER_FAILED = "worker_failed"
    """409: the engine did not take up a role. Only a new process helps."""
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    """502 from a decode worker: the KV could not be pulled (its prefill worker died). Prefill again."""
    INTERNAL = "internal_error"


class ErrorBody(Message):
    """An error in the OpenAI API's shape."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Message):
    """The whole body of an error answer."""

    error: ErrorBody
