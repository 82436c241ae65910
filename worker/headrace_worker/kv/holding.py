"""The scheduler's half of the proof: gives a held request its nonce, and takes it back before its blocks are freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from headrace_worker.kv.proof import Nonces, Proof

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class ProvableRemote(RemoteMeta):  # type: ignore[misc]
    """Where KV lies, and what proves that it still does."""

    proof: Proof | None = None


class HoldingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """vLLM's pull scheduler; requests that it holds, and those that it receives, carry a proof."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._nonces = Nonces.shared(engine_id, kv_cache_config.num_blocks)
        self._slots: dict[str, int] = {}

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Begins to answer handshakes. Every rank has registered its memory by then, so the file's name can go."""
        Nonces.forget(self.engine_id)
        super().set_xfer_handshake_metadata(metadata)

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Adds a proof to the handle of a request that is held for a decode worker."""
        held, params = super().request_finished(request, block_ids)
        if held and params is not None:
            # Its last block is in no other request's last place: a prefix of it may be shared, the whole never is.
            proof = Proof.fresh(next(group[-1] for group in block_ids if group))
            self._slots[request.request_id] = proof.slot
            self._nonces.write(proof)
            params |= proof.as_params()
        return held, params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes the proof from requests that were sent or whose lease has ended: vLLM frees their blocks after this."""
        for request_id in connector_output.finished_sending or ():
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._nonces.clear(slot)
        super().update_connector_output(connector_output)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Tells the ranks what to pull, and what must be found beside it."""
        proofs = {
            request_id: Proof.from_params(request.kv_transfer_params)
            for request_id, (request, *_) in self._reqs_need_recv.items()
        }
        metadata = super().build_connector_meta(scheduler_output)
        for request_id, receive in metadata.reqs_to_recv.items():
            receive.remote = ProvableRemote(**vars(receive.remote), proof=proofs[request_id])
        return metadata
