"""Which arguments and variables of the engine Headrace sets itself, and the CEL rules that refuse them to others.

The names are vLLM's (`vllm serve --help`). vLLM reads an underscore as a dash, everything before a dot as the name,
and any unambiguous beginning of a name as the name (argparse): the rules do likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace_core.api.schema import Rule

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
"""No leading dash and no equals sign: a name and nothing else. The plus ends a dotted name that adds to a list."""
MAX_NAME_LENGTH: Final = 128


@dataclass(frozen=True, slots=True)
class Owned:
    """Arguments that are refused for the same reason."""

    names: tuple[str, ...]
    message: str

    def rule(self) -> Rule:
        """The rule for an argument's name: it is neither one of these nor the beginning of one."""
        return Rule(
            f"!{cel_list(self.names)}.exists(o, o.startsWith(self.lowerAscii().split('.')[0].replace('_', '-')))",
            self.message,
        )


def cel_list(items: Iterable[str]) -> str:
    """A list of strings as CEL writes it."""
    return "[" + ", ".join(f"'{item}'" for item in items) + "]"


OWNED: Final = (
    Owned(
        ("model", "served-model-name", "revision", "max-model-len"),
        "the model is set in spec.model (uri, servedName, revision, maxModelLen)",
    ),
    Owned(
        ("tensor-parallel-size", "tp", "pipeline-parallel-size", "pp"),
        "the shape is set in parallelism of each pool",
    ),
    Owned(
        (
            "data-parallel-size", "data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local",
            "data-parallel-address", "data-parallel-rpc-port", "data-parallel-backend", "data-parallel-hybrid-lb",
            "no-data-parallel-hybrid-lb", "data-parallel-external-lb", "no-data-parallel-external-lb",
            "data-parallel-multi-port-external-lb", "data-parallel-supervisor-port", "dp",
            "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s",
            "dp-supervisor-probe-failure-threshold", "prefill-context-parallel-size", "pcp", "nnodes", "node-rank",
            "master-addr", "master-port", "device-ids", "distributed-executor-backend", "headless",
            "api-server-count", "asc",
        ),
        "a worker is one engine in one pod: for more engines raise replicas, for more GPUs an engine parallelism",
    ),
    Owned(
        (
            "kv-transfer-config", "kv-offloading-size", "kv-offloading-backend", "scheduler-cls",
            "scheduling-policy", "worker-cls", "worker-extension-cls",
        ),
        "Headrace plugs its own KV connector and scheduler in here: remove the argument",
    ),
    Owned(
        (
            "host", "port", "uds", "root-path", "middleware", "api-key", "ssl-keyfile", "ssl-certfile",
            "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh", "no-enable-ssl-refresh", "grpc",
            "grpc-port", "config", "help", "shutdown-timeout", "disable-log-stats",
        ),
        "Headrace runs the worker's server, its address, access, metrics and shutdown: remove the argument",
    ),
    Owned(
        (
            "runner", "convert", "skip-tokenizer-init", "no-skip-tokenizer-init", "tokens-only", "no-tokens-only",
            "enable-scale-out", "no-enable-scale-out", "mm-encoder-only", "no-mm-encoder-only",
        ),
        "a worker serves completions from text: remove the argument",
    ),
)  # fmt: skip

OWNED_ENVIRONMENT: Final = (
    "VLLM_PLUGINS",
    "VLLM_API_KEY",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_PORT",
    "VLLM_HOST_IP",
)
"""Variables that would unload the plug-ins, guard the server with another key, or move an address."""
