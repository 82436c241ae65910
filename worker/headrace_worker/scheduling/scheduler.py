"""vLLM's scheduler, told its role by the shared cell, and publishing there what it has in hand.

`PoolScheduler` stands on vLLM's plain scheduler (the only one on CPUs), `AsyncPoolScheduler` on the asynchronous one
(the default on GPUs). Importing this module also gives vLLM's `EngineCore` the calls that `CALLS` names: an idle engine
blocks on its input queue and looks at no cell until it is called.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from headrace_core.api.names import Role
from headrace_core.policy.dispatch import HEAVY_DECODE_TOKENS
from headrace_worker.engine.cell import ENV_CELL, EngineCell
from headrace_worker.engine.interface import EngineState
from headrace_worker.engine.vllm import CALL_READ_ROLE, CALL_RELEASE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

_MANY_REQUESTS: Final = 256
_PUBLISH_INTERVAL_S: Final = 0.01
"""With many requests in hand the state is counted at most so often: the count walks over all of them."""

_PR_SET_PDEATHSIG: Final = 1


class PoolScheduling:
    """The part that is the same over both schedulers. It changes no decision of theirs."""

    # What it uses of them; vLLM ships no types.
    requests: dict[str, Request]
    waiting: Any
    kv_holding_waiting: Any
    running: list[Request]
    connector: Any
    kv_cache_manager: Any
    kv_cache_config: Any
    vllm_config: Any
    block_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cell = EngineCell(Path(os.environ[ENV_CELL]))
        self._cell.close()  # both sides have it open, and a killed worker must leave no file behind
        self._role, self._epoch = self._cell.read_role()
        self._held: dict[str, int] = {}
        """Finished requests whose blocks are not free, and how many blocks that is."""
        self._released: set[str] = set()
        self._prefilled_tokens = 0
        self._kv_received_bytes = 0
        self._kv_receives = 0
        self._kv_receive_failures = 0
        self._kv_sent_bytes = 0
        self._block_bytes = _bytes_per_block(self)
        self._published_at = 0.0
        _die_with_parent()
        self._publish()

    @property
    def role(self) -> Role:
        """The role that was last read from the cell."""
        return self._role

    def read_role(self) -> int:
        """Looks at the cell, and returns the epoch that stands there."""
        self._role, self._epoch = self._cell.read_role()
        self._publish()
        return self._epoch

    def release(self, request_id: str) -> bool:
        """Ends the lease of a finished prefill, whose blocks are free after the next step; False if none is held."""
        if request_id not in self._held or self.connector is None:
            return False
        # The worker's side holds the lease, and reports the request as sent when it ends; freeing the blocks here
        # would make that report name a request that is gone.
        self.connector.connector_scheduler.end_lease(request_id)
        self._released.add(request_id)
        return True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plans a step, and counts the prompt tokens in it."""
        self._role, self._epoch = self._cell.read_role()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            computed_before = request.num_computed_tokens - scheduled_tokens
            self._prefilled_tokens += max(
                0, min(request.num_computed_tokens, request.num_prompt_tokens) - computed_before
            )
        self._publish_in_turn()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes in a step's results, and counts the KV that came and went."""
        if model_runner_output.kv_connector_output is not None:
            self._count_transfers(model_runner_output.kv_connector_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._publish_in_turn()
        return outputs

    def _count_transfers(self, transfers: KVConnectorOutput) -> None:
        if transfers.kv_connector_stats is not None:
            self._kv_received_bytes += sum(transfers.kv_connector_stats.data["bytes_transferred"])
        failed = transfers.failed_recving or set()
        self._kv_receive_failures += len(failed)
        self._kv_receives += len((transfers.finished_recving or set()) - failed)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        freed = super()._free_request(request, delay_free_blocks)  # type: ignore[misc]
        if request.request_id in self.requests:
            groups = self.kv_cache_manager.get_block_ids(request.request_id)
            self._held[request.request_id] = sum(len(group) for group in groups)
        return freed

    def _free_blocks(self, request: Request) -> None:
        blocks = self._held.pop(request.request_id, 0)
        if request.request_id in self._released:
            self._released.discard(request.request_id)
        elif _is_held_for_others(request):
            self._kv_sent_bytes += blocks * self._block_bytes
        super()._free_blocks(request)  # type: ignore[misc]

    def _publish_in_turn(self) -> None:
        if len(self.requests) <= _MANY_REQUESTS or time.monotonic() - self._published_at >= _PUBLISH_INTERVAL_S:
            self._publish()

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        self._cell.publish(self._count())

    def _count(self) -> EngineState:
        queued = receiving = held = held_blocks = queued_prefill_tokens = running_tokens = heavy = 0
        for queue in (self.waiting, self.kv_holding_waiting):
            for request in queue:
                heavy += _may_still_generate(request) > HEAVY_DECODE_TOKENS
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    receiving += 1
                    continue
                queued += 1
                if not _comes_with_kv(request):
                    queued_prefill_tokens += max(0, request.num_prompt_tokens - request.num_computed_tokens)
        for request in self.running:
            heavy += _may_still_generate(request) > HEAVY_DECODE_TOKENS
            running_tokens += request.num_computed_tokens
            queued_prefill_tokens += max(0, request.num_prompt_tokens - request.num_computed_tokens)
        for request_id, blocks in self._held.items():
            if _is_held_for_others(self.requests[request_id]):
                held += 1
                held_blocks += blocks
            else:
                receiving += 1  # gone for its client, but its KV is still being written into our blocks
        pool = self.kv_cache_manager.block_pool
        return EngineState(
            epoch=self._epoch,
            queued_requests=queued,
            running_requests=len(self.running),
            receiving_requests=receiving,
            held_requests=held,
            held_kv_blocks=held_blocks,
            free_kv_blocks=pool.get_num_free_blocks(),
            total_kv_blocks=pool.num_gpu_blocks - 1,  # one is vLLM's null block
            block_size=self.block_size,
            queued_prefill_tokens=queued_prefill_tokens,
            running_tokens=running_tokens,
            heavy_requests=heavy,
            light_requests=len(self.waiting) + len(self.kv_holding_waiting) + len(self.running) - heavy,
            prefilled_tokens=self._prefilled_tokens,
            kv_received_bytes=self._kv_received_bytes,
            kv_receives=self._kv_receives,
            kv_sent_bytes=self._kv_sent_bytes,
            kv_receive_failures=self._kv_receive_failures,
        )


class PoolScheduler(PoolScheduling, Scheduler):  # type: ignore[misc]
    """Over vLLM's plain scheduler."""


class AsyncPoolScheduler(PoolScheduling, AsyncScheduler):  # type: ignore[misc]
    """Over vLLM's asynchronous scheduler."""


def _may_still_generate(request: Request) -> int:
    return int(request.max_tokens - request.num_output_tokens)


def _is_held_for_others(request: Request) -> bool:
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def _comes_with_kv(request: Request) -> bool:
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def _bytes_per_block(scheduler: PoolScheduling) -> int:
    """Bytes of KV in one block over all layers of all ranks of the engine."""
    config = scheduler.kv_cache_config
    per_rank = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    return int(per_rank * scheduler.vllm_config.parallel_config.world_size)


def _die_with_parent() -> None:
    """Asks the kernel to end this process with the server's: an engine left alone would keep its GPU."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _read_role(engine_core: EngineCore) -> int:
    epoch: int = engine_core.scheduler.read_role()
    return epoch


def _release(engine_core: EngineCore, request_id: str) -> bool:
    released: bool = engine_core.scheduler.release(request_id)
    return released


CALLS: Final = {CALL_READ_ROLE: _read_role, CALL_RELEASE: _release}

for _name, _call in CALLS.items():
    setattr(EngineCore, _name, _call)
