"""A rank's side of the connector: keeps the nonces of its prefills, and looks for the nonce after each read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger

from headrace_worker.kv.agent import Agent, transfer_errors
from headrace_worker.kv.nonce import NOTHING, SLOT_BYTES, Area, Inbox, Nonce, slots_needed
from headrace_worker.kv.scheduler_side import NonceOrders, Payload

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")

INBOX_SLOTS: Final = 4096
"""Reads of nonces in flight at once: each takes a fraction of a millisecond."""


@dataclass(slots=True)
class Look:
    """One read of a nonce: from which rank of the prefill worker, and what to tell it if the number is right."""

    agent: str
    address: int | None
    """None: the handle names no place for this rank."""
    notification: bytes
    """Empty: vLLM says it itself, once the request counts as received."""
    inbox_slot: int | None = None
    handle: Any = None


class RankSide(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's rank side of the pull connector, over an `Agent`, with nonces."""

    xfer_handshake_metadata: Any

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        base_worker.NixlWrapper = Agent
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._area = Area(slots_needed(kv_cache_config.num_blocks, vllm_config.scheduler_config.max_num_seqs))
        self._inbox = Inbox(INBOX_SLOTS)
        self._transfer_errors = transfer_errors()
        self._expected: dict[str, Nonce] = {}
        self._to_look: dict[str, list[Look]] = defaultdict(list)
        """Reads of KV in flight, by request."""
        self._looking: dict[str, list[Look]] = {}
        """Requests whose KV is here, and whose nonces are on their way."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the nonces' memory, too, and tells where it is."""
        for memory in (self._area, self._inbox):
            descriptors = self.nixl_wrapper.get_reg_descs([(memory.address, memory.size, 0, "")], "DRAM")
            self.nixl_wrapper.register_memory(descriptors, backends=self.nixl_backends)
            self._registered_descs.append(descriptors)
        super().register_kv_caches(kv_caches)
        payload = self.xfer_handshake_metadata
        self.xfer_handshake_metadata = Payload(
            compatibility_hash=payload.compatibility_hash,
            agent_metadata_bytes=payload.agent_metadata_bytes,
            nonce_area=self._area.address,
        )

    def start_load_kv(self, metadata: Any) -> None:
        """Follows the step's orders before any block of it is computed or read."""
        orders: NonceOrders = metadata.nonce_orders
        for request_id in orders.wipe:
            self._area.wipe(request_id)
        for request_id, (slot, value) in orders.write.items():
            self._area.write(request_id, slot, value)
        self._expected |= orders.expect
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Wipes the nonces of what was sent before the scheduler hears of it and frees the blocks."""
        results = super().get_transfer_results()
        for request_id in results.finished_sending:
            self._area.wipe(request_id)
        for request_id in results.finished_recving:
            self._expected.pop(request_id, None)
            self._to_look.pop(request_id, None)
        return results

    def _read_blocks(self, *, request_id: str, read_spec: Any, dst_engine_id: str, **kwargs: Any) -> bool:
        nonce = self._expected.get(request_id)
        if nonce is None:
            return bool(
                super()._read_blocks(request_id=request_id, read_spec=read_spec, dst_engine_id=dst_engine_id, **kwargs)
            )
        # The word that the read is over frees the blocks over there: it must wait until the nonce was seen.
        with self.nixl_wrapper.withholding_notifications() as withheld:
            posted = super()._read_blocks(
                request_id=request_id, read_spec=read_spec, dst_engine_id=dst_engine_id, **kwargs
            )
        if not withheld and self._pending_recv_notifs.get(request_id):
            withheld.append(b"")  # a read that was split over two kinds of memory: vLLM's own word waits already
        agent = self._remote_agents[dst_engine_id][(0, read_spec.remote_rank)]
        for notification in withheld:
            self._to_look[request_id].append(Look(agent, nonce.addresses.get(read_spec.remote_rank), notification))
        return bool(posted)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        arrived, failed = super()._pop_done_transfers(transfers)
        if transfers is not self._recving_transfers:
            return arrived, failed
        done = set()
        for request_id in arrived:
            looks = self._to_look.pop(request_id, [])
            if not looks or request_id in failed or request_id in self._recv_failures:
                done.add(request_id)
            else:
                self._looking[request_id] = looks
        for request_id, looks in list(self._looking.items()):
            verdict = self._look(request_id, looks)
            if verdict is not None:
                del self._looking[request_id]
                done.add(request_id)
                if not verdict:
                    failed.add(request_id)
        return done, failed

    def _look(self, request_id: str, looks: list[Look]) -> bool | None:
        """Whether all nonces are right; None while some are still on their way."""
        try:
            if not all(self._has_arrived(look) for look in looks):
                return None
        except self._transfer_errors as error:
            logger.warning("The nonce for %s could not be read: %r", request_id, error)
            self._close(request_id, looks)
            return False
        expected = self._expected[request_id].value
        if any(number != expected for number in self._close(request_id, looks)):
            logger.warning("KV for %s was read after its prefill worker had given the blocks away.", request_id)
            return False
        for look in looks:
            if look.notification:
                self._tell(look)
        return True

    def _has_arrived(self, look: Look) -> bool:
        if look.address is None:
            return True
        if look.handle is None:
            look.inbox_slot = self._inbox.open()
            if look.inbox_slot is None:
                return False
            here = (self._inbox.address + look.inbox_slot * SLOT_BYTES, SLOT_BYTES, 0)
            look.handle = self.nixl_wrapper.initialize_xfer(
                "READ",
                self.nixl_wrapper.get_xfer_descs([here], "DRAM"),
                self.nixl_wrapper.get_xfer_descs([(look.address, SLOT_BYTES, 0)], "DRAM"),
                look.agent,
            )
            self.nixl_wrapper.transfer(look.handle)
        # An error state is an arrival, too: what it leaves in the inbox is no nonce.
        return bool(self.nixl_wrapper.check_xfer_state(look.handle) != "PROC")

    def _close(self, request_id: str, looks: list[Look]) -> list[int]:
        """Ends the reads, and returns what they found."""
        found = []
        for look in looks:
            # A read that cannot be ended may still write: its slot in the inbox is given up.
            ended = look.handle is None or self._try_release_xfer_handle(request_id, look.handle)
            found.append(self._inbox.close(look.inbox_slot) if ended and look.inbox_slot is not None else NOTHING)
        return found

    def _tell(self, look: Look) -> None:
        """Lets the prefill worker free its blocks. If it cannot hear, its lease frees them: the KV is here."""
        try:
            self.nixl_wrapper.send_notif(look.agent, notif_msg=look.notification)
        except self._transfer_errors as error:
            logger.warning("%s was not told that its KV is here: %r", look.agent, error)
            self.xfer_stats.record_failed_notification()
