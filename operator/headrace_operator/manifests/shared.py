"""What all objects of a cluster have in common: labels, the owner, the way a user's part of a template is merged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_core.api import names
from headrace_operator.plan.view import ClusterSpec

Manifest = dict[str, Any]

POD_SECURITY: Final[Mapping[str, Any]] = {"seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Where containers come from: the operator's defaults."""

    worker: str
    gateway: str
    pull_policy: str
    pull_secrets: tuple[str, ...] = ()


def labels(cluster: ClusterSpec, component: str) -> dict[str, str]:
    """Labels of everything that is made for a cluster."""
    return {
        names.Label.CLUSTER: cluster.name,
        names.Label.APP_NAME: "headrace",
        names.Label.APP_INSTANCE: cluster.name,
        names.Label.APP_COMPONENT: component,
        names.Label.APP_PART_OF: "headrace",
        names.Label.APP_MANAGED_BY: names.MANAGER,
    }


def owner(cluster: ClusterSpec) -> Manifest:
    """The controller owner reference: the garbage collector deletes what carries it with the cluster."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.Kind.CLUSTER.value,
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(cluster: ClusterSpec, name: str, component: str) -> Manifest:
    """Name, namespace, labels and owner of an object of a cluster."""
    return {
        "name": name,
        "namespace": cluster.namespace,
        "labels": labels(cluster, component),
        "ownerReferences": [owner(cluster)],
    }


def token_volume(cluster: ClusterSpec) -> Manifest:
    """The volume with the cluster's bearer token."""
    return {"name": "token", "secret": {"secretName": names.token_secret_name(cluster.name), "defaultMode": 0o440}}


def token_mount() -> Manifest:
    """Where a container finds the token."""
    return {"name": "token", "mountPath": names.TOKEN_MOUNT_PATH, "readOnly": True}


def literal(name: str, value: str) -> Manifest:
    """An environment variable with a fixed value."""
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Manifest:
    """An environment variable from the downward API."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def user_container(template: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a user's partial template says of one container; empty where it says nothing."""
    containers = (template.get("spec") or {}).get("containers") or []
    return next((item for item in containers if isinstance(item, Mapping) and item.get("name") == name), {})


def leave_to_user(base: Manifest, template: Mapping[str, Any], container: str) -> Manifest:
    """Drop those of our defaults that the user's template sets itself, so that they are no conflict.

    These are defaults, not things the operator relies on: grace period, security contexts, probes and resources.
    """
    user_spec = template.get("spec") or {}
    spec = {
        key: value
        for key, value in base["spec"].items()
        if key not in ("terminationGracePeriodSeconds", "securityContext") or key not in user_spec
    }
    said = user_container(template, container)
    optional = ("securityContext", "livenessProbe", "readinessProbe", "startupProbe", "resources", "imagePullPolicy")
    spec["containers"] = [
        {
            key: value
            for key, value in item.items()
            if item["name"] != container or key not in optional or not _names(said, key, value)
        }
        for item in base["spec"]["containers"]
    ]
    return {**base, "spec": spec}


def _names(said: Mapping[str, Any], key: str, ours: object) -> bool:
    """Whether the user's container takes one of our defaults over. Resources: only by naming an accelerator."""
    if key not in said:
        return False
    if key != "resources" or not isinstance(ours, Mapping):
        return True
    resources = said[key] or {}
    named = {*(resources.get("limits") or {}), *(resources.get("requests") or {})}
    return bool(resources.get("claims")) or any("/" in name for name in named)


def digest(*parts: object) -> str:
    """A short stable hash of JSON values, fit for a label."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def revision(base: Mapping[str, Any], user: Mapping[str, Any]) -> str:
    """Hash of both parts of a template: a pod made from another revision is out of date.

    The parts are hashed, not the merged result: that one also changes when a new Kubernetes fills in new defaults.
    """
    return digest(base, user)
