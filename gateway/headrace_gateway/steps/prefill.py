"""Has a prefill worker compute the prompt and name the decode workers, and reads what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_core.api.names import Role
from headrace_core.api.wire import Handoff, HandoffAnswer
from headrace_gateway.errors import KvUnavailable, WorkerLost, WorkerRefused
from headrace_gateway.openai import ClientRequest, Verdict, judge, prefill_body, read_prefill_answer
from headrace_gateway.ports import Answer, Workers
from headrace_gateway.registry import WorkerView


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt: its KV lies at `address` until a decode worker fetches it or its lease ends."""

    address: str
    kv_transfer_params: dict[str, object]
    handoff: HandoffAnswer


async def prefill(request: ClientRequest, worker: WorkerView, workers: Workers) -> Prefilled | Answer:
    """Send the prompt to a prefill worker; an Answer is the client's own fault, as the worker puts it.

    Raises WorkerRefused, WorkerLost (also ConnectFailed) or KvUnavailable.
    """
    handoff = Handoff(
        request_id=request.request_id,
        expected_role=Role.PREFILL,
        expected_epoch=worker.epoch,
        max_tokens=request.max_tokens,
    )
    body = prefill_body(request, handoff)
    async with workers.post(worker.address, request.endpoint, body, request.request_id) as stream:
        status, content_type, answer = stream.status, stream.content_type, await stream.read()
    match judge(status, answer):
        case Verdict.REFUSED:
            raise WorkerRefused(f"{worker.pod} takes no prefill now", address=worker.address)
        case Verdict.KV_FAILED | Verdict.FAILED:
            raise WorkerLost(f"{worker.pod} answered the prefill with {status}", address=worker.address)
        case Verdict.PASS if status >= 400:  # noqa: PLR2004 - HTTP's classes
            return Answer(status, answer, content_type)
    return _read(worker, answer)


def _read(worker: WorkerView, body: bytes) -> Prefilled:
    try:
        answer = read_prefill_answer(body)
    except ValueError as error:
        raise WorkerLost(
            f"{worker.pod} answered the prefill with something else: {error}", address=worker.address
        ) from error
    if answer.kv_transfer_params is None:
        # A decode worker would compute the prompt itself, which must not happen without anyone knowing.
        raise KvUnavailable(f"{worker.pod} holds no KV after the prefill", address=worker.address)
    return Prefilled(worker.address, dict(answer.kv_transfer_params), answer.handoff)
