"""Builds a cluster's gateway: Deployment, Service, ServiceAccount, Role and RoleBinding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.api import names
from headrace_core.api.names import COMPONENT_GATEWAY, Env, Label
from headrace_operator.manifests.shared import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    Images,
    Manifest,
    from_field,
    labels,
    leave_to_user,
    literal,
    metadata,
    token_mount,
    token_volume,
)
from headrace_operator.plan.view import ClusterSpec


def selector(cluster: ClusterSpec) -> dict[str, str]:
    """Labels that pick the gateway's pods; immutable in a Deployment, so these and no more."""
    return {Label.CLUSTER: cluster.name, Label.APP_COMPONENT: COMPONENT_GATEWAY}


def base_template(cluster: ClusterSpec, images: Images) -> Manifest:
    """The operator's part of the gateway's pod template."""
    environment = [
        from_field(Env.POD_NAME, "metadata.name"),
        from_field(Env.POD_IP, "status.podIP"),
        literal(Env.CLUSTER, cluster.name),
        literal(Env.NAMESPACE, cluster.namespace),
        literal(Env.SERVED_NAME, cluster.model.served_name),
        literal(Env.TOKEN_FILE, names.TOKEN_PATH),
    ]
    if cluster.model.max_model_len is not None:
        environment.append(literal(Env.MAX_MODEL_LEN, str(cluster.model.max_model_len)))
    probe = {"port": "http"}
    base: Manifest = {
        "metadata": {"labels": labels(cluster, COMPONENT_GATEWAY)},
        "spec": {
            "serviceAccountName": names.gateway_name(cluster.name),
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 120,
            "securityContext": dict(POD_SECURITY),
            "containers": [
                {
                    "name": names.CONTAINER_GATEWAY,
                    "image": images.gateway,
                    "imagePullPolicy": images.pull_policy,
                    "ports": [{"name": "http", "containerPort": names.GATEWAY_PORT, "protocol": "TCP"}],
                    "env": environment,
                    "volumeMounts": [token_mount()],
                    "securityContext": dict(CONTAINER_SECURITY),
                    "readinessProbe": {
                        "httpGet": {"path": "/readyz", **probe},
                        "periodSeconds": 2,
                        "timeoutSeconds": 2,
                    },
                    "livenessProbe": {
                        "httpGet": {"path": "/livez", **probe},
                        "periodSeconds": 10,
                        "timeoutSeconds": 5,
                        "failureThreshold": 6,
                        "initialDelaySeconds": 10,
                    },
                }
            ],
            "volumes": [token_volume(cluster)],
        },
    }
    if images.pull_secrets:
        base["spec"]["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    return leave_to_user(base, cluster.gateway.template, names.CONTAINER_GATEWAY)


def deployment(cluster: ClusterSpec, template: Mapping[str, Any]) -> Manifest:
    """The gateway's Deployment, made from its merged template."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(cluster, names.gateway_name(cluster.name), COMPONENT_GATEWAY),
        "spec": {
            "replicas": cluster.gateway.replicas,
            "selector": {"matchLabels": selector(cluster)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {
                    key: value
                    for key, value in (template.get("metadata") or {}).items()
                    if key in ("labels", "annotations")
                },
                "spec": template["spec"],
            },
        },
    }


def service(cluster: ClusterSpec) -> Manifest:
    """Where clients send requests: port 80."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster, names.gateway_name(cluster.name), COMPONENT_GATEWAY),
        "spec": {
            "selector": selector(cluster),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def access(cluster: ClusterSpec) -> list[Manifest]:
    """The gateway's account and its only right: to see the pods of its namespace."""
    name = names.gateway_name(cluster.name)
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(cluster, name, COMPONENT_GATEWAY),
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata(cluster, name, COMPONENT_GATEWAY),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata(cluster, name, COMPONENT_GATEWAY),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": cluster.namespace}],
        },
    ]
