"""Touches the TokenRequest API: keeps the service-account tokens of one pod fresh."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from e2e.cluster.hostlet.kube import Kube, KubeError
from e2e.cluster.hostlet.payload import VolumeError

Json = dict[str, Any]

# The kubelet renews at 80 % of a token's life, or after 24 hours (concepts/storage/projected-volumes).
_RENEW_SHARE = 0.8
_RENEW_LATEST_S = 24 * 3600.0
_RETRY_S = 5.0


@dataclass(frozen=True)
class _Token:
    value: str
    renew_at: float
    expires_at: float


class PodTokens:
    """Tokens bound to one pod, by (audience, lifetime in seconds); the empty audience is the API server's."""

    def __init__(self, kube: Kube, pod: Json) -> None:
        self._kube = kube
        meta = pod["metadata"]
        self._pod = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        account = pod["spec"].get("serviceAccountName") or "default"
        self._path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        self._tokens: dict[tuple[str, int], _Token] = {}

    async def ensure(self, audience: str, lifetime_s: int) -> None:
        """Have a token that needs no renewal; raises `VolumeError` where there is none and none can be had."""
        now, held = time.time(), self._tokens.get((audience, lifetime_s))
        if held and now < held.renew_at:
            return
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [audience] if audience else [],
                "expirationSeconds": lifetime_s,
                "boundObjectRef": self._pod,
            },
        }
        try:
            answer = await self._kube.call("POST", self._path, body)
        except KubeError as error:
            if held and now < held.expires_at:
                self._tokens[audience, lifetime_s] = _Token(held.value, now + _RETRY_S, held.expires_at)
                return
            raise VolumeError(f"failed to fetch token: {error}") from error
        expires = datetime.fromisoformat(answer["status"]["expirationTimestamp"]).timestamp()
        renew = now + min((expires - now) * _RENEW_SHARE, _RENEW_LATEST_S)
        self._tokens[audience, lifetime_s] = _Token(answer["status"]["token"], renew, expires)

    def current(self, audience: str, lifetime_s: int) -> str:
        """The token that `ensure` got."""
        return self._tokens[audience, lifetime_s].value

    def next_renewal_s(self) -> float | None:
        """Seconds until the first renewal, None without tokens."""
        due = [token.renew_at for token in self._tokens.values()]
        return max(0.0, min(due) - time.time()) if due else None
