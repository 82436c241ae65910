"""Runs the hostlet: `python -m e2e.cluster.hostlet --config FILE` offers the nodes of the file until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from e2e.cluster.hostlet.environment import service_env
from e2e.cluster.hostlet.faults import ControlServer
from e2e.cluster.hostlet.guard import guard
from e2e.cluster.hostlet.kube import Kube
from e2e.cluster.hostlet.node import Node
from e2e.cluster.hostlet.pod import Pod
from e2e.cluster.hostlet.proxy import ServiceProxy
from e2e.cluster.hostlet.sandbox import choose_sandbox
from e2e.cluster.hostlet.server import KubeletServer
from e2e.cluster.hostlet_config import HostletConfig

log = logging.getLogger("hostlet")

_HTTPS_PORT = 443


class Hostlet:
    """All nodes of one settings file, with their servers, and the service proxy."""

    def __init__(self, config: HostletConfig) -> None:
        self.config = config
        url = urlsplit(config.apiserver)
        self._apiserver = (url.hostname or "", url.port or _HTTPS_PORT)
        self.proxy = ServiceProxy(Kube.from_kubeconfig(config.proxy_kubeconfig), config.service_cidr, self._apiserver)
        self.nodes: dict[str, Node] = {}
        self.sandbox_name = ""
        self._servers: dict[str, KubeletServer] = {}
        self._group: asyncio.TaskGroup | None = None
        self._works: dict[str, asyncio.Task[None]] = {}

    def _make_folder(self) -> Path:
        folder = Path(self.config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _service_env(self, namespace: str, *, links: bool) -> dict[str, str]:
        return service_env(self.proxy.services(), namespace, self._apiserver, links=links)

    def _pods(self) -> Iterable[Pod]:
        return [pod for node in self.nodes.values() for pod in node.pods.values()]

    async def run(self) -> None:
        """Offer the nodes until cancelled."""
        sandbox = await choose_sandbox(self.config.sandbox)
        self.sandbox_name = sandbox.name
        control = ControlServer(self, self._make_folder() / "control.sock")
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.proxy.run())
                await self.proxy.services_known.wait()
                for node in self.config.nodes:
                    self.nodes[node.name] = Node(self.config, node, sandbox, self._service_env)
                    self._servers[node.name] = KubeletServer(self.nodes[node.name])
                    await self.restore(node.name)
                group.create_task(guard(self._pods, self.config.bind_check_s))
                await control.start()
                log.info("offers %s", ", ".join(self.nodes))
        finally:
            await control.stop()
            for name in self.nodes:
                await self.lose(name)

    async def lose(self, name: str) -> None:
        """End a node's work at once, without telling the API server."""
        work = self._works.pop(name, None)
        if work:
            work.cancel()
            await asyncio.wait([work])
            await self._servers[name].stop()

    async def restore(self, name: str) -> None:
        """Begin a node's work."""
        if self._group and name not in self._works:
            await self._servers[name].start()
            self._works[name] = self._group.create_task(self.nodes[name].run())


async def _until_told(config: HostletConfig) -> None:
    work = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: work.cancel() if work else None)
    try:
        await Hostlet(config).run()
    except asyncio.CancelledError:
        log.info("ends; its pods end with it")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.hostlet", description=__doc__)
    parser.add_argument("--config", required=True, help="JSON file written by HostletConfig.save")
    parser.add_argument("--verbose", action="store_true", help="also log what is tried again")
    options = parser.parse_args()
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    asyncio.run(_until_told(HostletConfig.load(options.config)))


if __name__ == "__main__":
    main()
