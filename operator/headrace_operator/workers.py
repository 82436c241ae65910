"""Asks workers for their role and tells them to change it, over HTTP with the cluster's token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import httpx
from pydantic import ValidationError

from headrace_core.api import names
from headrace_core.api.wire import PATH_ROLE, ErrorAnswer, RoleRequest, RoleState
from headrace_operator.errors import WorkerUnreachableError
from headrace_operator.plan.view import Pod, Silent

MAX_ANSWER_BYTES: Final = 65536


class Workers:
    """One HTTP client for all workers; asks at most `concurrency` of them at once for their role."""

    def __init__(self, timeout_s: float, concurrency: int = 64) -> None:
        # trust_env off: a proxy setting of the environment must not carry requests to pods, nor their token.
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False)
        self._slots = asyncio.Semaphore(concurrency)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def roles(self, pods: Iterable[Pod], token: str) -> dict[str, RoleState | Silent]:
        """The role of each pod that has an address, by pod UID; `Silent` where no usable answer came."""
        asked = [pod for pod in pods if pod.address]
        answers = await asyncio.gather(*(self._role_or_silent(pod, token) for pod in asked))
        return {pod.uid: answer for pod, answer in zip(asked, answers, strict=True)}

    async def role(self, pod: Pod, token: str) -> RoleState:
        """`GET /v1/pd_role`.

        Raises:
            WorkerUnreachableError: no answer, or none that can be read.
        """
        return self._state(pod, await self._send("GET", pod, token))

    async def change(self, pod: Pod, request: RoleRequest, token: str) -> RoleState:
        """`POST /v1/pd_role`: begin a change of role.

        Raises:
            WorkerUnreachableError: no answer, or a refusal; the message says which.
        """
        return self._state(pod, await self._send("POST", pod, token, request.model_dump_json()))

    async def _role_or_silent(self, pod: Pod, token: str) -> RoleState | Silent:
        async with self._slots:
            try:
                return await self.role(pod, token)
            except WorkerUnreachableError as error:
                return Silent(why=str(error))

    async def _send(self, method: str, pod: Pod, token: str, body: str | None = None) -> httpx.Response:
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        url = f"http://{host}:{names.WORKER_PORT}{PATH_ROLE}"
        try:
            return await self._http.request(method, url, headers=headers, content=body)
        except httpx.HTTPError as error:
            raise WorkerUnreachableError(f"{pod.name}: {type(error).__name__}: {error}") from error

    def _state(self, pod: Pod, answer: httpx.Response) -> RoleState:
        if len(answer.content) > MAX_ANSWER_BYTES:
            raise WorkerUnreachableError(f"{pod.name}: an answer of {len(answer.content)} bytes")
        try:
            if answer.is_success:
                return RoleState.model_validate_json(answer.content)
            refusal = ErrorAnswer.model_validate_json(answer.content).error
        except ValidationError as error:
            text = f"{pod.name}: {answer.status_code} with a body that is not in the protocol"
            raise WorkerUnreachableError(text) from error
        raise WorkerUnreachableError(f"{pod.name}: {answer.status_code} {refusal.code}: {refusal.message}")
