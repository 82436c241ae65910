"""Every setting of a worker: its variable, type, default, unit and meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from headrace_core.api.names import WORKER_PORT, Env, Role
from headrace_worker.errors import SettingsError


@dataclass(frozen=True, slots=True)
class EngineArg:
    """One vLLM engine argument of the user's: `max-num-seqs`, `256`."""

    name: str
    value: str


def _text(raw: str) -> str:
    return raw


def _role(raw: str) -> Role:
    try:
        return Role(raw)
    except ValueError:
        raise ValueError(f"one of {', '.join(Role)}") from None


def _engine_args(raw: str) -> tuple[EngineArg, ...]:
    remedy = 'a JSON list such as [{"name": "max-num-seqs", "value": "256"}]'
    try:
        items = json.loads(raw)
        return tuple(EngineArg(str(item["name"]), str(item.get("value", ""))) for item in items)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(remedy) from error


def _whole(least: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        if raw.strip().isdecimal() and int(raw) >= least:
            return int(raw)
        raise ValueError(f"a whole number of at least {least}")

    return parse


def _seconds(least: float) -> Callable[[str], float]:
    def parse(raw: str) -> float:
        remedy = f"a number of seconds of at least {least:g}"
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(remedy) from None
        if not least <= value < math.inf:
            raise ValueError(remedy)
        return value

    return parse


def _setting(variable: str, parse: Callable[[str], Any], doc: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says. Build it with `from_environment`."""

    model: str = _setting(Env.MODEL, _text, "model: hf://ORG/NAME or file:///PATH in the container")
    model_revision: str = _setting(Env.MODEL_REVISION, _text, "revision of a hf:// model; empty: its default", "")
    served_name: str = _setting(
        Env.SERVED_NAME, _text, "model name that requests must ask for; empty: the last part of the model", ""
    )
    max_model_len: int = _setting(
        Env.MAX_MODEL_LEN, _whole(0), "context length in tokens; 0: what the model's configuration says", 0
    )
    role: Role = _setting(Env.ROLE, _role, "role to start in, at epoch 0")  # noqa: RUF009 - it makes a field
    tensor_parallel: int = _setting(Env.TENSOR_PARALLEL, _whole(1), "GPUs that share each layer", 1)
    pipeline_parallel: int = _setting(Env.PIPELINE_PARALLEL, _whole(1), "stages that the layers are cut into", 1)
    engine_args: tuple[EngineArg, ...] = _setting(
        Env.ENGINE_ARGS, _engine_args, "JSON list of further engine arguments, each with name and value", ()
    )
    pod_ip: str = _setting(Env.POD_IP, _text, "address to listen on and to be reached at", "0.0.0.0")  # noqa: S104 - a pod has one address
    port: int = _setting(Env.PORT, _whole(1), "port to listen on", WORKER_PORT)
    pod_name: str = _setting(Env.POD_NAME, _text, "name of this pod, as reports carry it", "worker")
    pod_uid: str = _setting(
        Env.POD_UID, _text, "uid of this pod; a role change meant for another is refused. Empty: not checked", ""
    )
    token_file: str = _setting(
        Env.TOKEN_FILE, _text, "file of bearer tokens, one a line, any of which is accepted; empty: no token wanted", ""
    )
    max_body_bytes: int = _setting(
        "HEADRACE_WORKER_MAX_BODY_BYTES", _whole(1), "bytes of a request body; more get a 413", 16 * 2**20
    )
    load_interval_s: float = _setting(
        "HEADRACE_WORKER_LOAD_INTERVAL", _seconds(0.01), "seconds between two load reports", 0.1
    )
    peers_max_age_s: float = _setting(
        "HEADRACE_WORKER_PEERS_MAX_AGE",
        _seconds(0.1),
        "seconds of silence after which a decode worker is forgotten",
        3.0,
    )
    drain_poll_s: float = _setting(
        "HEADRACE_WORKER_DRAIN_POLL", _seconds(0.0001), "seconds between two looks at the engine while draining", 0.002
    )
    switch_timeout_s: float = _setting(
        "HEADRACE_WORKER_SWITCH_TIMEOUT",
        _seconds(0.1),
        "seconds that the scheduler may take to read a new epoch before this worker counts as failed",
        60.0,
    )
    kv_lease_s: int = _setting(
        "HEADRACE_WORKER_KV_LEASE",
        _whole(6),
        "seconds that a finished prefill's KV is held for a decode worker that sends no heartbeat",
        30,
    )
    shutdown_timeout_s: float = _setting(
        "HEADRACE_WORKER_SHUTDOWN_TIMEOUT",
        _seconds(0),
        "seconds that requests in flight and held KV get after SIGTERM; must be below the pod's grace period",
        570.0,
    )

    @property
    def name(self) -> str:
        """The model name that requests ask for."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def address(self) -> str:
        """`host:port` at which gateway and operator reach this worker."""
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{self.port}"


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings that an environment gives; an empty variable counts as unset.

    Raises SettingsError, naming the variable and what it must be.
    """
    values: dict[str, Any] = {}
    for item in fields(Settings):
        variable = item.metadata["variable"]
        raw = environment.get(variable, "")
        if raw:
            try:
                values[item.name] = item.metadata["parse"](raw)
            except ValueError as error:
                raise SettingsError(f"{variable} is {raw!r}: give {error}") from error
        elif item.default is MISSING:
            raise SettingsError(f"{variable} is not set: {item.metadata['doc']}")
    return Settings(**values)


def documentation() -> str:
    """One line a setting: variable, type, default, meaning."""
    lines = []
    for item in fields(Settings):
        default = "required" if item.default is MISSING else f"default {item.default!r}"
        lines.append(f"  {item.metadata['variable']:34} {item.type}, {default}: {item.metadata['doc']}")
    return "\n".join(lines)
