"""A NIXL agent whose progress thread pauses, and that can hold back the word that a read is over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.distributed.nixl_utils import NixlWrapper

PROGRESS_DELAY_US: Final = 100
"""Pause of the progress thread. Without one it polls a whole core away; with it, 2 % of one, far less than a
transfer takes."""


def transfer_errors() -> tuple[type[Exception], ...]:
    """What NIXL raises when a transfer or a notification fails; its classes share no base of their own."""
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    found = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(found)


class Agent(NixlWrapper):  # type: ignore[misc]
    """vLLM's NIXL agent, with the two changes."""

    def __init__(self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False) -> None:
        self._withheld: list[bytes] | None = None
        nixl = sys.modules[NixlWrapper.__module__]
        bindings = nixl.nixlBind
        nixl.nixlBind = _BindingsWithDelay(bindings)  # type: ignore[attr-defined]
        try:
            super().__init__(agent_name, nixl_conf, instantiate_all)
        finally:
            nixl.nixlBind = bindings  # type: ignore[attr-defined]

    @contextmanager
    def withholding_notifications(self) -> Iterator[list[bytes]]:
        """Transfers prepared in here tell the other side nothing when they end; what they would say is yielded."""
        self._withheld = []
        try:
            yield self._withheld
        finally:
            self._withheld = None

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"", **kwargs: Any) -> Any:
        """Prepares a transfer; see `withholding_notifications`."""
        if self._withheld is not None and notif_msg:
            self._withheld.append(notif_msg)
            notif_msg = b""
        return super().make_prepped_xfer(*args, notif_msg=notif_msg, **kwargs)


class _BindingsWithDelay:
    """NIXL's bindings, but a new agent gets its pause: NIXL's Python fixes it at zero just before it makes one."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)
