"""The scheduler's side of the connector: gives each prefill a nonce, and says which nonce a read must find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from headrace_worker.kv.nonce import PARAM, Nonce, Slots, slots_needed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

LONG_AGO = 0.0
"""A lease that ended at the start of the clock."""


@dataclass
class Payload(NixlHandshakePayload):  # type: ignore[misc]
    """What a rank tells its scheduler, and other workers. Those of a plain vLLM skip the field they do not know."""

    nonce_area: int = 0
    """Address of the rank's first nonce."""


@dataclass(slots=True)
class NonceOrders:
    """What the ranks have to do about nonces in one step, wiping first."""

    wipe: set[str] = field(default_factory=set)
    write: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Slot and number by request."""
    expect: dict[str, Nonce] = field(default_factory=dict)
    """By the reading request."""


class SchedulerSide(NixlPullConnectorScheduler):  # type: ignore[misc]
    """vLLM's scheduler side of the pull connector, with nonces, and with a way to end a lease."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._slots = Slots(slots_needed(kv_cache_config.num_blocks, vllm_config.scheduler_config.max_num_seqs))
        self._orders = NonceOrders()

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes in where each rank keeps its nonces. Ranks of later pipeline stages are never read from."""
        self._slots.areas = {tp: payload.nonce_area for (pp, tp), payload in metadata.items() if pp == 0}
        super().set_xfer_handshake_metadata(metadata)

    def end_lease(self, request_id: str) -> None:
        """Has the ranks treat a finished prefill as fetched, in the next step."""
        self._reqs_need_send[request_id] = LONG_AGO

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A prefill gets its nonce together with its first blocks; a read learns which it must find."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._orders.write[request.request_id] = self._slots.take(request.request_id)
        elif params.get("do_remote_prefill") and num_external_tokens and (nonce := Nonce.from_params(params)):
            self._orders.expect[request.request_id] = nonce
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Puts the nonce into the handle of KV that is held, and takes it back where nothing is held."""
        is_held, handle = super().request_finished(request, block_ids)
        if not is_held:
            self._retire(request.request_id)
        elif handle is not None and (nonce := self._slots.nonce(request.request_id)) is not None:
            handle = handle | {PARAM: nonce.as_param()}
        return is_held, handle

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes back the nonces of what was fetched, or whose lease ended."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self._retire(request_id)

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        """Sends the ranks their orders with the step."""
        meta = super().build_connector_meta(scheduler_output)
        meta.nonce_orders, self._orders = self._orders, NonceOrders()
        return meta

    def _retire(self, request_id: str) -> None:
        self._orders.write.pop(request_id, None)
        if self._slots.give_back(request_id) is not None:
            self._orders.wipe.add(request_id)
