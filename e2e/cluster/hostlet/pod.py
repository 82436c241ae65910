"""Touches one pod: sets it up, runs its containers in order, reports its status, and ends it when it is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.hostlet.container import Container, Delays
from e2e.cluster.hostlet.environment import PodFacts, Sources, container_env
from e2e.cluster.hostlet.kube import STRATEGIC_PATCH, KubeRefused, KubeUnavailable
from e2e.cluster.hostlet.payload import VolumeError
from e2e.cluster.hostlet.sandbox import Mount
from e2e.cluster.hostlet.services import NodeServices
from e2e.cluster.hostlet.status import PodRecord, pod_phase, pod_status, recorded, seconds
from e2e.cluster.hostlet.tokens import PodTokens
from e2e.cluster.hostlet.volumes import Volumes

Json = dict[str, Any]

log = logging.getLogger(__name__)

_GATHER_S = 0.02
_RETRY_S = 0.5
_VOLUME_RETRY_FIRST_S = 0.5
_VOLUME_RETRY_MAX_S = 5.0
_NOT_FOUND, _CONFLICT = 404, 409
_TERMINAL = ("Succeeded", "Failed")
_FORCED_GRACE_S = 1.0


class Pod:
    """One pod from the moment the node learns of it until its object is gone; `run` is its whole life."""

    def __init__(self, node: NodeServices, pod: Json) -> None:
        self.node = node
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.namespace: str = pod["metadata"]["namespace"]
        self.name: str = pod["metadata"]["name"]
        self.sandbox = node.sandbox_of(pod)
        self.hostname: str = pod["spec"].get("hostname") or self.name[:63].rstrip("-.")
        self.stopping = asyncio.Event()
        self._gone = asyncio.Event()
        # The object is being deleted, or is gone.
        self._leaving = asyncio.Event()
        self._dirty = asyncio.Event()
        self._refresh = asyncio.Event()
        self._deadline: float | None = None
        self._sent: Json | None = None
        self.policy: str = pod["spec"].get("restartPolicy", "Always")
        self.grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        self._folder = node.run_dir / "pods" / self.uid
        self._logs = node.run_dir / "logs" / f"{self.namespace}_{self.name}_{self.uid}"
        self._volumes = Volumes(self._folder / "volumes", self._lookup, PodTokens(node.kube, pod))
        status = pod.get("status") or {}
        self._was_terminal = status.get("phase") in _TERMINAL
        self.record = self._recorded(status)
        delays = Delays(node.config.backoff_base_s, node.config.backoff_max_s)
        init_policy = {"Always": "OnFailure"}.get(self.policy, self.policy)
        self.init = [
            Container(self, spec, record, spec.get("restartPolicy") or init_policy, delays)
            for spec, record in zip(pod["spec"].get("initContainers") or [], self.record.init, strict=True)
        ]
        self.main = [
            Container(self, spec, record, spec.get("restartPolicy") or self.policy, delays)
            for spec, record in zip(pod["spec"]["containers"], self.record.main, strict=True)
        ]
        self.pod_ip = ""
        self._runs: list[asyncio.Task[None]] = []
        if pod["metadata"].get("deletionTimestamp"):
            self._begin_deletion()

    def _recorded(self, status: Json) -> PodRecord:
        spec = self.pod["spec"]
        inits = spec.get("initContainers") or []
        reason = "PodInitializing" if inits else "ContainerCreating"
        old = {each["name"]: each for each in status.get("containerStatuses") or []}
        old_init = {each["name"]: each for each in status.get("initContainerStatuses") or []}
        record = PodRecord(
            [recorded(each, old_init.get(each["name"]), init=True, reason="PodInitializing") for each in inits],
            [recorded(each, old.get(each["name"]), init=False, reason=reason) for each in spec["containers"]],
        )
        record.start_time = seconds(status.get("startTime")) or time.time()
        return record

    # What containers need (container.PodView).

    def image_argv(self, image: str) -> list[str] | None:
        """The entry point of an image by its name without tag or digest."""
        bare = image.partition("@")[0]
        head, _, last = bare.rpartition("/")
        name = last.partition(":")[0]
        return self.node.config.images.get(f"{head}/{name}" if head else name)

    def environment(self, spec: Json) -> dict[str, str]:
        """Base, service and own variables of a container."""
        links = self.pod["spec"].get("enableServiceLinks", True)
        services = self.node.service_env(self.namespace, links=links)
        return {
            **self.node.base_env,
            "HOSTNAME": self.hostname,
            **container_env(Sources(self.pod, self._facts(), self._lookup), spec, services),
        }

    def mounts(self, spec: Json, env: Mapping[str, str]) -> list[Mount]:
        """The container's volumes, and a hosts file that knows the pod's name."""
        hosts = self._folder / "etc-hosts"
        lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost", f"{self.pod_ip}\t{self.hostname}"]
        for alias in self.pod["spec"].get("hostAliases") or []:
            lines.append("\t".join([alias["ip"], *(alias.get("hostnames") or [])]))
        hosts.write_text("\n".join(lines) + "\n")
        return [Mount(hosts, "/etc/hosts"), *self._volumes.mounts(self.pod, spec, env)]

    def container_folder(self, name: str) -> Path:
        """The container's own folder, made when it is missing."""
        path: Path = self._folder / "containers" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log_path(self, name: str, restart: int) -> Path:
        """The log of one run of a container."""
        path = self._logs / name / f"{restart}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def changed(self) -> None:
        """The status is to be sent again."""
        self._dirty.set()

    def event(self, kind: str, reason: str, message: str) -> None:
        """Record an Event on this pod."""
        self.node.events.record(self.pod, kind, reason, message)

    def _facts(self) -> PodFacts:
        return PodFacts(self.pod_ip, self.node.address, self.node.allocatable)

    def _lookup(self, kind: str, name: str) -> Json | None:
        return self.node.objects.get(kind, self.namespace, name)

    # What the node tells.

    def update(self, pod: Json) -> None:
        """The pod's object has changed: labels, conditions, or a deletion."""
        before, self.pod = self.pod, pod
        if pod["metadata"].get("deletionTimestamp"):
            self._begin_deletion()
        kept = ("labels", "annotations")
        if any(before["metadata"].get(key) != pod["metadata"].get(key) for key in kept):
            self._refresh.set()
        if self._sent and readiness(pod["status"]) != readiness(self._sent):
            # Someone else wrote to our conditions, as the node controller does for a node that it has lost.
            self._sent = None
        self.changed()

    def removed(self) -> None:
        """The pod's object is gone without us (forced deletion)."""
        self._gone.set()
        self._leaving.set()
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + _FORCED_GRACE_S)
        self.stopping.set()

    def fail(self, reason: str, message: str, grace_s: float = 0.0) -> None:
        """End the pod as Failed for a reason of the node's."""
        if self.record.failure is None and not self._was_terminal:
            log.warning("%s/%s fails: %s: %s", self.namespace, self.name, reason, message)
            self.record.failure = (reason, message)
            self.event("Warning", reason, message)
            self._deadline = time.monotonic() + grace_s
            self.stopping.set()

    def _begin_deletion(self) -> None:
        grace_s = self.pod["metadata"].get("deletionGracePeriodSeconds")
        deadline = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
        self._deadline = min(self._deadline, deadline) if self._deadline is not None else deadline
        self._leaving.set()
        self.stopping.set()

    def remaining_s(self) -> float:
        return (self._deadline or 0.0) - time.monotonic()

    def containers(self) -> list[Container]:
        """All containers, init containers first."""
        return [*self.init, *self.main]

    # The life.

    async def run(self) -> None:
        """Live until the object is gone. When it is cancelled the processes are left: the node ends them."""
        async with asyncio.TaskGroup() as group:
            reporter = group.create_task(self._report())
            refresher = group.create_task(self._refresh_volumes())
            if not self._was_terminal:
                await self._live()
            await self._leaving.wait()
            refresher.cancel()
            reporter.cancel()
        if not self._gone.is_set():
            await self._finish()
        self._clean_up()

    async def _live(self) -> None:
        running = asyncio.create_task(self._run_containers())
        helpers = [asyncio.create_task(self._active_deadline()), asyncio.create_task(self._stop_when_told())]
        try:
            await running
            await self._stop_sidecars()
        finally:
            for task in [running, *helpers, *self._runs]:
                task.cancel()
        self.record.sandbox_ready = False
        self.record.ended = True
        self.node.objects.release(self.uid)
        self.changed()

    async def _run_containers(self) -> None:
        if not any(container.is_to_run() for container in self.main) or not await self._set_up():
            return
        for container in self.init:
            if not await self._run_init(container):
                return
        if not self.stopping.is_set():
            await asyncio.gather(*(self._run(container) for container in self.main))

    def _run(self, container: Container) -> asyncio.Task[None]:
        task = asyncio.create_task(container.run())
        self._runs.append(task)
        return task

    async def _set_up(self) -> bool:
        own = not self.pod["spec"].get("hostNetwork")
        self.pod_ip = self.node.addresses.take() if own else self.node.address
        self.record.host_ip = self.node.address
        self._folder.mkdir(parents=True, exist_ok=True)
        delay_s = _VOLUME_RETRY_FIRST_S
        self.changed()
        await self.node.objects.hold(self.pod, self._refresh.set)
        while not self.stopping.is_set():
            try:
                await self._volumes.set_up(self.pod, self._facts())
            except VolumeError as error:
                self.event("Warning", "FailedMount", str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self.stopping.wait()
                delay_s = min(delay_s * 2, _VOLUME_RETRY_MAX_S)
                continue
            self.record.sandbox_ready, self.record.pod_ip = True, self.pod_ip
            self.changed()
            return True
        return False

    async def _run_init(self, container: Container) -> bool:
        """Run one init container; says whether the next may start."""
        if self.stopping.is_set():
            return False
        task = self._run(container)
        if not container.record.sidecar:
            await task
            return container.record.succeeded()
        started = asyncio.create_task(container.has_started.wait())
        await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        return container.record.started

    async def _stop_when_told(self) -> None:
        await self.stopping.wait()
        for container in self.containers():
            if container.running and self.pod["metadata"].get("deletionTimestamp"):
                self.event("Normal", "Killing", f"Stopping container {container.name}")
        ordinary = [each for each in self.containers() if not each.record.sidecar]
        await asyncio.gather(*(each.stop(self.remaining_s) for each in ordinary))

    async def _stop_sidecars(self) -> None:
        # Sidecars end after the main containers, the last one first, and are not started again.
        sidecars = [each for each in reversed(self.init) if each.record.sidecar and each.running]
        if not sidecars:
            return
        if not self.stopping.is_set():
            self._deadline = time.monotonic() + self.grace_s
            self.stopping.set()
        for container in sidecars:
            await container.stop(self.remaining_s)
        await asyncio.gather(*self._runs)

    async def _active_deadline(self) -> None:
        limit_s = self.pod["spec"].get("activeDeadlineSeconds")
        if limit_s is not None:
            await asyncio.sleep(self.record.start_time + limit_s - time.time())
            message = "Pod was active on the node longer than the specified deadline"
            self.fail("DeadlineExceeded", message, self.grace_s)

    async def _refresh_volumes(self) -> None:
        while True:
            due_s = self._volumes.next_refresh_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._refresh.wait()
            await asyncio.sleep(self.node.config.volume_sync_delay_s + self.node.delays.volumes_s)
            self._refresh.clear()
            if not self.record.ended:
                await self._volumes.refresh(self.pod, self._facts())

    # Reporting.

    async def _report(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(_GATHER_S + self.node.delays.status_s)
            self._dirty.clear()
            if not self._was_terminal and not await self._send():
                await asyncio.sleep(_RETRY_S)
                self._dirty.set()

    async def _send(self) -> bool:
        """Send the status if it differs from the last one sent; says whether the server has it."""
        status = pod_status(self.pod, self.record, time.time())
        if status == self._sent or self._gone.is_set():
            return True
        body = {"metadata": {"uid": self.uid}, "status": _replacing_lists(status)}
        try:
            await self.node.kube.call("PATCH", f"{self._path()}/status", body, content=STRATEGIC_PATCH)
        except KubeUnavailable as error:
            log.debug("%s: status not sent: %s", self.name, error)
            return False
        except KubeRefused as refused:
            if refused.status in (_NOT_FOUND, _CONFLICT):
                return True
            log.warning("%s/%s: status refused: %s", self.namespace, self.name, refused)
            return False
        self._sent = status
        return True

    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    async def _finish(self) -> None:
        """Send the last status, then end the object."""
        await asyncio.sleep(self.node.delays.termination_s)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        sent = self._was_terminal
        while not self._gone.is_set():
            try:
                sent = sent or await self._send()
                if sent:
                    await self.node.kube.call("DELETE", self._path(), body)
                    return
            except KubeUnavailable as error:
                log.debug("%s: not deleted yet: %s", self.name, error)
            except KubeRefused as refused:
                if refused.status in (_NOT_FOUND, _CONFLICT):
                    return
                log.warning("%s/%s: deletion refused: %s", self.namespace, self.name, refused)
            await asyncio.sleep(_RETRY_S)

    def _clean_up(self) -> None:
        if self.pod_ip != self.node.address:
            self.node.addresses.give_back(self.pod_ip)
        self.node.objects.release(self.uid)
        self._volumes.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Faults.

    def signal_everything(self, number: signal.Signals) -> None:
        """Signal every process of every container."""
        for container in self.containers():
            container.kill(number)

    def phase(self) -> str:
        """The phase as it would be reported."""
        return pod_phase(self.record, self.policy)


def readiness(status: Json) -> dict[str, str]:
    """The statuses of the conditions that say whether a pod takes work."""
    conditions = status.get("conditions") or []
    return {each["type"]: each["status"] for each in conditions if each["type"] in ("Ready", "ContainersReady")}


def _replacing_lists(status: Json) -> Json:
    # These lists are merged by address in a strategic patch, which would keep an address of an earlier sandbox.
    replaced = {key: [{"$patch": "replace"}, *status[key]] for key in ("podIPs", "hostIPs")}
    return {**status, **replaced}
