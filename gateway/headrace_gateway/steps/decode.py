"""Hands a computed prompt to the decode workers in the dispatcher's order, and passes the answer on as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from headrace_core.api.names import Role
from headrace_core.api.wire import Handoff, WorkerRef
from headrace_gateway.errors import (
    ConnectFailed,
    KvUnavailable,
    NoDecodeWorker,
    StreamBroken,
    WorkerLost,
    WorkerRefused,
)
from headrace_gateway.openai import ClientRequest, Verdict, clean_answer, decode_body, judge, judge_first_event
from headrace_gateway.ports import EVENT_STREAM, Answer, Client, Workers, WorkerStream
from headrace_gateway.steps.prefill import Prefilled

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]"
ERROR_EVENT = b'data: {"error"'
"""No text of a model can contain it: inside a JSON string the quotes are escaped."""


@dataclass(slots=True)
class DecodeWatch:
    """What is told to the caller while a request is being decoded."""

    trying: Callable[[WorkerRef], None]
    """A hand-off is about to be sent to this worker."""
    failed: Callable[[str], None]
    """The worker at this address has refused or failed: it should not be chosen until it is heard again."""
    fetched: Callable[[], None]
    """The first byte is there: the decode worker has the KV, nobody else needs it."""
    passed: Callable[[bytes], None]
    """These bytes of the stream were sent to the client."""


@dataclass(frozen=True, slots=True)
class Handover:
    """One request's hand-off to the decode side, and until when it may be sent."""

    request: ClientRequest
    prefilled: Prefilled
    is_fresh: Callable[[], bool]
    """Whether the KV is still safely inside its lease: a later pull could read another request's KV."""
    is_reachable: Callable[[str], bool]
    """Whether the worker at an address is not known to be silent or gone."""


async def decode(handover: Handover, workers: Workers, client: Client, watch: DecodeWatch) -> Answer | None:
    """Try the decode workers in turn; None when the answer was streamed to the client.

    Raises NoDecodeWorker when all refused, KvUnavailable, WorkerLost, ClientGone, or StreamBroken once the client
    has had a first byte.
    """
    for target in handover.prefilled.handoff.decode_workers:
        if not handover.is_reachable(target.address):
            continue
        if not handover.is_fresh():
            raise KvUnavailable("the KV has waited too long for a decode worker", address="")
        watch.trying(target)
        try:
            return await _decode_at(target, handover, workers, client, watch)
        except (WorkerRefused, ConnectFailed):
            # It has not touched the KV, so the next one may have it.
            watch.failed(target.address)
    raise NoDecodeWorker("no decode worker took the hand-off")


async def _decode_at(
    target: WorkerRef, handover: Handover, workers: Workers, client: Client, watch: DecodeWatch
) -> Answer | None:
    request = handover.request
    handoff = Handoff(request_id=request.request_id, expected_role=Role.DECODE, expected_epoch=target.epoch)
    body = decode_body(request, handover.prefilled.kv_transfer_params, handoff)
    async with workers.post(target.address, request.endpoint, body, request.request_id) as stream:
        if stream.status == 200 and stream.content_type == EVENT_STREAM:  # noqa: PLR2004 - HTTP's OK
            return await _pass_stream(target, handover, stream, client, watch)
        return await _pass_whole(target, handover, stream, watch)


async def _pass_whole(target: WorkerRef, handover: Handover, stream: WorkerStream, watch: DecodeWatch) -> Answer:
    status, content_type, body = stream.status, stream.content_type, await stream.read()
    _raise_unless_passed(judge(status, body), status, target, handover)
    if status >= 400:  # noqa: PLR2004 - HTTP's classes
        return Answer(status, body, content_type)
    try:
        cleaned = clean_answer(body)
    except ValueError as error:
        raise WorkerLost(f"{target.pod} answered with something that is not JSON", address=target.address) from error
    watch.fetched()
    return Answer(status, cleaned, content_type)


async def _pass_stream(
    target: WorkerRef, handover: Handover, stream: WorkerStream, client: Client, watch: DecodeWatch
) -> Answer | None:
    events = _whole_events(stream.chunks())
    # Until the first event is whole nothing may reach the client, so that another worker can still take over.
    head = await anext(events, b"")
    if not head:
        raise WorkerLost(f"{target.pod} ended its stream before the first event", address=target.address)
    verdict, status, error = judge_first_event(head)
    _raise_unless_passed(verdict, status, target, handover)
    if error:
        return Answer(status, error)
    watch.fetched()
    await client.begin()
    last = head
    await _pass(head, client, watch)
    try:
        async for last in events:
            await _pass(last, client, watch)
    except WorkerLost as lost:
        raise StreamBroken(f"the stream from {target.pod} broke off") from lost
    if DONE not in last:
        raise StreamBroken(f"the stream from {target.pod} ended early")
    return None


async def _pass(events: bytes, client: Client, watch: DecodeWatch) -> None:
    await client.write(events)
    watch.passed(events)
    if ERROR_EVENT in events:
        # The worker's own words have reached the client already, so nothing is added to them.
        raise StreamBroken("")


async def _whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut only between events: what follows a stream that breaks off is then an event of its own.

    A last event without its blank line is passed on when the stream ends in order.
    """
    rest = b""
    async for chunk in chunks:
        data = rest + chunk
        end = data.rfind(END_OF_EVENT)
        if end < 0:
            rest = data
            continue
        end += len(END_OF_EVENT)
        rest = data[end:]
        yield data[:end]
    if rest:
        yield rest


def _raise_unless_passed(verdict: Verdict, status: int, target: WorkerRef, handover: Handover) -> None:
    match verdict:
        case Verdict.REFUSED:
            raise WorkerRefused(f"{target.pod} takes no hand-off now", address=target.address)
        case Verdict.KV_FAILED:
            # The KV's holder is the one at fault: most likely it has died.
            raise KvUnavailable(f"{target.pod} could not fetch the KV", address=handover.prefilled.address)
        case Verdict.FAILED:
            raise WorkerLost(f"{target.pod} answered the hand-off with {status}", address=target.address)
        case Verdict.PASS:
            return
