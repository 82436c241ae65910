"""Reads the operator's settings from its environment: each with a type, a default, a unit and one line of words."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from headrace_core.api import names
from headrace_operator.errors import SettingsError

_VERSION: Final = version("headrace")


def _text(raw: str) -> str:
    return raw.strip()


def _words(raw: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in raw.split(",")) if word)


def _seconds(raw: str) -> float:
    remedy = "give a number of seconds above 0 and at most 86400"
    try:
        value = float(raw)
    except ValueError:
        raise ValueError(remedy) from None
    if not 0 < value <= 86400:  # noqa: PLR2004 - a day, in seconds
        raise ValueError(remedy)
    return value


def _port(raw: str) -> int:
    if not raw.isdecimal() or int(raw) > 65535:  # noqa: PLR2004 - the largest TCP port
        raise ValueError("give a port from 0 to 65535; 0 takes a free one")
    return int(raw)


def _count(raw: str) -> int:
    if not raw.isdecimal() or int(raw) < 1:
        raise ValueError("give a whole number of at least 1")
    return int(raw)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return raw

    return parse


def _setting(
    env: str, parse: Callable[[str], Any], default: Callable[[], Any] | str | float | int | tuple[str, ...]
) -> Any:
    meta = {"env": env, "parse": parse}
    if callable(default):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. The environment variable of each is named in its declaration.

    The chart sets those that a cluster's administrator may want to change; its `extraEnv` sets any of the others.
    """

    pod_name: str = _setting("POD_NAME", _text, socket.gethostname)
    """This pod's name: the holder of the Lease."""
    pod_namespace: str = _setting("POD_NAMESPACE", _text, "headrace-system")
    """This pod's namespace: where the Lease lives."""
    pod_ip: str = _setting(names.Env.POD_IP, _text, "0.0.0.0")  # noqa: S104 - unset outside a pod only
    """Address that the metrics and health servers bind to."""
    watch_namespaces: tuple[str, ...] = _setting("WATCH_NAMESPACES", _words, ())
    """Namespaces to serve, separated by commas. Empty: all of them."""

    worker_image: str = _setting("WORKER_IMAGE", _text, f"headrace/worker:{_VERSION}")
    """Image of a worker whose InferenceCluster names none."""
    gateway_image: str = _setting("GATEWAY_IMAGE", _text, f"headrace/gateway:{_VERSION}")
    """Image of the gateways."""
    image_pull_policy: str = _setting("IMAGE_PULL_POLICY", _one_of("Always", "IfNotPresent", "Never"), "IfNotPresent")
    """imagePullPolicy of worker and gateway containers: Always, IfNotPresent or Never."""
    image_pull_secrets: tuple[str, ...] = _setting("IMAGE_PULL_SECRETS", _words, ())
    """Names of pull secrets, separated by commas; they must exist in each cluster's namespace."""

    prometheus_url: str = _setting("PROMETHEUS_URL", _text, "")
    """Base URL of the Prometheus HTTP API. Empty: no metrics, so that elasticity holds."""
    prometheus_timeout_s: float = _setting("PROMETHEUS_TIMEOUT_SECONDS", _seconds, 5.0)
    """Longest wait for one query, in seconds."""
    prometheus_max_age_s: float = _setting("PROMETHEUS_MAX_AGE_SECONDS", _seconds, 60.0)
    """Age in seconds from which a worker's newest sample is stale and elasticity holds."""

    lease_name: str = _setting("LEASE_NAME", _text, "headrace-operator")
    """Name of the leader election Lease."""
    lease_duration_s: float = _setting("LEASE_DURATION_SECONDS", _seconds, 15.0)
    """Seconds after its last renewal from which another operator may take the Lease."""
    lease_renew_deadline_s: float = _setting("LEASE_RENEW_DEADLINE_SECONDS", _seconds, 10.0)
    """Seconds without a renewal after which a leader gives up and exits. Below the duration."""
    lease_retry_s: float = _setting("LEASE_RETRY_SECONDS", _seconds, 2.0)
    """Seconds between two tries to take or renew the Lease."""

    tick_s: float = _setting("TICK_SECONDS", _seconds, 15.0)
    """Seconds between two reconciles of a cluster in which nothing happens."""
    flip_poll_s: float = _setting("FLIP_POLL_SECONDS", _seconds, 0.2)
    """Seconds between two looks at a worker that is changing its role."""
    worker_timeout_s: float = _setting("WORKER_TIMEOUT_SECONDS", _seconds, 2.0)
    """Longest wait for a worker's answer, in seconds."""
    flip_grace_s: float = _setting("FLIP_GRACE_SECONDS", _seconds, 30.0)
    """Seconds past its drain timeout that a worker may stay silent or undecided before its pod is replaced."""
    concurrency: int = _setting("CONCURRENT_RECONCILES", _count, 4)
    """Clusters that are reconciled at the same time."""

    metrics_port: int = _setting("METRICS_PORT", _port, names.OPERATOR_METRICS_PORT)
    """Port of /metrics."""
    health_port: int = _setting("HEALTH_PORT", _port, names.OPERATOR_HEALTH_PORT)
    """Port of /livez and /readyz."""
    log_level: str = _setting("LOG_LEVEL", _one_of("DEBUG", "INFO", "WARNING", "ERROR"), "INFO")
    """DEBUG, INFO, WARNING or ERROR."""

    crash_after: str = _setting("HEADRACE_CRASH_AFTER", _text, "")
    """For tests only: the step of a flip after which the process exits at once. Empty: never."""

    def __post_init__(self) -> None:
        if not self.lease_retry_s < self.lease_renew_deadline_s < self.lease_duration_s:
            raise SettingsError(
                "LEASE_RETRY_SECONDS < LEASE_RENEW_DEADLINE_SECONDS < LEASE_DURATION_SECONDS must hold: "
                f"{self.lease_retry_s} < {self.lease_renew_deadline_s} < {self.lease_duration_s} does not"
            )
        if self.prometheus_url and not self.prometheus_url.startswith(("http://", "https://")):
            raise SettingsError(f"PROMETHEUS_URL={self.prometheus_url!r}: start it with http:// or https://")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read all settings; an unset or empty variable takes its default.

    Raises:
        SettingsError: names the variable, its value and what is expected.
    """
    values: dict[str, Any] = {}
    for declared in dataclasses.fields(Settings):
        raw = environment.get(declared.metadata["env"], "").strip()
        if not raw:
            continue
        try:
            values[declared.name] = declared.metadata["parse"](raw)
        except ValueError as error:
            raise SettingsError(f"{declared.metadata['env']}={raw!r}: {error}") from error
    return Settings(**values)
