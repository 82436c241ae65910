"""Volumes: files of each kind, atomic writing, and how mount paths are found."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.hostlet.environment import PodFacts, Sources
from e2e.cluster.hostlet.namespaces import bwrap_arguments
from e2e.cluster.hostlet.payload import File, VolumeError, token_requests, volume_files
from e2e.cluster.hostlet.sandbox import Mount, translate
from e2e.cluster.hostlet.volumes import host_path, write_atomically

POD = {"metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "1"}}, "spec": {"containers": []}}
OBJECTS = {
    ("Secret", "s"): {"data": {"k": base64.b64encode(b"value").decode(), "j": ""}},
    ("ConfigMap", "m"): {"data": {"c": "plain"}},
}
SOURCES = Sources(POD, PodFacts("127.0.0.5", "127.0.0.1"), lambda kind, name: OBJECTS.get((kind, name)))
TOKEN = {"serviceAccountToken": {"path": "token", "expirationSeconds": 600, "audience": "a"}}


def files(volume: dict[str, Any]) -> dict[str, tuple[bytes, int]]:
    found = volume_files(volume, SOURCES, lambda audience, lifetime_s: f"token {audience} {lifetime_s}")
    return {name: (file.data, file.mode) for name, file in found.items()}


@pytest.mark.parametrize(
    ("name", "volume", "wanted"),
    [
        ("secret", {"secret": {"secretName": "s"}}, {"k": (b"value", 0o644), "j": (b"", 0o644)}),
        (
            "items",
            {
                "secret": {
                    "secretName": "s",
                    "defaultMode": 0o400,
                    "items": [{"key": "k", "path": "d/k", "mode": 0o600}],
                }
            },
            {"d/k": (b"value", 0o600)},
        ),
        ("config map", {"configMap": {"name": "m", "defaultMode": 0o440}}, {"c": (b"plain", 0o440)}),
        ("optional", {"configMap": {"name": "none", "optional": True}}, {}),
        (
            "downward",
            {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
            {"l": (b'a="1"', 0o644)},
        ),
        (
            "projected",
            {"projected": {"sources": [TOKEN, {"configMap": {"name": "m"}}, {"secret": {"name": "s"}}]}},
            {
                "token": (b"token a 600", 0o644),
                "c": (b"plain", 0o644),
                "k": (b"value", 0o644),
                "j": (b"", 0o644),
            },
        ),
    ],
)
def test_files_of_volumes(name: str, volume: dict[str, Any], wanted: dict[str, tuple[bytes, int]]) -> None:
    assert files(volume) == wanted


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"secret": {"secretName": "none"}}, 'secret "none" not found'),
        ({"secret": {"secretName": "s", "items": [{"key": "z", "path": "z"}]}}, 'non-existent key "z"'),
        ({"projected": {"sources": [{"clusterTrustBundle": {}}]}}, "is not offered"),
    ],
)
def test_missing_sources_are_errors(volume: dict[str, Any], message: str) -> None:
    with pytest.raises(VolumeError, match=message):
        files(volume)


def test_tokens_have_the_documented_default_lifetime() -> None:
    assert token_requests({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}) == [("", 3600)]


def test_a_folder_is_swapped_in_one_step(tmp_path: Path) -> None:
    assert write_atomically(tmp_path, {"a": File(b"1", 0o644), "d/b": File(b"1", 0o400)})
    first = (tmp_path / "..data").readlink()
    assert (tmp_path / "a").readlink() == Path("..data/a")
    assert not write_atomically(tmp_path, {"a": File(b"1", 0o644), "d/b": File(b"1", 0o400)})
    assert (tmp_path / "..data").readlink() == first
    assert write_atomically(tmp_path, {"c": File(b"2", 0o644)})
    assert sorted(each.name for each in tmp_path.iterdir() if not each.name.startswith("..")) == ["c"]
    assert (tmp_path / "c").read_bytes() == b"2"
    assert not (tmp_path / first).exists()


def test_a_changed_mode_is_a_change(tmp_path: Path) -> None:
    write_atomically(tmp_path, {"a": File(b"1", 0o644)})
    assert write_atomically(tmp_path, {"a": File(b"1", 0o400)})
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize(
    ("text", "translated"),
    [
        ("/etc/conf", "/vol/conf"),
        ("/etc/conf/file", "/vol/conf/file"),
        ("cat /etc/conf/a >/etc/conf/b", "cat /vol/conf/a >/vol/conf/b"),
        ("--file=/etc/conf", "--file=/vol/conf"),
        ("file:///etc/conf/model", "file:///vol/conf/model"),
        ("/etc/conf/deep/x", "/vol/deep/x"),
        ("/etc/config", "/etc/config"),
        ("/etc/conf.d", "/etc/conf.d"),
        ("/other/etc/conf", "/other/etc/conf"),
        ("./etc/conf", "./etc/conf"),
    ],
)
def test_paths_are_translated_where_they_stand_alone(text: str, translated: str) -> None:
    mounts = [Mount(Path("/vol/conf"), "/etc/conf"), Mount(Path("/vol/deep"), "/etc/conf/deep/")]
    assert translate(text, mounts) == translated


def test_a_mount_path_that_is_not_there_is_made_in_memory_only() -> None:
    arguments = bwrap_arguments([(Path("/src"), "/usr/no-such-folder/deep", True)])
    assert arguments[:3] == ["--dev-bind", "/", "/"]
    at = arguments.index("--tmpfs")
    assert arguments[at + 1] == "/usr"
    assert arguments[(i := arguments.index("/usr/bin") - 1) : i + 3] == ["--dev-bind", "/usr/bin", "/usr/bin"]
    assert arguments[-3:] == ["--ro-bind", "/src", "/usr/no-such-folder/deep"]


def test_a_mount_path_at_the_top_leaves_the_root_alone() -> None:
    arguments = bwrap_arguments([(Path("/src"), "/no-such-top", False)])
    assert arguments[:3] != ["--dev-bind", "/", "/"]
    assert "/usr" in arguments
    assert arguments[-3:] == ["--bind", "/src", "/no-such-top"]


def test_links_of_this_machine_are_followed() -> None:
    run = os.path.realpath("/var/run")
    arguments = bwrap_arguments([(Path("/src"), "/var/run/no-such/x", True)])
    assert arguments[-1] == f"{run}/no-such/x"
    assert arguments[arguments.index("--tmpfs") + 1] == run


@pytest.mark.parametrize(("kind", "fails"), [("", False), ("File", False), ("Directory", True), ("Socket", True)])
def test_host_paths_are_checked(tmp_path: Path, kind: str, fails: bool) -> None:
    path = tmp_path / "file"
    path.touch()
    if fails:
        with pytest.raises(VolumeError, match="type check failed"):
            host_path({"path": str(path), "type": kind})
    else:
        assert host_path({"path": str(path), "type": kind}) == path
    assert host_path({"path": str(tmp_path / "new"), "type": "DirectoryOrCreate"}).is_dir()
