"""Starts vLLM with Headrace's scheduler and connector, and builds vLLM's own web application over it.

The order matters: the environment before vLLM is imported (it reads some variables on import), and the choice of
processes after vLLM made its configuration (it forces one of its own on CPUs).
"""

from __future__ import annotations

import gc
import ipaddress
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from headrace_core.api.names import NIXL_PORT
from headrace_worker.engine.arguments import command_line
from headrace_worker.engine.cell import ENV_CELL, EngineCell
from headrace_worker.engine.vllm import VllmEngine

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from vllm.config import VllmConfig

    from headrace_worker.settings import Settings

SCHEDULERS: Final = "headrace_worker.scheduling.scheduler"
CONNECTOR: Final = "headrace_worker.kv.connector"


@asynccontextmanager
async def started(settings: Settings) -> AsyncIterator[tuple[VllmEngine, FastAPI]]:
    """Runs the engine for as long as the context is open; the application is not listening yet.

    Loads the model and runs one forward pass (vLLM's own profiling). Takes tens of seconds, in which the event loop
    stands still.

    Raises:
        ValueError: vLLM refuses an engine argument or the model; its message says which and why.
        RuntimeError: the engine's process died while it started.
    """
    cell = EngineCell.create(settings.role)
    os.environ |= environment(settings, dict(os.environ))
    os.environ[ENV_CELL] = str(cell.path)
    try:
        gc.disable()  # a collector that walks over what imports leave behind takes a sixth of the start
        arguments, config = _configure(settings)
        gc.freeze()  # and neither process need ever walk over it
        gc.enable()
        async with _running(config) as llm:
            yield VllmEngine(llm, cell), await _application(arguments, llm)
    finally:
        cell.close()


def environment(settings: Settings, given: dict[str, str]) -> dict[str, str]:
    """Variables that vLLM, NIXL and UCX need, where `given` does not set them. Addresses are the pod's own."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a pod's cores are the kubelet's to give out
        "UCX_RCACHE_MAX_UNRELEASED": "1024",  # without a bound UCX keeps memory that NIXL has given back
    }
    address = ipaddress.ip_address(settings.pod_ip)
    if address.is_loopback:
        # Pods that share one machine's loopback: shared memory between them would stand for a network that is not.
        wanted |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    owned = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_PORT)}
    if not address.is_unspecified:
        owned |= {"VLLM_HOST_IP": settings.pod_ip, "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.pod_ip}
    return {name: value for name, value in wanted.items() if name not in given} | owned


def owned_arguments(settings: Settings) -> list[tuple[str, str]]:
    """The engine arguments that Headrace sets."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        # A decode worker that cannot get its KV says so: the gateway then asks for a new prefill, which a prefill
        # worker does faster than this one would.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": settings.kv_lease_s},
    }
    arguments = [
        ("model", model_location(settings.model)),
        ("served-model-name", settings.name),
        ("tensor-parallel-size", str(settings.tensor_parallel)),
        ("pipeline-parallel-size", str(settings.pipeline_parallel)),
        ("kv-transfer-config", json.dumps(transfer)),
    ]
    if settings.max_model_len:
        arguments.append(("max-model-len", str(settings.max_model_len)))
    if settings.model_revision:
        arguments.append(("revision", settings.model_revision))
    return arguments


def model_location(uri: str) -> str:
    """What vLLM calls the model: a directory, or a name on the hub."""
    return uri.removeprefix("hf://").removeprefix("file://")


def _configure(settings: Settings) -> tuple[Namespace, VllmConfig]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - after the environment
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    from vllm.v1.engine import async_llm  # noqa: F401, PLC0415 - here, where the collector rests

    parser = make_arg_parser(FlexibleArgumentParser(prog="engine.args", exit_on_error=False))
    users = [(argument.name, argument.value) for argument in settings.engine_args]
    arguments = parser.parse_args(command_line(parser, [*users, *owned_arguments(settings)]))
    validate_parsed_serve_args(arguments)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    scheduler = "AsyncPoolScheduler" if config.scheduler_config.async_scheduling else "PoolScheduler"
    config.scheduler_config.scheduler_cls = f"{SCHEDULERS}.{scheduler}"
    _choose_processes(config)
    return arguments, config


def _choose_processes(config: VllmConfig) -> None:
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return
    # A fork has all imports done (vLLM asks for spawn on CPUs and pays them again in each process), and one executor
    # process less saves another third.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if config.parallel_config.world_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"


@asynccontextmanager
async def _running(config: VllmConfig) -> AsyncIterator[Any]:
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    llm = AsyncLLM.from_vllm_config(config)
    try:
        yield llm
    finally:
        llm.shutdown(timeout=config.shutdown_timeout)


async def _application(arguments: Namespace, llm: Any) -> FastAPI:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: PLC0415
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415

    tasks = await llm.get_supported_tasks()
    application: FastAPI = build_app(arguments, tasks, llm.model_config)
    await init_app_state(llm, application.state, arguments, tasks)
    return application
