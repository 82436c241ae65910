"""Reads and creates objects through the Kubernetes API, as the user of the kubeconfig or of the pod it runs in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kubernetes import client, config
from urllib3.exceptions import HTTPError

from headrace_cli.errors import CliError, ForbiddenError, NotFoundError
from headrace_core.api.names import GROUP, VERSION, Label, Plural

Object = dict[str, Any]

REQUEST_TIMEOUT_S = 15
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Kube:
    """The objects of one namespace. Every method raises CliError with a message for the user.

    The namespace is the one given, else that of the kubeconfig's context or of the pod, else `default`.
    """

    def __init__(self, namespace: str | None) -> None:
        configuration = client.Configuration()
        fallback = _load(configuration)
        # One clear error at once is better than three tries and their warnings.
        configuration.retries = False
        self.namespace = namespace or fallback
        api = client.ApiClient(configuration)
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    def cluster(self, name: str) -> Object:
        """An InferenceCluster."""
        return self._get(Plural.CLUSTER, name)

    def clusters(self) -> list[Object]:
        """All InferenceClusters, by name."""
        return self._list(Plural.CLUSTER)

    def flip(self, name: str) -> Object:
        """An InferenceFlip."""
        return self._get(Plural.FLIP, name)

    def flips(self) -> list[Object]:
        """All InferenceFlips, by name."""
        return self._list(Plural.FLIP)

    def create_flip(self, body: Object) -> Object:
        """Create an InferenceFlip; returns it as the API server has it."""
        return self._call(
            "create the InferenceFlip",
            lambda: self._custom.create_namespaced_custom_object(
                GROUP, VERSION, self.namespace, Plural.FLIP.value, body, _request_timeout=REQUEST_TIMEOUT_S
            ),
        )

    def worker_pods(self, cluster: str) -> list[Object]:
        """A cluster's worker pods: those that have a role."""
        selector = f"{Label.CLUSTER}={cluster},{Label.ROLE}"

        def ask() -> Object:
            response = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=selector,
                _preload_content=False,
                _request_timeout=REQUEST_TIMEOUT_S,
            )
            answer: Object = json.loads(response.data)
            return answer

        return _items(self._call("list pods", ask))

    def _get(self, plural: Plural, name: str) -> Object:
        return self._call(
            f"get {plural.value} {name!r}",
            lambda: self._custom.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, plural.value, name, _request_timeout=REQUEST_TIMEOUT_S
            ),
        )

    def _list(self, plural: Plural) -> list[Object]:
        return _items(
            self._call(
                f"list {plural.value}",
                lambda: self._custom.list_namespaced_custom_object(
                    GROUP, VERSION, self.namespace, plural.value, _request_timeout=REQUEST_TIMEOUT_S
                ),
            )
        )

    def _call(self, what: str, ask: Callable[[], Object]) -> Object:
        try:
            return ask()
        except client.ApiException as error:
            raise _explain(what, error, self.namespace) from error
        except (HTTPError, OSError) as error:
            raise CliError(
                f"cannot {what}: the API server does not answer ({error}). Check KUBECONFIG and the current context."
            ) from error


def _load(configuration: client.Configuration) -> str:
    """Fill in how to reach the API server; returns the namespace that goes with it."""
    try:
        _, active = config.list_kube_config_contexts()
        config.load_kube_config(client_configuration=configuration)
    except config.ConfigException as no_kubeconfig:
        try:
            config.load_incluster_config(configuration)
        except config.ConfigException:
            raise CliError(f"no cluster to talk to ({no_kubeconfig}): set KUBECONFIG") from no_kubeconfig
        return _POD_NAMESPACE.read_text(encoding="utf-8").strip()
    namespace = (active.get("context") or {}).get("namespace")
    return str(namespace or "default")


def _items(answer: Mapping[str, Any]) -> list[Object]:
    items: list[Object] = answer["items"]
    return sorted(items, key=lambda item: str(item["metadata"]["name"]))


def _explain(what: str, error: client.ApiException, namespace: str) -> CliError:
    message = _message_of(error)
    match error.status:
        case HTTPStatus.NOT_FOUND if "could not find the requested resource" in message or "page not found" in message:
            return NotFoundError(f"cannot {what}: this cluster has no {GROUP}/{VERSION}. Install the Headrace chart.")
        case HTTPStatus.NOT_FOUND:
            return NotFoundError(f"cannot {what} in namespace {namespace!r}: there is none. Name another one with -n.")
        case HTTPStatus.FORBIDDEN:
            return ForbiddenError(f"cannot {what}: {message}")
        case HTTPStatus.UNAUTHORIZED:
            return CliError(f"cannot {what}: the API server does not know this user. Check the kubeconfig's login.")
        case _:
            return CliError(f"cannot {what}: {message}")


def _message_of(error: client.ApiException) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body)
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip() or str(error.reason)
