"""Decides the files of configMap, secret, downwardAPI and projected volumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from e2e.cluster.hostlet.environment import Lookup, Sources, field_value, object_data, resource_value

Json = dict[str, Any]
# (audience, seconds until expiry) -> token
Tokens = Callable[[str, int], str]

DEFAULT_MODE = 0o644
DEFAULT_TOKEN_LIFETIME_S = 3600


class VolumeError(Exception):
    """A volume cannot be set up; tried again as its sources may still come (the kubelet's FailedMount)."""


@dataclass(frozen=True)
class File:
    """Content and permission bits of one file of a volume."""

    data: bytes
    mode: int


def volume_files(volume: Json, sources: Sources, tokens: Tokens) -> dict[str, File]:
    """Relative path -> file, for a volume of one of the four kinds; raises `VolumeError` for a missing source."""
    if "projected" not in volume:
        kind = next(each for each in ("secret", "configMap", "downwardAPI") if each in volume)
        mode = volume[kind].get("defaultMode") or DEFAULT_MODE
        return _source_files(volume, mode, sources, tokens)
    mode = volume["projected"].get("defaultMode") or DEFAULT_MODE
    result: dict[str, File] = {}
    for source in volume["projected"].get("sources") or []:
        result.update(_source_files(source, mode, sources, tokens))
    return result


def token_requests(volume: Json) -> list[tuple[str, int]]:
    """The (audience, seconds) pairs of the tokens that a volume projects."""
    sources = (volume.get("projected") or {}).get("sources") or []
    return [_token_request(source["serviceAccountToken"]) for source in sources if "serviceAccountToken" in source]


def _token_request(source: Json) -> tuple[str, int]:
    return source.get("audience") or "", source.get("expirationSeconds") or DEFAULT_TOKEN_LIFETIME_S


def _source_files(source: Json, mode: int, sources: Sources, tokens: Tokens) -> dict[str, File]:
    if "secret" in source:
        reference = source["secret"]
        return _keys("Secret", reference.get("secretName") or reference.get("name"), reference, mode, sources.lookup)
    if "configMap" in source:
        return _keys("ConfigMap", source["configMap"]["name"], source["configMap"], mode, sources.lookup)
    if "downwardAPI" in source:
        items = source["downwardAPI"].get("items") or []
        return {item["path"]: File(_downward(item, sources), item.get("mode") or mode) for item in items}
    if "serviceAccountToken" in source:
        token = source["serviceAccountToken"]
        return {token["path"]: File(tokens(*_token_request(token)).encode(), mode)}
    raise VolumeError(f"projected source {sorted(source)} is not offered by this node")


def _downward(item: Json, sources: Sources) -> bytes:
    if "fieldRef" in item:
        return field_value(sources.pod, item["fieldRef"]["fieldPath"], sources.facts).encode()
    return resource_value(sources.pod, item["resourceFieldRef"], sources.facts).encode()


def _keys(kind: str, name: str, reference: Json, mode: int, lookup: Lookup) -> dict[str, File]:
    found = lookup(kind, name)
    if found is None:
        if reference.get("optional"):
            return {}
        raise VolumeError(f'{kind.lower()} "{name}" not found')
    data = object_data(kind, found)
    items = reference.get("items")
    if not items:
        return {key: File(value, mode) for key, value in data.items()}
    missing = [item["key"] for item in items if item["key"] not in data]
    if missing and not reference.get("optional"):
        raise VolumeError(f'references non-existent key "{missing[0]}" of {kind.lower()} "{name}"')
    return {item["path"]: File(data[item["key"]], item.get("mode") or mode) for item in items if item["key"] in data}
