"""The KV connector that vLLM loads: its own NIXL pull connector, with Headrace's two sides.

The class keeps vLLM's name, because vLLM compares it in several places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

from headrace_worker.kv.rank_side import RankSide
from headrace_worker.kv.scheduler_side import SchedulerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """A pull connector that frees on request, and that knows its KV again."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Not the pull connector's own: it would make vLLM's sides, and with them a second NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SchedulerSide(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = RankSide(vllm_config, self.engine_id, kv_cache_config)
