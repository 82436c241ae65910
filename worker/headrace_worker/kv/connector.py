"""vLLM's NIXL connector with an agent whose progress thread sleeps between its looks.

NIXL's progress thread polls without a pause and takes a whole core of an idle worker. vLLM hands no delay through, so
the agent is built here. The class keeps vLLM's name: vLLM compares it in several places.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.nixl_utils import NixlWrapper

from headrace_worker.kv.holding import HoldingScheduler
from headrace_worker.kv.pulling import ProvingWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PROGRESS_DELAY_US: Final = 100
"""Pause of the progress thread: 2 % of a core instead of all of it, and far less than a transfer takes."""


class SleepingAgent(NixlWrapper):  # type: ignore[misc]
    """A NIXL agent whose progress thread pauses between two polls."""

    def __init__(self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False) -> None:
        nixl = sys.modules[NixlWrapper.__module__]
        bindings = nixl.nixlBind
        nixl.nixlBind = _BindingsWithDelay(bindings)  # type: ignore[attr-defined]
        try:
            super().__init__(agent_name, nixl_conf, instantiate_all)
        finally:
            nixl.nixlBind = bindings  # type: ignore[attr-defined]

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"", **kwargs: Any) -> Any:  # noqa: ARG002
        """Prepares a transfer of KV, without its notification: that goes with the nonce (`ProvingWorker`)."""
        return super().make_prepped_xfer(*args, **kwargs)


class _BindingsWithDelay:
    """NIXL's bindings, but a new agent gets its pause: `nixl_agent` fixes it at zero just before it makes one."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull connector over a `SleepingAgent`, whose pulls are proven."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        base_worker.NixlWrapper = SleepingAgent
        # Not the pull connector's own constructor: it would make a second agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HoldingScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = ProvingWorker(vllm_config, self.engine_id, kv_cache_config)
