"""Takes the leader election Lease and keeps it; its count of transitions is the fence of every role change.

The client library's elector is not used: it neither counts transitions nor releases the Lease at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any, Final

from headrace_operator import times
from headrace_operator.errors import ApiUnavailableError, ConflictError, LeaseLostError, NotFoundError
from headrace_operator.kube import LEASES, Api
from headrace_operator.settings import Settings

log: Final = logging.getLogger(__name__)


class Lease:
    """One candidate. Time is judged by its own monotonic clock: the clocks of two nodes differ."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self._highest = 0
        """Most transitions seen in any Lease of this name."""
        # A pod that restarts keeps its name: the suffix makes each process a holder of its own.
        self.identity = f"{settings.pod_name}_{uuid.uuid4().hex[:8]}"
        self.transitions = 0
        """How often the Lease changed hands, this holder's taking included: the fence."""
        self.held = False

    async def acquire(self) -> int:
        """Wait until the Lease is ours; return the fence."""
        while True:
            try:
                if await self._try():
                    log.info("leading as %s, fence %d", self.identity, self.transitions)
                    return self.transitions
            except (ApiUnavailableError, ConflictError) as error:
                log.warning("cannot take the Lease yet: %s", error)
            await asyncio.sleep(self._settings.lease_retry_s)

    async def keep(self) -> None:
        """Renew until it fails for the renew deadline or somebody else holds it.

        Raises:
            LeaseLostError: the process must end.
        """
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.lease_retry_s)
            left = self._settings.lease_renew_deadline_s - (time.monotonic() - renewed)
            try:
                async with asyncio.timeout(max(left, 0.001)):
                    kept = await self._try()
            except (ApiUnavailableError, ConflictError, TimeoutError) as error:
                if time.monotonic() - renewed >= self._settings.lease_renew_deadline_s:
                    self.held = False
                    raise LeaseLostError(f"the Lease was not renewed in time: {error}") from error
                continue
            if not kept:
                self.held = False
                raise LeaseLostError("another operator holds the Lease")
            renewed = time.monotonic()

    async def release(self) -> None:
        """Give the Lease back, so that the next operator need not wait for it to expire."""
        if not self.held:
            return
        self.held = False
        try:
            found = await self._read()
            if found is None or found["spec"].get("holderIdentity") != self.identity:
                return
            found["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            await self._api.replace(LEASES, found)
        except (ApiUnavailableError, ConflictError) as error:
            log.warning("the Lease was not given back and will expire: %s", error)

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._api.get(LEASES, self._settings.pod_namespace, self._settings.lease_name)
        except NotFoundError:
            return None

    async def _try(self) -> bool:
        """Create, take or renew the Lease; False while another holds it."""
        found = await self._read()
        stamp = times.micro(time.time())
        ours = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._settings.lease_duration_s)),
            "renewTime": stamp,
        }
        if found is None:
            meta = {"name": self._settings.lease_name, "namespace": self._settings.pod_namespace}
            # Somebody has deleted it. The workers remember the highest fence, so a lower one would end all flips.
            transitions = self.transitions if self.held else self._highest + 1
            spec = ours | {"acquireTime": stamp, "leaseTransitions": transitions}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
            return self._won(await self._api.create(LEASES, body))
        spec = found.setdefault("spec", {})
        self._highest = max(self._highest, int(spec.get("leaseTransitions") or 0))
        if spec.get("holderIdentity") == self.identity:
            spec |= ours
            return self._won(await self._api.replace(LEASES, found))
        if self.held or not self._expired(spec):
            return False
        spec |= ours | {"acquireTime": stamp, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        return self._won(await self._api.replace(LEASES, found))

    def _expired(self, spec: dict[str, Any]) -> bool:
        """Whether the holder has let a whole duration pass since we saw its last renewal."""
        if not spec.get("holderIdentity"):
            return True
        record = (spec["holderIdentity"], spec.get("renewTime") or "")
        if record != self._seen:
            self._seen, self._seen_at = record, time.monotonic()
        duration = float(spec.get("leaseDurationSeconds") or self._settings.lease_duration_s)
        return time.monotonic() - self._seen_at >= duration

    def _won(self, written: dict[str, Any]) -> bool:
        self.transitions = int(written["spec"]["leaseTransitions"])
        self.held = True
        return True
