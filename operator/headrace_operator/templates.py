"""Has the API server merge a user's partial pod template over the operator's, and reads the result back.

Two field managers apply to one PodTemplate object: the operator's base with force, then the user's part without. So
keyed lists merge as users expect, a wrong field is refused with its path, and a field of the operator's is a named
conflict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_core.api import names
from headrace_core.api.names import COMPONENT_GATEWAY, COMPONENT_WORKER, Label, Reason
from headrace_operator.errors import ConflictError, ForbiddenError, InvalidError
from headrace_operator.kube import POD_TEMPLATES, Api
from headrace_operator.manifests import gateway, worker
from headrace_operator.manifests.shared import Images, Manifest, metadata, revision
from headrace_operator.plan.view import ClusterSpec

USER_MANAGER: Final = f"{names.MANAGER}-template"
"""Field manager of the user's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged template and the hash of the parts it was merged from."""

    template: Mapping[str, Any]
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why the API server would not merge it; the message names the field in terms of the InferenceCluster."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All templates of a cluster."""

    pools: Mapping[str, Merged]
    """By pool; one that was refused is absent."""
    gateway: Merged | None
    """None: it was refused, or there is no gateway."""
    refused: tuple[Refused, ...]


class Templates:
    """Merges templates, and remembers each result for as long as its parts stay the same."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._merged: dict[tuple[str, str], Merged] = {}

    async def merge_all(self, cluster: ClusterSpec, images: Images) -> Parts:
        """Merge the templates of all pools and of the gateway."""
        results: dict[str, Merged | Refused] = {}
        for index, pool in enumerate(cluster.pools):
            results[pool.name] = await self.merge(
                cluster,
                worker.template_name(cluster.name, pool.name),
                COMPONENT_WORKER,
                base=worker.base_template(cluster, pool, images),
                user=pool.template,
                path=f"spec.pools[{index}].template",
            )
        front: Merged | Refused | None = None
        if cluster.gateway.managed:
            front = await self.merge(
                cluster,
                names.gateway_name(cluster.name),
                COMPONENT_GATEWAY,
                base=gateway.base_template(cluster, images),
                user=cluster.gateway.template,
                path="spec.gateway.template",
            )
        return Parts(
            pools={name: result for name, result in results.items() if isinstance(result, Merged)},
            gateway=front if isinstance(front, Merged) else None,
            refused=tuple(item for item in (*results.values(), front) if isinstance(item, Refused)),
        )

    async def merge(
        self, cluster: ClusterSpec, name: str, component: str, *, base: Manifest, user: Mapping[str, Any], path: str
    ) -> Merged | Refused:
        """Merge `user` over `base` on the PodTemplate of that name.

        Args:
            cluster: the owner.
            name: name of the PodTemplate.
            component: worker or gateway.
            base: the operator's part.
            user: the user's part; may be empty.
            path: where the user's part stands in the InferenceCluster, for messages.
        """
        wanted = revision(base, user)
        known = self._merged.get((cluster.uid, name))
        if known is not None and known.revision == wanted:
            return known
        meta = metadata(cluster, name, component)
        head: Manifest = {"apiVersion": "v1", "kind": "PodTemplate"}
        try:
            await self._api.apply(POD_TEMPLATES, {**head, "metadata": meta, "template": base})
        except InvalidError as error:
            # Values of other fields (an env entry, an image) end up in the base, so its refusal is the user's news too.
            return Refused(reason=Reason.TEMPLATE_REFUSED, message=_words(error, "the pod"))
        # The revision label comes with the user's part: a PodTemplate that has it holds both.
        marked = {"name": name, "namespace": cluster.namespace, "labels": {Label.REVISION: wanted}}
        body: Manifest = {**head, "metadata": marked, **({"template": dict(user)} if user else {})}
        try:
            written = await self._api.apply(POD_TEMPLATES, body, manager=USER_MANAGER, force=False)
        except ConflictError as error:
            return Refused(reason=Reason.TEMPLATE_CONFLICT, message=_words(error, path))
        except (InvalidError, ForbiddenError) as error:
            return Refused(reason=Reason.TEMPLATE_REFUSED, message=_words(error, path))
        merged = Merged(template=written["template"], revision=wanted)
        self._merged[cluster.uid, name] = merged
        return merged

    def forget(self, cluster_uid: str) -> None:
        """Drop what is remembered of a cluster."""
        self._merged = {key: merged for key, merged in self._merged.items() if key[0] != cluster_uid}


def _words(error: ConflictError | InvalidError | ForbiddenError, path: str) -> str:
    if isinstance(error, ConflictError) and error.causes:
        fields = ", ".join(sorted({cause.field.removeprefix(".template") for cause in error.causes}))
        return f"{path}: the operator sets {fields}: remove it from the template"
    if error.causes:
        found = "; ".join(f"{cause.field.removeprefix('template')}: {cause.message}" for cause in error.causes[:5])
        return f"{path}{found}" if found.startswith(".") else f"{path}: {found}"
    return f"{path}: {error.message}"
