"""A worker that speaks `/v1/pd_role` and the probes and serves nothing: it starts in a tenth of a second.

It keeps the protocol of `headrace_core.api.wire` (epoch, boot id, fence, pod uid, drain timeout, roll back). A drain
takes as long as the file `LIGHT_DRAIN_FILE` says, in seconds; `never` stands for a drain that never ends.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

STEP_S = 0.02


class State:
    """Role, epoch and phase of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.role = os.environ.get("HEADRACE_ROLE", "prefill")
        self.epoch = 0
        self.boot_id = uuid.uuid4().hex
        self.phase = "ready"
        self.target: str | None = None
        self.fence = 0
        self.last: dict[str, Any] | None = None

    def view(self) -> dict[str, Any]:
        """Body of a RoleState."""
        return {
            "role": self.role,
            "epoch": self.epoch,
            "boot_id": self.boot_id,
            "phase": self.phase,
            "target_role": self.target,
            "draining_requests": int(self.phase == "draining"),
            "last_switch": self.last,
        }

    def refusal(self, asked: dict[str, Any]) -> str:
        """Why a request is refused; empty: it is not."""
        if asked.get("pod_uid") not in (None, os.environ.get("HEADRACE_POD_UID")):
            return "wrong_pod"
        if asked.get("boot_id") not in (None, self.boot_id):
            return "stale_boot_id"
        if asked.get("fence", 0) < self.fence:
            return "stale_fence"
        if self.phase != "ready" and asked["role"] == self.target and asked["expected_epoch"] == self.epoch:
            return ""
        if self.phase != "ready":
            return "role_change_under_way"
        return "" if asked["expected_epoch"] == self.epoch else "stale_epoch"

    def begin(self, asked: dict[str, Any]) -> None:
        """Start the drain, unless it is a repeat."""
        self.fence = max(self.fence, asked.get("fence", 0))
        if self.phase == "ready":
            self.phase, self.target = "draining", asked["role"]
            threading.Thread(target=self.change, args=(asked["drain_timeout"],), daemon=True).start()

    def change(self, timeout_s: float) -> None:
        """Drain, then switch; or roll back at the timeout."""
        began = time.monotonic()
        while not (drained := time.monotonic() - began >= drain_s()) and time.monotonic() - began < timeout_s:
            time.sleep(STEP_S)
        with self.lock:
            source, target = self.role, self.target or self.role
            self.role = target if drained else source
            self.epoch += 1
            self.last = {
                "epoch": self.epoch,
                "from_role": source,
                "to_role": target,
                "outcome": "Succeeded" if drained else "RolledBack",
                "drain_seconds": time.monotonic() - began,
                "switch_seconds": 0.002,
            }
            self.phase, self.target = "ready", None


def drain_s() -> float:
    """Length of a drain in seconds, as the file says at this moment."""
    name = os.environ.get("LIGHT_DRAIN_FILE", "")
    text = Path(name).read_text().strip() if name and Path(name).exists() else "0.05"
    return float("inf") if text == "never" else float(text)


def token() -> str:
    """The token that is asked for."""
    return Path(os.environ["HEADRACE_TOKEN_FILE"]).read_text().split()[0]


class Handler(BaseHTTPRequestHandler):
    """The HTTP side."""

    state: ClassVar[State]

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if self.path in ("/livez", "/readyz"):
            return self.answer(200, {})
        if self.path == "/metrics":
            return self.answer(200, {})
        if self.allowed() and self.path == "/v1/pd_role":
            with self.state.lock:
                return self.answer(200, self.state.view())
        return None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return None
        with self.state.lock:
            refusal = self.state.refusal(asked)
            if refusal:
                error = {"message": refusal, "type": "conflict", "param": None, "code": refusal}
                return self.answer(409, {"error": error})
            self.state.begin(asked)
            return self.answer(202, self.state.view())

    def allowed(self) -> bool:
        """Whether the token is right; answers 401 where it is not."""
        if self.headers.get("Authorization") == f"Bearer {token()}":
            return True
        error = {"message": "unauthorized", "type": "auth", "param": None, "code": "unauthorized"}
        self.answer(401, {"error": error})
        return False

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send JSON."""
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def main() -> None:
    """Serve until told to end. The first process of a container gets no signal that it has no handler for."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Handler.state = State()
    address = (os.environ["HEADRACE_POD_IP"], int(os.environ.get("HEADRACE_PORT", "8000")))
    ThreadingHTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
