"""A rank's half of the proof: reads the nonce once the KV is there, and reports KV without it as not received."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from nixl._api import nixlBind
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from headrace_worker.kv.proof import Nonces, Proof, place

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

MAX_CHECKS: Final = 4096
"""Nonces that are read at the same time; more wait for the next look."""
PATIENCE_S: Final = 0.0005
"""How long a step waits for nonces that are under way. They take about half of it, the next step may be far off."""
NIXL_ERRORS: Final = (
    nixlBind.nixlBackendError,
    nixlBind.nixlCancelledError,
    nixlBind.nixlInvalidParamError,
    nixlBind.nixlNotFoundError,
    nixlBind.nixlRemoteDisconnectError,
)


@dataclass
class AgentMetadata(NixlAgentMetadata):  # type: ignore[misc]
    """What a rank says of itself in a handshake, and where its nonces begin."""

    nonces_address: int = 0


@dataclass(slots=True)
class _Check:
    """The nonce read of one request at one remote rank."""

    handle: Any
    slot: int
    """Where it is read to."""
    expected: bytes


class ProvingWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's pull worker, but the prefill worker hears that its KV was read only with the read of the nonce.

    Its agent must withhold the notification of the KV's own read: see `connector.SleepingAgent`.
    """

    xfer_handshake_metadata: Any

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        base_worker.NixlAgentMetadata = AgentMetadata  # what a handshake is decoded into
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._nonces = Nonces.shared(engine_id, kv_cache_config.num_blocks)
        self._read = Nonces.private(MAX_CHECKS)
        self._free_slots = list(range(MAX_CHECKS))
        self._remote_nonces: dict[str, int] = {}
        """Address of the nonces by name of the remote agent."""
        self._arrived: set[str] = set()
        """Requests whose KV is here, unproven."""
        self._checks: dict[str, list[_Check]] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the nonces with NIXL beside the KV, and says in the handshake where they are."""
        memory = [(nonces.address, nonces.size, 0, "") for nonces in (self._nonces, self._read)]
        descriptors = self.nixl_wrapper.get_reg_descs(memory, "DRAM")
        self.nixl_wrapper.register_memory(descriptors, backends=self.nixl_backends)
        self._registered_descs.append(descriptors)
        super().register_kv_caches(kv_caches)
        payload = self.xfer_handshake_metadata
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes)
        metadata["nonces_address"] = self._nonces.address
        self.xfer_handshake_metadata = NixlHandshakePayload(
            compatibility_hash=payload.compatibility_hash, agent_metadata_bytes=msgspec.msgpack.encode(metadata)
        )

    def add_remote_agent(self, nixl_agent_meta: AgentMetadata, *args: Any, **kwargs: Any) -> str:
        """Takes in a prefill worker's rank.

        Raises:
            RuntimeError: it offers no nonces, so nothing it sends could be proven.
        """
        if not nixl_agent_meta.nonces_address:
            raise RuntimeError(f"engine {nixl_agent_meta.engine_id} offers no nonces: it is no Headrace worker")
        name: str = super().add_remote_agent(nixl_agent_meta, *args, **kwargs)
        self._remote_nonces[name] = nixl_agent_meta.nonces_address
        return name

    def shutdown(self) -> None:
        """Gives up the checks under way, and with them all else."""
        for request_id in list(getattr(self, "_checks", ())):  # none when it failed while it was made
            self._end(request_id)
        super().shutdown()

    def _cleanup_remote_engine(self, engine_id: str, **kwargs: Any) -> None:
        names = list(self._remote_agents[engine_id].values())
        super()._cleanup_remote_engine(engine_id, **kwargs)
        for name in names:
            self._remote_nonces.pop(name, None)

    def _read_blocks(self, **read: Any) -> bool:
        posted: bool = super()._read_blocks(**read)
        if posted and not self._mixed_mem_types and any(read["read_spec"].local_block_ids):
            # vLLM keeps a notification for later where it splits a read; here every one is kept for the nonce's read.
            agent = self._remote_agents[read["dst_engine_id"]][(0, read["read_spec"].remote_rank)]
            message = f"{read['remote_request_id']}:{read['expected_consumers']}".encode()
            self._pending_recv_notifs.setdefault(read["request_id"], []).append((agent, message))
        return posted

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """The requests whose KV is here and proven, and those where either failed.

        An unproven one stays in `transfers` without handles, so that it counts as under way.
        """
        done, failed = super()._pop_done_transfers(transfers)
        self._arrived |= {
            request_id
            for request_id in done
            if request_id in self._pending_recv_notifs and request_id not in failed | self._recv_failures
        }
        self._begin_checks(failed)
        deadline = time.perf_counter() + PATIENCE_S
        proven = self._finish_checks(failed)
        while self._checks and time.perf_counter() < deadline:
            proven |= self._finish_checks(failed)
        for request_id in self._arrived:
            transfers[request_id] = []
        return (done | proven | failed) - transfers.keys(), failed

    def _begin_checks(self, failed: set[str]) -> None:
        for request_id in self._arrived - self._checks.keys():
            if len(self._pending_recv_notifs[request_id]) > len(self._free_slots):
                return
            proof = self._recving_metadata[request_id].remote.proof
            if proof is None:
                self._fail(request_id, failed, "its handle carries no proof")
                continue
            try:
                self._begin_check(request_id, proof)
            except NIXL_ERRORS as error:
                self._fail(request_id, failed, f"its nonce could not be asked for: {error!r}")

    def _begin_check(self, request_id: str, proof: Proof) -> None:
        checks = self._checks[request_id] = []
        for agent, message in self._pending_recv_notifs[request_id]:
            slot = self._free_slots.pop()
            self._read.clear(slot)
            local = self.nixl_wrapper.get_xfer_descs([self._read.place(slot)], "DRAM")
            there = self.nixl_wrapper.get_xfer_descs([place(self._remote_nonces[agent], proof.slot)], "DRAM")
            handle = self.nixl_wrapper.initialize_xfer("READ", local, there, agent, message)
            checks.append(_Check(handle, slot, proof.nonce))
            self.nixl_wrapper.transfer(handle)

    def _finish_checks(self, failed: set[str]) -> set[str]:
        """Looks at every nonce that is under way; returns the requests that are proven."""
        proven = set()
        for request_id, checks in list(self._checks.items()):
            try:
                states = [self.nixl_wrapper.check_xfer_state(check.handle) for check in checks]
            except NIXL_ERRORS as error:
                self._fail(request_id, failed, f"its nonce could not be read: {error!r}")
                continue
            if "PROC" in states:
                continue
            if any(state != "DONE" for state in states):
                self._fail(request_id, failed, "its nonce could not be read")
            elif not all(map(self._is_match, checks)):
                self._fail(request_id, failed, "its blocks were freed before they were read")
            else:
                self._end(request_id)
                proven.add(request_id)
        return proven

    def _is_match(self, check: _Check) -> bool:
        return self._read.read(check.slot) == check.expected

    def _fail(self, request_id: str, failed: set[str], reason: str) -> None:
        log.warning("The KV of request %s cannot be used: %s", request_id, reason)
        self._handle_failed_transfer(request_id, None, failed)
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        """Forgets a check, whose notifications went with it."""
        for check in self._checks.pop(request_id, ()):
            self._try_release_xfer_handle(request_id, check.handle)
            self._free_slots.append(check.slot)
        self._arrived.discard(request_id)
        self._pending_recv_notifs.pop(request_id, None)
