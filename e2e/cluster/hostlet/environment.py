"""Decides the environment, command and arguments of a container, as the kubelet does."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e.cluster.hostlet.quantity import format_divided, parse_quantity

Json = dict[str, Any]
# (kind, name) -> the object in the pod's namespace, or None where it does not exist.
Lookup = Callable[[str, str], Json | None]

_REFERENCE = re.compile(r"\$(\$)|\$\(([^)]*)\)")
_KEYED = re.compile(r"^metadata\.(labels|annotations)\['([^']*)'\]$")
_ENV_NAME = re.compile(r"^[^=\x00-\x1f\x7f]+$")


class ConfigError(Exception):
    """A container cannot be created as its references point to nothing (reason CreateContainerConfigError)."""


@dataclass(frozen=True)
class PodFacts:
    """What the downward API knows of a pod beside its object."""

    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sources:
    """What references in a pod's spec are looked up in."""

    pod: Json
    facts: PodFacts
    lookup: Lookup


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value; `$$` stands for `$`, and an unknown reference stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match.group(1):
            return "$"
        name = match.group(2)
        return variables[name] if name in variables else match.group(0)

    return _REFERENCE.sub(value, text)


def container_env(sources: Sources, container: Json, services: Mapping[str, str]) -> dict[str, str]:
    """The variables a container is started with: service variables, then `envFrom`, then `env`, later ones winning.

    Raises `ConfigError` for a Secret, ConfigMap or key that is named, not optional and not there.
    """
    result = dict(services)
    for source in container.get("envFrom") or []:
        result.update(_from_object(source, sources.lookup))
    for entry in container.get("env") or []:
        value = _env_value(entry, sources, container, result)
        if value is not None:
            result[entry["name"]] = value
    return result


def _from_object(source: Json, lookup: Lookup) -> dict[str, str]:
    kind, reference = (
        ("Secret", source["secretRef"]) if "secretRef" in source else ("ConfigMap", source["configMapRef"])
    )
    found = lookup(kind, reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    prefix = source.get("prefix") or ""
    data = object_data(kind, found)
    return {
        prefix + key: value.decode("utf-8", "replace") for key, value in data.items() if _ENV_NAME.match(prefix + key)
    }


def _env_value(entry: Json, sources: Sources, container: Json, so_far: Mapping[str, str]) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return expand(entry.get("value") or "", so_far)
    if "fieldRef" in source:
        return field_value(sources.pod, source["fieldRef"]["fieldPath"], sources.facts)
    if "resourceFieldRef" in source:
        return resource_value(sources.pod, source["resourceFieldRef"], sources.facts, container)
    kind, key = ("Secret", "secretKeyRef") if "secretKeyRef" in source else ("ConfigMap", "configMapKeyRef")
    if key not in source:
        raise ConfigError(f"env {entry['name']}: valueFrom {sorted(source)} is not offered by this node")
    reference = source[key]
    found = sources.lookup(kind, reference["name"])
    data = object_data(kind, found) if found else {}
    if reference["key"] in data:
        return data[reference["key"]].decode("utf-8", "replace")
    if reference.get("optional"):
        return None
    if found is None:
        raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    namespace = sources.pod["metadata"]["namespace"]
    raise ConfigError(f"couldn't find key {reference['key']} in {kind} {namespace}/{reference['name']}")


def object_data(kind: str, item: Json) -> dict[str, bytes]:
    """The keys of a Secret or ConfigMap as bytes."""
    if kind == "Secret":
        return {key: base64.b64decode(value) for key, value in (item.get("data") or {}).items()}
    plain = {key: str(value).encode() for key, value in (item.get("data") or {}).items()}
    binary = {key: base64.b64decode(value) for key, value in (item.get("binaryData") or {}).items()}
    return {**plain, **binary}


def field_value(pod: Json, path: str, facts: PodFacts) -> str:
    """The value of a downward API field path; raises `ConfigError` for a path this node does not know."""
    meta, spec = pod["metadata"], pod["spec"]
    if match := _KEYED.match(path):
        return str((meta.get(match.group(1)) or {}).get(match.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        return format_map(meta.get(path.removeprefix("metadata.")) or {})
    values: dict[str, Callable[[], str]] = {
        "metadata.name": lambda: meta["name"],
        "metadata.namespace": lambda: meta["namespace"],
        "metadata.uid": lambda: meta["uid"],
        "spec.nodeName": lambda: spec.get("nodeName", ""),
        "spec.serviceAccountName": lambda: spec.get("serviceAccountName", ""),
        "status.podIP": lambda: facts.pod_ip,
        "status.podIPs": lambda: facts.pod_ip,
        "status.hostIP": lambda: facts.host_ip,
        "status.hostIPs": lambda: facts.host_ip,
    }
    if path not in values:
        raise ConfigError(f"fieldPath {path!r} is not offered by this node")
    return values[path]()


def format_map(values: Mapping[str, str]) -> str:
    """Labels or annotations as the downward API writes them: one `key="value"` a line, sorted."""
    return "\n".join(f"{key}={_quote(values[key])}" for key in sorted(values))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped.replace(chr(13), chr(92) + "r")}"'


def resource_value(pod: Json, reference: Json, facts: PodFacts, container: Json | None = None) -> str:
    """A container's request or limit in units of the divisor, rounded up; a missing limit is the node's whole."""
    name = reference.get("containerName")
    if name:
        everyone = [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]
        container = next((each for each in everyone if each["name"] == name), None)
    if container is None:
        raise ConfigError(f'resourceFieldRef names no container of this pod: "{name}"')
    part, _, resource = reference["resource"].partition(".")
    stated = container.get("resources") or {}
    value = (stated.get(part) or {}).get(resource)
    if value is None and part == "limits":
        value = facts.allocatable.get(resource)
    divisor = reference.get("divisor") or "1"
    return format_divided(parse_quantity(str(value or "0")), parse_quantity("1" if divisor == "0" else str(divisor)))


def service_env(services: list[Json], namespace: str, apiserver: tuple[str, int], *, links: bool) -> dict[str, str]:
    """The variables that tell a container of services: always the API server, and with `links` its namespace's.

    The API server is told by its real (host, port): its ClusterIP needs no listener then.
    """
    result: dict[str, str] = {}
    if links:
        for service in services:
            if service["metadata"]["namespace"] == namespace:
                result.update(_links(service))
    host, port = apiserver
    address = f"tcp://{host}:{port}"
    return result | {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": str(port),
        "KUBERNETES_SERVICE_PORT_HTTPS": str(port),
        "KUBERNETES_PORT": address,
        f"KUBERNETES_PORT_{port}_TCP": address,
        f"KUBERNETES_PORT_{port}_TCP_PROTO": "tcp",
        f"KUBERNETES_PORT_{port}_TCP_PORT": str(port),
        f"KUBERNETES_PORT_{port}_TCP_ADDR": host,
    }


def _links(service: Json) -> dict[str, str]:
    spec = service["spec"]
    address, ports = spec.get("clusterIP"), spec.get("ports") or []
    if not address or address == "None" or not ports or service["metadata"]["name"] == "kubernetes":
        return {}
    base = service["metadata"]["name"].upper().replace("-", "_").replace(".", "_")
    first = ports[0]
    first_url = f"{first.get('protocol', 'TCP').lower()}://{address}:{first['port']}"
    result = {
        f"{base}_SERVICE_HOST": address,
        f"{base}_SERVICE_PORT": str(first["port"]),
        f"{base}_PORT": first_url,
    }
    for port in ports:
        protocol = port.get("protocol", "TCP")
        if port.get("name"):
            result[f"{base}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
        stem = f"{base}_PORT_{port['port']}_{protocol}"
        result[stem] = f"{protocol.lower()}://{address}:{port['port']}"
        result[f"{stem}_PROTO"] = protocol.lower()
        result[f"{stem}_PORT"] = str(port["port"])
        result[f"{stem}_ADDR"] = address
    return result
