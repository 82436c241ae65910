"""Asks Prometheus how busy a cluster's workers were, and how fresh that knowledge is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import httpx

from headrace_core.api.names import Metric
from headrace_operator.errors import PrometheusError

BUSY: Final = f"{Metric.WORKER_BUSY_SECONDS}_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is known of one worker's load."""

    busy_share: float
    """Share of the window in which it had a request, 0 to 1."""
    age_s: float
    """Age of its newest sample, by Prometheus' clock."""


class Prometheus:
    """One HTTP client for one Prometheus."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False)

    @property
    def configured(self) -> bool:
        """Whether the operator was told of a Prometheus."""
        return bool(self._url)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def loads(self, namespace: str, cluster: str, window_s: float) -> dict[str, Load]:
        """Load of each worker that was there for the whole window, by pod name. Others are absent: unknown.

        Raises:
            PrometheusError: no answer, or none that can be read.
        """
        series = f'{BUSY}{{namespace="{namespace}",cluster="{cluster}"}}'
        window = f"{math.ceil(window_s * 1000)}ms"
        shares = await self._by_pod(f"max by (pod) (rate({series}[{window}]))")
        ages = await self._by_pod(f"max by (pod) (time() - timestamp({series}))")
        before = await self._by_pod(f"max by (pod) ({series} offset {window})")
        return {
            pod: Load(busy_share=min(1.0, shares[pod]), age_s=ages[pod])
            for pod in shares.keys() & ages.keys() & before.keys()
        }

    async def _by_pod(self, query: str) -> dict[str, float]:
        try:
            answer = await self._http.get(f"{self._url}/api/v1/query", params={"query": query})
            body: Any = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PrometheusError(f"Prometheus: {type(error).__name__}: {error}") from error
        if not isinstance(body, dict) or body.get("status") != "success":
            detail = body.get("error", "") if isinstance(body, dict) else ""
            raise PrometheusError(f"Prometheus: {answer.status_code} {detail}")
        try:
            return {
                item["metric"]["pod"]: float(item["value"][1])
                for item in body["data"]["result"]
                if "pod" in item["metric"]
            }
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PrometheusError(f"Prometheus: an answer that is no instant vector: {error!r}") from error
