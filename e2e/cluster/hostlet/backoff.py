"""Decides whether a container is started again, and after how long."""

from __future__ import annotations


class Backoff:
    """Delays that double while something keeps failing, and start again after twice the longest delay in peace.

    The first restart comes at once; then 10 s, 20 s, 40 s ... 5 min by default (concepts/workloads/pods/pod-lifecycle,
    "How Pods handle problems with containers").
    """

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._delay_s = 0.0
        self._failed_at: float | None = None

    def next_delay_s(self, now: float) -> float:
        """Seconds to wait before the next start, for a failure at `now`."""
        if self._failed_at is not None and now - self._failed_at > 2 * self._max_s:
            self._delay_s = 0.0
        first = self._delay_s == 0.0
        result, self._failed_at = self._delay_s, now
        self._delay_s = self._base_s if first else min(self._delay_s * 2, self._max_s)
        return min(result, self._max_s)


def restarts(policy: str, exit_code: int) -> bool:
    """Whether a container that ended with `exit_code` is started again under restartPolicy `policy`."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)
