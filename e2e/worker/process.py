"""Runs a real worker as a process on a loopback address of its own, and speaks to it as gateway and operator do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from e2e.cluster.processes import die_with_parent
from e2e.quickstart import CPU_ENV
from e2e.traffic import Prompt
from headrace_core.api.names import WORKER_PORT, Env, Role
from headrace_core.api.wire import PATH_RELEASE, PATH_ROLE, Handoff, RoleState

MODEL_NAME = "tiny"
TOKEN = "a-token-for-tests"
MAX_MODEL_LEN = 2048
KV_LEASE_S = 6
"""The shortest that the engine's heartbeats allow, so that a test can wait for its end."""

LISTEN = "0A"
"""The state of a listening socket in `/proc/net/tcp`; addresses there are words of the machine's byte order."""

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0

ENGINE_ARGS = {
    "enforce-eager": "true",
    "dtype": "float32",
    "max-num-seqs": "64",
    "kv-cache-memory-bytes": str(128 * 2**20),  # 170 blocks of 128 tokens: small enough to be overwritten in a test
}

ASK_FOR_KV: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def loopback(number: int) -> str:
    """An address of this test run: two runs on one machine do not meet."""
    run = os.getpid()
    return f"127.{100 + run % 100}.{run // 100 % 250}.{number}"


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back: the status, the text where there is one, and the whole body."""

    status: int
    text: str | None
    body: dict[str, Any]


class Worker:
    """One worker process."""

    def __init__(self, address: str, role: Role, model: Path, logs: Path, environment: dict[str, str]) -> None:
        self.address = address
        self.url = f"http://{address}:{WORKER_PORT}"
        self.log = logs / f"{role}-{address}.log"
        token_file = logs / f"{address}.token"
        token_file.write_text(TOKEN + "\n")
        variables = {
            Env.POD_NAME: f"worker-{address}",
            Env.POD_UID: str(uuid.uuid4()),
            Env.POD_IP: address,
            Env.ROLE: str(role),
            Env.MODEL: f"file://{model}",
            Env.SERVED_NAME: MODEL_NAME,
            Env.MAX_MODEL_LEN: str(MAX_MODEL_LEN),
            Env.ENGINE_ARGS: json.dumps([{"name": name, "value": value} for name, value in ENGINE_ARGS.items()]),
            Env.TOKEN_FILE: str(token_file),
            "HEADRACE_WORKER_KV_LEASE": str(KV_LEASE_S),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace_worker"],
                env=os.environ | CPU_ENV | variables | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread holds a lock between fork and exec here
            )
        self.started_at = time.monotonic()
        self.http = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60, trust_env=False
        )

    def wait_until_ready(self) -> float:
        """Waits for /readyz and returns the seconds since the start of the process."""
        while time.monotonic() - self.started_at < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"the worker ended with {self.process.returncode}; see {self.log}")
            try:
                if self.http.get("/readyz").status_code == httpx.codes.OK:
                    return time.monotonic() - self.started_at
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"not ready after {START_TIMEOUT_S} s; see {self.log}")

    def stop(self) -> None:
        """Ends the worker: asked first, then killed."""
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kills the server's process, and only that."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def cpu_seconds(self) -> float:
        """CPU time that the worker's processes have used so far."""
        return sum(_cpu_seconds(pid) for pid in self.processes())

    def processes(self) -> list[int]:
        """Ids of the worker's processes, the server's first."""
        return _family(self.process.pid)

    def listens_on(self) -> set[str]:
        """Addresses on which the worker's processes accept connections."""
        sockets = {link for pid in self.processes() for link in _sockets(pid)}
        return {address for address, inode in _listeners() if f"socket:[{inode}]" in sockets}

    def role(self) -> RoleState:
        """What the worker says of its role."""
        return RoleState.model_validate(self.http.get(PATH_ROLE).raise_for_status().json())

    def change_role(self, role: Role, drain_timeout_s: float = 20.0) -> RoleState:
        """Asks for a change and waits until it is done, or rolled back."""
        before = self.role()
        request = {"role": role, "expected_epoch": before.epoch, "drain_timeout": drain_timeout_s}
        self.http.post(PATH_ROLE, json=request).raise_for_status()
        deadline = time.monotonic() + drain_timeout_s + 10
        while time.monotonic() < deadline:
            state = self.role()
            if state.phase == "ready" and state.epoch > before.epoch:
                return state
            time.sleep(0.002)
        raise TimeoutError(f"still {state} after {drain_timeout_s + 10} s")

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; a counter is named without its suffix."""
        families = text_string_to_metric_families(self.http.get("/metrics").raise_for_status().text)
        samples = [
            sample.value for family in families for sample in family.samples if sample.name in (name, f"{name}_total")
        ]
        if not samples:
            raise LookupError(f"no metric {name}")
        return sum(samples)

    def prefill(self, prompt: Prompt) -> dict[str, Any]:
        """Has the prompt computed here, and returns the handle of its KV."""
        body = prompt.body(MODEL_NAME) | {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": dict(ASK_FOR_KV),
            "headrace": self._handoff(Role.PREFILL),
        }
        answer = self.http.post(prompt.path, json=body).raise_for_status().json()
        handle: dict[str, Any] = answer["kv_transfer_params"]
        return handle

    def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> Answered:
        """Has the answer decoded here from KV that another worker holds."""
        body = prompt.body(MODEL_NAME) | {
            "stream": False,
            "kv_transfer_params": dict(handle),
            "headrace": self._handoff(Role.DECODE),
        }
        return _answered(prompt, self.http.post(prompt.path, json=body))

    def alone(self, prompt: Prompt) -> str:
        """The answer of this worker by itself."""
        answered = _answered(prompt, self.http.post(prompt.path, json=prompt.body(MODEL_NAME) | {"stream": False}))
        assert answered.text is not None, answered.body
        return answered.text

    def release(self, handle: Mapping[str, Any]) -> None:
        """Says that nobody will come for this KV."""
        self.http.post(PATH_RELEASE, json={"kv_transfer_params": dict(handle)}).raise_for_status()

    def _handoff(self, role: Role) -> dict[str, Any]:
        handoff = Handoff(request_id=str(uuid.uuid4()), expected_role=role, expected_epoch=self.role().epoch)
        return handoff.model_dump(mode="json")


def _answered(prompt: Prompt, answer: httpx.Response) -> Answered:
    body = answer.json()
    if answer.status_code != httpx.codes.OK:
        return Answered(answer.status_code, None, body)
    choice = body["choices"][0]
    return Answered(answer.status_code, choice["message"]["content"] if prompt.kind == "chat" else choice["text"], body)


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid] + [one for child in children for one in _family(int(child))]


def _sockets(pid: int) -> list[str]:
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(str(descriptor.readlink()))
    return links


def _listeners() -> list[tuple[str, str]]:
    """Address and inode of each listening TCP socket of this machine."""
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN:
                words = bytes.fromhex(local.partition(":")[0])
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.append((socket.inet_ntop(family, address), rest[5]))
    return found


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
