"""Talks to the Kubernetes API: the only file here that imports its client. Objects go in and out as plain dicts."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from headrace_core.api import names
from headrace_operator.errors import (
    ApiError,
    ApiUnavailableError,
    Cause,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    SettingsError,
)

Object = dict[str, Any]

REQUEST_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
PAGE_SIZE: Final = 500
WATCH_S: Final = 240
WATCH_SILENCE_S: Final = 100.0
"""Bookmarks come about once a minute: a watch that is silent for longer is a dead connection."""

_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"
_APPLY: Final = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, as its URL names it."""

    prefix: str
    plural: str

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of a collection, an object or a subresource."""
        parts = [self.prefix]
        if namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts += [part for part in (self.plural, quote(name, safe=""), subresource) if part]
        return "/" + "/".join(parts)


PODS: Final = Resource("api/v1", "pods")
NODES: Final = Resource("api/v1", "nodes")
SECRETS: Final = Resource("api/v1", "secrets")
SERVICES: Final = Resource("api/v1", "services")
SERVICE_ACCOUNTS: Final = Resource("api/v1", "serviceaccounts")
POD_TEMPLATES: Final = Resource("api/v1", "podtemplates")
DEPLOYMENTS: Final = Resource("apis/apps/v1", "deployments")
ROLES: Final = Resource("apis/rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDINGS: Final = Resource("apis/rbac.authorization.k8s.io/v1", "rolebindings")
BUDGETS: Final = Resource("apis/policy/v1", "poddisruptionbudgets")
EVENTS: Final = Resource("apis/events.k8s.io/v1", "events")
LEASES: Final = Resource("apis/coordination.k8s.io/v1", "leases")
CLUSTERS: Final = Resource(f"apis/{names.API_VERSION}", names.Plural.CLUSTER.value)
FLIPS: Final = Resource(f"apis/{names.API_VERSION}", names.Plural.FLIP.value)

BY_KIND: Final[Mapping[str, Resource]] = {
    "Pod": PODS,
    "Secret": SECRETS,
    "Service": SERVICES,
    "ServiceAccount": SERVICE_ACCOUNTS,
    "PodTemplate": POD_TEMPLATES,
    "Deployment": DEPLOYMENTS,
    "Role": ROLES,
    "RoleBinding": ROLE_BINDINGS,
    "PodDisruptionBudget": BUDGETS,
    names.Kind.CLUSTER.value: CLUSTERS,
    names.Kind.FLIP.value: FLIPS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach the API server, for a library that brings its own client."""

    server: str
    ca_path: str | None
    token: str | None
    certificate_path: str | None
    private_key_path: str | None
    insecure: bool


class Api:
    """One connection pool to the API server."""

    def __init__(self, configuration: Any, on_request: Callable[[str], None] | None = None) -> None:
        self._configuration = configuration
        self._client = client.ApiClient(configuration)
        self._client.user_agent = names.MANAGER
        self._on_request = on_request

    @classmethod
    async def connect(
        cls, environment: Mapping[str, str] = os.environ, on_request: Callable[[str], None] | None = None
    ) -> Api:
        """Use the file that KUBECONFIG names; without one, the pod's service account (re-read as it rotates).

        Raises:
            SettingsError: neither can be read.
        """
        configuration = client.Configuration()
        given = environment.get("KUBECONFIG")
        try:
            if given:
                await config.load_kube_config(config_file=given, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException as error:
            remedy = "name a file that is one" if given else "run in a pod, or name a kubeconfig"
            raise SettingsError(f"KUBECONFIG={given or ''!r}: {error}: {remedy}") from error
        return cls(configuration, on_request)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def connection(self) -> Connection:
        """The credentials in use, read again where they rotate."""
        settings = (await self._configuration.auth_settings()).get("BearerToken")
        value = str(settings["value"]) if settings else ""
        token = value.split(" ", 1)[1].strip() if value.lower().startswith("bearer ") else value.strip()
        return Connection(
            server=self._configuration.host,
            ca_path=self._configuration.ssl_ca_cert,
            token=token or None,
            certificate_path=self._configuration.cert_file,
            private_key_path=self._configuration.key_file,
            insecure=not self._configuration.verify_ssl,
        )

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Read one object.

        Raises:
            NotFoundError: there is none.
        """
        return await self._call("GET", resource.path(namespace, name))

    async def list_all(self, resource: Resource, namespace: str = "", selector: str = "") -> tuple[list[Object], str]:
        """Read a whole collection in pages, with the resource version that it was read at."""
        items: list[Object] = []
        query: dict[str, str] = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = selector
        while True:
            page = await self._call("GET", resource.path(namespace), query)
            items += page.get("items") or []
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = token

    async def create(self, resource: Resource, body: Object) -> Object:
        """Create an object.

        Raises:
            ConflictError: one of that name is there.
        """
        namespace = body["metadata"].get("namespace", "")
        return await self._call("POST", resource.path(namespace), {"fieldManager": names.MANAGER}, body)

    async def replace(self, resource: Resource, body: Object) -> Object:
        """Replace an object; its resource version must be the current one.

        Raises:
            ConflictError: it is not.
        """
        meta = body["metadata"]
        return await self._call("PUT", resource.path(meta["namespace"], meta["name"]), {}, body)

    async def apply(
        self, resource: Resource, body: Object, *, manager: str = names.MANAGER, force: bool = True
    ) -> Object:
        """Server-side apply.

        Raises:
            ConflictError: without `force`, another manager owns a field; the causes name the fields.
            InvalidError: the object was refused; the causes name the fields.
        """
        meta = body["metadata"]
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._call(
            "PATCH", resource.path(meta["namespace"], meta["name"]), query, body, content_type=_APPLY
        )

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, resource_version: str, status: Object
    ) -> Object:
        """Merge `status` into the object's, if it is still the one that was read.

        Raises:
            ConflictError: it is not.
        """
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        query = {"fieldManager": names.MANAGER}
        return await self._call("PATCH", resource.path(namespace, name, "status"), query, body, content_type=_MERGE)

    async def patch_metadata(
        self, resource: Resource, namespace: str, name: str, resource_version: str, metadata: Object
    ) -> Object:
        """Merge labels and annotations into an object's, if it is still the one that was read; None removes one.

        Raises:
            ConflictError: it is not.
        """
        body = {"metadata": {**metadata, "resourceVersion": resource_version}}
        query = {"fieldManager": names.MANAGER}
        return await self._call("PATCH", resource.path(namespace, name), query, body, content_type=_MERGE)

    async def patch_json(self, resource: Resource, namespace: str, name: str, operations: list[Object]) -> Object:
        """JSON patch (RFC 6902); its `test` operations make it a compare-and-swap.

        Raises:
            InvalidError: a test failed.
        """
        query = {"fieldManager": names.MANAGER}
        return await self._call("PATCH", resource.path(namespace, name), query, operations, content_type=_JSON_PATCH)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> Object:
        """Delete gracefully the very object that was meant.

        Raises:
            ConflictError: the object of that name has another uid.
            NotFoundError: there is none.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        return await self._call("DELETE", resource.path(namespace, name), {}, body)

    async def watch(
        self, resource: Resource, namespace: str, selector: str, resource_version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield (type, object) from a resource version on, bookmarks included, until the server ends the watch.

        Raises:
            GoneError: the version is too old.
            ApiUnavailableError: the connection broke.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_S),
        }
        if selector:
            query["labelSelector"] = selector
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=WATCH_SILENCE_S)
        try:
            response = await self._send("GET", resource.path(namespace), query, limits=timeout)
            try:
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _error(int(event["object"].get("code", 500)), event["object"])
                    yield event["type"], event["object"]
            finally:
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnavailableError(f"watching {resource.plural}: {error!r}") from error

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        *,
        content_type: str = _JSON,
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._send(method, path, query or {}, body, limits=timeout, content_type=content_type)
            async with response:
                answer: Object = json.loads(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnavailableError(f"{method} {path}: {error!r}") from error
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: object = None,
        *,
        limits: aiohttp.ClientTimeout,
        content_type: str = _JSON,
    ) -> Any:
        if self._on_request is not None:
            self._on_request(method)
        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": content_type, "Accept": _JSON, **self._client.default_headers}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=limits
        )
        response = answer.response
        if response.status < 400:  # noqa: PLR2004 - HTTP's first error status
            return response
        async with response:
            text = await response.text()
        raise _error(response.status, _status_of(text))


def _status_of(text: str) -> Object:
    """The Kubernetes Status of an error answer. What stands before the server may answer with something else."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"message": text[:500]}
    return parsed if isinstance(parsed, dict) else {"message": text[:500]}


_FINAL: Final[Mapping[int, type[ApiError]]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
}


_REFUSALS_SENT_AS_500: Final = (
    "failed to create typed patch object",
    "unable to convert unstructured object",
)
"""Server-side apply answers 500 to a field that the schema does not have, and to a value that cannot be read."""


def _error(status: int, body: Object) -> ApiError | ApiUnavailableError:
    message = str(body.get("message") or "no message")
    reason = str(body.get("reason") or "Unknown")
    causes = tuple(
        Cause(field=str(item.get("field", "")), message=str(item.get("message", "")))
        for item in (body.get("details") or {}).get("causes") or []
    )
    kind = _FINAL.get(status)
    if kind is not None:
        return kind(status, reason, message, causes)
    if status == 500 and any(words in message for words in _REFUSALS_SENT_AS_500):  # noqa: PLR2004
        return InvalidError(status, reason, message, causes)
    if status == 429 or status >= 500:  # noqa: PLR2004 - too many requests, server errors
        return ApiUnavailableError(f"{status} {reason}: {message}")
    return ApiError(status, reason, message, causes)


def resource_version(body: Object) -> int:
    """An object's resource version as a number: Kubernetes orders them numerically within a resource."""
    return int(body["metadata"]["resourceVersion"])
