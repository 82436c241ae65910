"""Touches one node: its object, conditions and lease, and the pods that are bound to it."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from e2e.cluster.build import KUBERNETES_VERSION
from e2e.cluster.hostlet.events import Events
from e2e.cluster.hostlet.kube import STRATEGIC_PATCH, Kube, KubeError, KubeRefused, KubeUnavailable, reflect
from e2e.cluster.hostlet.objects import ObjectCache
from e2e.cluster.hostlet.pod import Pod
from e2e.cluster.hostlet.sandbox import PathSandbox, Sandbox
from e2e.cluster.hostlet.services import Addresses, NodeServices
from e2e.cluster.hostlet.status import timestamp
from e2e.cluster.hostlet_config import HostletConfig, NodeConfig

Json = dict[str, Any]

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_STATUS_EVERY_LEASES = 6
_LEASE_DURATION_S = 40
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CONFLICT, _NOT_FOUND = 409, 404
# Condition -> (status, reason, message), as a kubelet in good health says.
_CONDITIONS = {
    "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
}


def node_labels(config: NodeConfig) -> dict[str, str]:
    """The labels a node gives itself."""
    labels = {
        "kubernetes.io/hostname": config.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        **config.labels,
    }
    if config.zone:
        labels["topology.kubernetes.io/zone"] = config.zone
    if config.accelerator:
        labels["nvidia.com/gpu.product"] = config.accelerator
    return labels


def node_capacity(config: NodeConfig) -> dict[str, str]:
    """The resources a node offers; nothing is kept back, so allocatable is the same."""
    capacity = {
        "cpu": config.cpu,
        "memory": config.memory,
        "pods": str(config.pods),
        "ephemeral-storage": "100Gi",
    }
    if config.gpus:
        capacity["nvidia.com/gpu"] = str(config.gpus)
    return capacity


def node_status(config: NodeConfig, since: float, now: float) -> Json:
    """A node's whole status; `since` is when it became ready, both in seconds since the epoch."""
    capacity = node_capacity(config)
    return {
        "capacity": capacity,
        "allocatable": capacity,
        "addresses": [{"type": "InternalIP", "address": config.address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": config.kubelet_port}},
        "nodeInfo": {
            "architecture": node_labels(config)["kubernetes.io/arch"],
            "bootID": "",
            "containerRuntimeVersion": "hostlet://1",
            "kernelVersion": platform.release(),
            "kubeProxyVersion": "",
            "kubeletVersion": KUBERNETES_VERSION,
            "machineID": "",
            "operatingSystem": "linux",
            "osImage": "hostlet",
            "systemUUID": "",
        },
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": timestamp(now),
                "lastTransitionTime": timestamp(since),
            }
            for kind, (status, reason, message) in _CONDITIONS.items()
        ],
    }


class Node:
    """One node; `run` offers it until it is cancelled, and cancelling it is losing it."""

    def __init__(
        self,
        config: HostletConfig,
        node: NodeConfig,
        sandbox: Sandbox,
        service_env: Callable[..., dict[str, str]],
    ) -> None:
        self.config = node
        self._settings = config
        self.kube = Kube.from_kubeconfig(node.kubeconfig)
        self.services = NodeServices(
            config=config,
            address=node.address,
            allocatable=node_capacity(node),
            run_dir=Path(config.run_dir) / node.name,
            base_env=base_env(config),
            sandbox=sandbox,
            path_sandbox=PathSandbox(),
            kube=self.kube,
            objects=ObjectCache(self.kube),
            events=Events(self.kube, node.name),
            addresses=Addresses(node.pod_cidr),
            service_env=service_env,
        )
        self.pods: dict[str, Pod] = {}
        # Pods live in the group that also keeps the lease: an error of ours in one ends the node, and is seen.
        self._group: asyncio.TaskGroup | None = None
        self._since = time.time()
        self.online = False

    async def run(self) -> None:
        """Register, then keep the lease, the events and the pods going."""
        self._since = time.time()
        try:
            await self._register()
            self.online = True
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._heartbeat())
                group.create_task(self.services.events.run())
                group.create_task(self._follow_pods())
        finally:
            self.online = False
            self._drop_pods()

    def _drop_pods(self) -> None:
        """The node is lost: its processes end at once, and nobody is told."""
        for pod in self.pods.values():
            pod.signal_everything(signal.SIGKILL)
            self.services.objects.release(pod.uid)
        self.pods.clear()
        self.services.addresses = Addresses(self.config.pod_cidr)

    # The node's object.

    async def _register(self) -> None:
        path, name = "/api/v1/nodes", self.config.name
        body = {
            "metadata": {"name": name, "labels": node_labels(self.config)},
            "spec": {"podCIDR": self.config.pod_cidr, "podCIDRs": [self.config.pod_cidr]},
        }
        while True:
            try:
                try:
                    await self.kube.call("POST", path, body)
                except KubeRefused as refused:
                    if refused.status != _CONFLICT:
                        raise
                    labels = {"metadata": {"labels": node_labels(self.config)}}
                    await self.kube.call("PATCH", f"{path}/{name}", labels, content=STRATEGIC_PATCH)
                await self._renew_lease()
                await self._send_status()
            except KubeError as error:
                log.info("node %s is not registered yet: %s", name, error)
                await asyncio.sleep(_RETRY_S)
            else:
                log.info("node %s is registered", name)
                return

    async def _send_status(self) -> None:
        status = {"status": node_status(self.config, self._since, time.time())}
        await self.kube.call("PATCH", f"/api/v1/nodes/{self.config.name}/status", status, content=STRATEGIC_PATCH)

    async def _heartbeat(self) -> None:
        beat = 0
        while True:
            await asyncio.sleep(self._settings.lease_renew_s)
            beat += 1
            try:
                await self._renew_lease()
                if beat % _STATUS_EVERY_LEASES == 0 or not await self._looks_ready():
                    await self._send_status()
            except KubeUnavailable as error:
                log.debug("heartbeat of %s: %s", self.config.name, error)
            except KubeRefused as refused:
                log.warning("heartbeat of %s: %s", self.config.name, refused)
                if refused.status == _NOT_FOUND:
                    await self._register()

    async def _looks_ready(self) -> bool:
        node = await self.kube.call("GET", f"/api/v1/nodes/{self.config.name}", params={"resourceVersion": "0"})
        conditions = (node.get("status") or {}).get("conditions") or []
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    async def _renew_lease(self) -> None:
        name = self.config.name
        renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_DURATION_S, "renewTime": renewed}
        try:
            await self.kube.call("PATCH", f"{_LEASES}/{name}", {"spec": spec}, content=STRATEGIC_PATCH)
        except KubeRefused as refused:
            if refused.status != _NOT_FOUND:
                raise
            await self.kube.call("POST", _LEASES, {"metadata": {"name": name}, "spec": spec})

    # Its pods.

    async def _follow_pods(self) -> None:
        await reflect(
            self.kube,
            "/api/v1/pods",
            params={"fieldSelector": f"spec.nodeName={self.config.name}"},
            on_list=self._pods_listed,
            on_event=self._pod_changed,
        )

    def _pods_listed(self, pods: list[Json]) -> None:
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid, pod in list(self.pods.items()):
            if uid not in present:
                pod.removed()
        for each in pods:
            self._pod_changed("MODIFIED", each)
        for folder in (self.services.run_dir / "pods").glob("*"):
            if folder.name not in self.pods:
                shutil.rmtree(folder, ignore_errors=True)

    def _pod_changed(self, event: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        known = self.pods.get(uid)
        if event == "DELETED":
            if known:
                known.removed()
        elif known:
            known.update(pod)
        elif self._group:
            self.pods[uid] = Pod(self.services, pod)
            self._group.create_task(self._live(self.pods[uid]))

    async def _live(self, pod: Pod) -> None:
        await pod.run()
        del self.pods[pod.uid]

    def find(self, namespace: str, name: str) -> Pod | None:
        """The pod of that name which runs here."""
        return next((pod for pod in self.pods.values() if (pod.namespace, pod.name) == (namespace, name)), None)


def base_env(config: HostletConfig) -> dict[str, str]:
    """What every container's environment starts from: this machine's search path and home, and the settings' own."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        **config.env,
    }
