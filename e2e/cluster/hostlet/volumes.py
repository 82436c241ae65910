"""Touches a pod's volumes: makes their folders, writes files in one atomic step, and says what is mounted where."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.hostlet.environment import ConfigError, Lookup, PodFacts, Sources, expand
from e2e.cluster.hostlet.payload import File, VolumeError, token_requests, volume_files
from e2e.cluster.hostlet.sandbox import Mount
from e2e.cluster.hostlet.tokens import PodTokens

Json = dict[str, Any]

log = logging.getLogger(__name__)

_WRITTEN = ("secret", "configMap", "downwardAPI", "projected")


class Volumes:
    """The volumes of one pod under `folder`."""

    def __init__(self, folder: Path, lookup: Lookup, tokens: PodTokens) -> None:
        self._folder = folder
        self._lookup = lookup
        self._tokens = tokens
        self._paths: dict[str, Path] = {}

    async def set_up(self, pod: Json, facts: PodFacts) -> None:
        """Make every volume; raises `VolumeError` naming the first that cannot be made."""
        for volume in pod["spec"].get("volumes") or []:
            try:
                self._paths[volume["name"]] = await self._make(volume, pod, facts)
            except (VolumeError, ConfigError) as error:
                raise VolumeError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}') from error

    async def refresh(self, pod: Json, facts: PodFacts) -> None:
        """Write what changed in secrets, config maps, labels, annotations and tokens."""
        for volume in pod["spec"].get("volumes") or []:
            if any(kind in volume for kind in _WRITTEN) and volume["name"] in self._paths:
                try:
                    await self._make(volume, pod, facts)
                except (VolumeError, ConfigError) as error:
                    log.warning("%s: volume %s keeps its files: %s", pod["metadata"]["name"], volume["name"], error)

    def next_refresh_s(self) -> float | None:
        """Seconds until the first token is to be renewed, None where no token is mounted."""
        return self._tokens.next_renewal_s()

    def remove(self) -> None:
        """Delete all files of the volumes."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _make(self, volume: Json, pod: Json, facts: PodFacts) -> Path:
        path: Path = self._folder / volume["name"]
        if "hostPath" in volume:
            try:
                return host_path(volume["hostPath"])
            except OSError as error:
                raise VolumeError(str(error)) from error
        if "emptyDir" in volume:
            return empty_dir(path)
        if not any(kind in volume for kind in _WRITTEN):
            raise VolumeError(f"volume kind {sorted(set(volume) - {'name'})} is not offered by this node")
        for audience, lifetime_s in token_requests(volume):
            await self._tokens.ensure(audience, lifetime_s)
        write_atomically(path, volume_files(volume, Sources(pod, facts, self._lookup), self._tokens.current))
        return path

    def mounts(self, pod: Json, container: Json, env: Mapping[str, str]) -> list[Mount]:
        """What the container sees where; raises `ConfigError` for a subPath that leads out of its volume."""
        kinds = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
        result = []
        for number, mount in enumerate(container.get("volumeMounts") or []):
            source = self._paths[mount["name"]]
            volume = kinds[mount["name"]]
            written = any(kind in volume for kind in _WRITTEN)
            part = mount.get("subPath") or expand(mount.get("subPathExpr") or "", env)
            if part:
                source = _below(source, part, create=not written)
            if part and written:
                # Mounted by subPath, a file stays as it was when the container started.
                source = _copied(source, self._folder.parent / "subpaths" / container["name"] / str(number))
            result.append(Mount(source, mount["mountPath"], bool(mount.get("readOnly")) or written))
        return result


def _below(source: Path, part: str, *, create: bool) -> Path:
    path = (source / part).resolve()
    if not path.is_relative_to(source.resolve()):
        raise ConfigError(f'subPath "{part}" leads out of the volume')
    if not path.exists():
        if not create:
            raise ConfigError(f'subPath "{part}" does not exist in the volume')
        path.mkdir(parents=True)
    return path


def _copied(source: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
    return target


def empty_dir(path: Path) -> Path:
    """The folder of an emptyDir volume: anyone may write there, and it outlives its containers."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)
    return path


def host_path(source: Json) -> Path:
    """The path of a hostPath volume, made where its type says so; raises `VolumeError` when it is of another type."""
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if kind == "FileOrCreate":
        path.touch()
    wants = {"Directory": path.is_dir, "DirectoryOrCreate": path.is_dir, "File": path.is_file}
    check = {**wants, "FileOrCreate": path.is_file, "Socket": path.is_socket, "": path.exists}
    if not check.get(kind, path.exists)():
        raise VolumeError(f"hostPath type check failed: {path} is not a {kind or 'path of this machine'}")
    return path


def write_atomically(folder: Path, files: Mapping[str, File]) -> bool:
    """Make `folder` hold exactly `files` in one step; says whether anything changed.

    The files stand in a folder of their own named after the time; `..data` points to it and is swapped by a rename,
    and each visible name is a link through `..data`, so a reader sees the old set or the new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "..data"
    if data.is_symlink() and _holds(data, files):
        return False
    stamp = time.time_ns()
    version = folder / time.strftime(f"..%Y_%m_%d_%H_%M_%S.{stamp % 10**9:09d}", time.gmtime(stamp // 10**9))
    for name, file in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(file.mode)
    version.mkdir(exist_ok=True)
    old = data.resolve() if data.is_symlink() else None
    swap = folder / "..data_tmp"
    swap.unlink(missing_ok=True)
    swap.symlink_to(version.name)
    swap.rename(data)
    tops = {Path(name).parts[0] for name in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(Path("..data") / top)
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if old:
        shutil.rmtree(old)
    return True


def _holds(data: Path, files: Mapping[str, File]) -> bool:
    present = {str(path.relative_to(data.resolve())): path for path in data.resolve().rglob("*") if path.is_file()}
    return present.keys() == {str(Path(name)) for name in files} and all(
        path.read_bytes() == files[name].data and path.stat().st_mode & 0o7777 == files[name].mode
        for name, path in present.items()
    )
