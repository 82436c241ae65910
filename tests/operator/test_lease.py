"""Taking, keeping, losing and giving back the Lease, against a small fake of the API."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from headrace_operator.errors import ApiUnavailableError, ConflictError, LeaseLostError, NotFoundError
from headrace_operator.lease import Lease
from headrace_operator.settings import Settings

SETTINGS = Settings(
    pod_name="op", pod_namespace="sys", lease_duration_s=1.0, lease_renew_deadline_s=0.3, lease_retry_s=0.05
)


class FakeApi:
    """One Lease object with optimistic locking."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False

    async def get(self, *_: object) -> dict[str, Any]:
        if self.down:
            raise ApiUnavailableError("down")
        if self.lease is None:
            raise NotFoundError(404, "NotFound", "no lease")
        return copy.deepcopy(self.lease)

    async def create(self, _: object, body: dict[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise ConflictError(409, "AlreadyExists", "there is one")
        return self._store(body)

    async def replace(self, _: object, body: dict[str, Any]) -> dict[str, Any]:
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", "changed")
        return self._store(body)

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)


def lease(api: FakeApi, **changes: Any) -> Lease:
    return Lease(api, replace(SETTINGS, **changes))  # type: ignore[arg-type]


async def test_the_first_one_creates_it_and_leads() -> None:
    api = FakeApi()
    assert await lease(api).acquire() == 1


async def test_a_second_one_waits_and_each_change_of_hands_raises_the_fence() -> None:
    api = FakeApi()
    first, second = lease(api), lease(api)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.3)
    assert not waiting.done(), "taken while it was held"
    assert await asyncio.wait_for(waiting, 3) == 2


async def test_a_lease_that_somebody_deletes_comes_back_with_its_fence() -> None:
    api = FakeApi()
    for _ in range(3):
        holder = lease(api)
        await holder.acquire()
        await holder.release()
    holder, candidate = lease(api), lease(api)
    assert await holder.acquire() == 4
    assert not await candidate._try()
    api.lease = None
    assert await holder._try()
    assert holder.transitions == 4
    api.lease = None
    assert await candidate._try()
    assert candidate.transitions == 5


async def test_renewing_does_not_raise_the_fence() -> None:
    api = FakeApi()
    first = lease(api)
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await asyncio.sleep(0.3)
    assert first.transitions == 1
    assert api.version > 3
    keeping.cancel()


async def test_a_holder_that_renews_is_never_taken_over() -> None:
    api = FakeApi()
    first, second = lease(api), lease(api)
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(1.6)
    assert not waiting.done()
    keeping.cancel()
    waiting.cancel()


async def test_given_back_it_is_taken_at_once() -> None:
    api = FakeApi()
    first, second = lease(api), lease(api)
    await first.acquire()
    await first.release()
    assert await asyncio.wait_for(second.acquire(), 0.2) == 2


async def test_it_is_lost_when_the_api_server_stays_away() -> None:
    api = FakeApi()
    first = lease(api)
    await first.acquire()
    api.down = True
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(first.keep(), 2)
    assert not first.held


async def test_a_short_absence_is_outlived() -> None:
    api = FakeApi()
    first = lease(api)
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    api.down = True
    await asyncio.sleep(0.15)
    api.down = False
    await asyncio.sleep(0.3)
    assert not keeping.done()
    keeping.cancel()


async def test_it_is_lost_when_another_holds_it_and_not_taken_back() -> None:
    api = FakeApi()
    first = lease(api)
    await first.acquire()
    assert api.lease is not None
    api.lease["spec"]["holderIdentity"] = "other"
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(first.keep(), 2)
    assert api.lease["spec"]["holderIdentity"] == "other"


async def test_another_ones_lease_is_not_given_back() -> None:
    api = FakeApi()
    first = lease(api)
    await first.acquire()
    assert api.lease is not None
    api.lease["spec"]["holderIdentity"] = "other"
    await first.release()
    assert api.lease["spec"]["holderIdentity"] == "other"
