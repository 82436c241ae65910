"""Every setting of the gateway: its variable, type, default, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace_core.api.names import GATEWAY_PORT, WORKER_PORT, Env
from headrace_gateway.errors import SettingsError


def _setting(variable: str, doc: str, default: Any = MISSING, *, least: float | None = None) -> Any:
    return field(default=default, metadata={"variable": variable, "doc": doc, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says. Build it with `from_environment`."""

    served_name: str = _setting(Env.SERVED_NAME, "model name that requests must ask for")
    cluster: str = _setting(Env.CLUSTER, "name of the InferenceCluster (not needed with workers)", "")
    namespace: str = _setting(Env.NAMESPACE, "namespace of the workers' pods (not needed with workers)", "")
    workers: str = _setting(
        "HEADRACE_WORKERS", "workers as host:port,host:port, to run without Kubernetes (also --workers)", ""
    )
    host: str = _setting(Env.POD_IP, "address to listen on", "0.0.0.0")  # noqa: S104 - a pod has one address
    port: int = _setting(Env.PORT, "port to listen on; 0 takes a free one", GATEWAY_PORT, least=0)
    token_file: str = _setting(
        Env.TOKEN_FILE, "file of bearer tokens, one a line: any is accepted, the first is sent; empty: none", ""
    )
    max_model_len: int = _setting(
        Env.MAX_MODEL_LEN, "context length in tokens that /v1/models shows; 0 shows none", 0, least=0
    )
    worker_port: int = _setting("HEADRACE_WORKER_PORT", "port of a worker pod", WORKER_PORT, least=1)
    max_in_flight: int = _setting(
        "HEADRACE_GATEWAY_MAX_IN_FLIGHT", "requests served at once; more get a 429", 1024, least=1
    )
    max_body_bytes: int = _setting(
        "HEADRACE_GATEWAY_MAX_BODY_BYTES", "bytes of a request body; more get a 413", 16 * 2**20, least=1
    )
    body_timeout_s: float = _setting(
        "HEADRACE_GATEWAY_BODY_TIMEOUT", "seconds in which a request body must arrive", 30.0, least=0.001
    )
    worker_wait_s: float = _setting(
        "HEADRACE_GATEWAY_WORKER_WAIT",
        "seconds that a request may wait in sum for somebody who accepts it, before it gets a 503",
        10.0,
        least=0,
    )
    max_attempts: int = _setting(
        "HEADRACE_GATEWAY_MAX_ATTEMPTS", "failed attempts (not refusals) before a request gets a 502", 5, least=1
    )
    handoff_max_age_s: float = _setting(
        "HEADRACE_GATEWAY_HANDOFF_MAX_AGE",
        "seconds after the prefill answer until which a hand-off is sent; must be below the workers' KV lease (30)",
        20.0,
        least=0.001,
    )
    suspect_after_s: float = _setting(
        "HEADRACE_GATEWAY_SUSPECT_AFTER", "seconds of silence before a worker is the last choice", 1.0, least=0.001
    )
    out_after_s: float = _setting(
        "HEADRACE_GATEWAY_OUT_AFTER", "seconds of silence before a worker is not chosen at all", 3.0, least=0.001
    )
    abandon_after_s: float = _setting(
        "HEADRACE_GATEWAY_ABANDON_AFTER",
        "seconds of silence before requests that wait for a worker's first byte go to another",
        5.0,
        least=0.001,
    )
    stream_idle_s: float = _setting(
        "HEADRACE_GATEWAY_STREAM_IDLE",
        "seconds without a byte from a silent worker before a begun stream is given up",
        30.0,
        least=0.001,
    )
    client_stall_s: float = _setting(
        "HEADRACE_GATEWAY_CLIENT_STALL",
        "seconds for which a client may take nothing of its stream before it is let go",
        120.0,
        least=0.001,
    )
    connect_timeout_s: float = _setting(
        "HEADRACE_GATEWAY_CONNECT_TIMEOUT", "seconds to connect to a worker", 2.0, least=0.001
    )
    lame_duck_s: float = _setting(
        "HEADRACE_GATEWAY_LAME_DUCK",
        "seconds between SIGTERM and closing the port, in which Services forget this pod",
        3.0,
        least=0,
    )
    shutdown_timeout_s: float = _setting(
        "HEADRACE_GATEWAY_SHUTDOWN_TIMEOUT", "seconds that requests in flight get after SIGTERM", 110.0, least=0
    )

    @property
    def static_workers(self) -> tuple[str, ...]:
        """The addresses of `workers`; empty when workers are found through Kubernetes."""
        return tuple(part.strip() for part in self.workers.split(",") if part.strip())


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings that an environment gives.

    Raises SettingsError, naming the variable and what it must be. An empty variable counts as unset.
    """
    values = {
        item.name: _parse(item.metadata, item.type, environment[item.metadata["variable"]])
        for item in fields(Settings)
        if environment.get(item.metadata["variable"])
    }
    if "served_name" not in values:
        raise SettingsError(f"{Env.SERVED_NAME} is not set: give the model name that clients ask for")
    settings = Settings(**values)
    _check(settings)
    return settings


def documentation() -> str:
    """One line a setting: variable, type, default, meaning."""
    lines = []
    for item in fields(Settings):
        default = "required" if item.default is MISSING else f"default {item.default!r}"
        lines.append(f"  {item.metadata['variable']:36} {item.type}, {default}: {item.metadata['doc']}")
    return "\n".join(lines)


def _parse(metadata: Mapping[str, Any], kind: Any, text: str) -> Any:
    variable, least = metadata["variable"], metadata["least"]
    if kind == "str":
        return text
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError as error:
        raise SettingsError(f"{variable} is {text!r}: give {_article(kind)}") from error
    if not least <= value < float("inf"):
        raise SettingsError(f"{variable} is {text!r}: give {_article(kind)} of at least {least}")
    return value


def _article(kind: Any) -> str:
    return "a whole number" if kind == "int" else "a number"


def _check(settings: Settings) -> None:
    if not settings.static_workers:
        for variable, value in ((Env.CLUSTER, settings.cluster), (Env.NAMESPACE, settings.namespace)):
            if not value:
                raise SettingsError(f"{variable} is not set: give it, or name the workers with --workers")
    for address in settings.static_workers:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise SettingsError(f"worker {address!r} in --workers: give host:port")
    if not settings.suspect_after_s <= settings.out_after_s <= settings.abandon_after_s:
        raise SettingsError("HEADRACE_GATEWAY_SUSPECT_AFTER, _OUT_AFTER and _ABANDON_AFTER must rise in this order")
    if settings.token_file and not Path(settings.token_file).is_file():
        raise SettingsError(f"{Env.TOKEN_FILE} is {settings.token_file!r}, which is not a file: mount the token there")
