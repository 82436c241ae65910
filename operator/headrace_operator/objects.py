"""Keeps the objects around a cluster's pods as they should be: token, accounts, budgets, gateway; deletes the rest."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace_core.api import names
from headrace_core.api.names import Label
from headrace_operator.errors import ConflictError, NotFoundError
from headrace_operator.kube import BY_KIND, SECRETS, Api, Object
from headrace_operator.manifests import worker
from headrace_operator.manifests.shared import Manifest, digest
from headrace_operator.plan.view import ClusterSpec

VERIFY_S: Final = 60.0
"""Seconds after which an object is looked at again, in case somebody changed or deleted it."""
TOKEN_BYTES: Final = 32

PRUNED: Final = ("PodTemplate", "Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget")
"""Kinds of which a cluster may come to need fewer."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """An object as it was last applied."""

    hash: str
    version: str
    checked: float


class Objects:
    """Remembers what it applied, so that an unchanged object costs a look a minute and no write."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._known: dict[tuple[str, str, str], _Known] = {}
        self._tokens: dict[str, tuple[str, float]] = {}
        self._pruned: dict[str, str] = {}

    async def token(self, cluster: ClusterSpec) -> str:
        """The cluster's bearer token: the first line of its Secret, which is made where there is none."""
        known = self._tokens.get(cluster.uid)
        if known is not None and self._clock() - known[1] < VERIFY_S:
            return known[0]
        name = names.token_secret_name(cluster.name)
        try:
            body = await self._api.get(SECRETS, cluster.namespace, name)
        except NotFoundError:
            fresh = secrets.token_urlsafe(TOKEN_BYTES)
            try:
                body = await self._api.create(SECRETS, worker.token_secret(cluster, fresh))
            except ConflictError:
                body = await self._api.get(SECRETS, cluster.namespace, name)
        token = _first_line(body)
        self._tokens[cluster.uid] = (token, self._clock())
        return token

    async def ensure(self, cluster: ClusterSpec, manifests: Iterable[Manifest]) -> None:
        """Apply those that are missing or not as they should be."""
        for manifest in manifests:
            await self._ensure_one(cluster, manifest)

    async def prune(self, cluster: ClusterSpec, wanted: Iterable[tuple[str, str]]) -> None:
        """Delete this cluster's objects that are not among those wanted (kind, name), once for each set of them."""
        keep = set(wanted)
        mark = digest(sorted(keep))
        if self._pruned.get(cluster.uid) == mark:
            return
        selector = f"{Label.CLUSTER}={cluster.name},{Label.APP_MANAGED_BY}={names.MANAGER}"
        for kind in PRUNED:
            found, _ = await self._api.list_all(BY_KIND[kind], cluster.namespace, selector)
            for body in found:
                meta = body["metadata"]
                ours = any(item["uid"] == cluster.uid for item in meta.get("ownerReferences") or [])
                if ours and (kind, meta["name"]) not in keep:
                    await self._delete(kind, body)
        self._pruned[cluster.uid] = mark

    def forget(self, cluster_uid: str) -> None:
        """Drop what is remembered of a cluster."""
        self._known = {key: known for key, known in self._known.items() if key[0] != cluster_uid}
        self._tokens.pop(cluster_uid, None)
        self._pruned.pop(cluster_uid, None)

    async def _ensure_one(self, cluster: ClusterSpec, manifest: Manifest) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        key, wanted = (cluster.uid, kind, name), digest(manifest)
        known = self._known.get(key)
        if known is not None and known.hash == wanted:
            if self._clock() - known.checked < VERIFY_S:
                return
            if await self._version(kind, cluster.namespace, name) == known.version:
                known.checked = self._clock()
                return
        written = await self._api.apply(BY_KIND[kind], manifest)
        self._known[key] = _Known(hash=wanted, version=_version(written), checked=self._clock())

    async def _version(self, kind: str, namespace: str, name: str) -> str | None:
        try:
            return _version(await self._api.get(BY_KIND[kind], namespace, name))
        except NotFoundError:
            return None

    async def _delete(self, kind: str, body: Object) -> None:
        meta = body["metadata"]
        try:
            await self._api.delete(BY_KIND[kind], meta["namespace"], meta["name"], meta["uid"])
        except NotFoundError:
            return


def _version(body: Object) -> str:
    """What changes when somebody changes the object: its generation where it has one, for its status also has."""
    meta = body["metadata"]
    return f"{meta['uid']}/{meta.get('generation') or meta['resourceVersion']}"


def _first_line(secret: Object) -> str:
    raw = base64.b64decode((secret.get("data") or {}).get(names.TOKEN_SECRET_KEY, ""))
    # What no header can carry is no token. Without one the workers refuse us, and that is told of each.
    lines = (line.strip() for line in raw.decode("ascii", errors="replace").splitlines())
    return next((line for line in lines if line and line.isascii() and line.isprintable()), "")
