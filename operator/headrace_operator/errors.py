"""The operator's exceptions.

HeadraceOperatorError
├── SettingsError          the environment is wrong: the process ends
├── LeaseLostError         another operator leads, or the API server is away too long: the process ends
├── InvalidSpecError       a stored InferenceCluster does not follow the schema of this version
├── RetryableError         the reconcile is tried again after a back-off
│   ├── ApiUnavailableError    no answer, or a 5xx or 429 answer, from the API server
│   ├── ConflictError          409: the object is not what was read
│   ├── WorkerUnreachableError no usable answer from a worker
│   └── PrometheusError        no usable answer from Prometheus
└── ApiError               a final answer of the API server
    ├── NotFoundError          404
    ├── GoneError              410: the resource version is too old to watch from
    ├── InvalidError           400 or 422: the object was refused
    └── ForbiddenError         401 or 403
"""

from __future__ import annotations

from dataclasses import dataclass


class HeadraceOperatorError(Exception):
    """Base of all."""


class SettingsError(HeadraceOperatorError):
    """An environment variable has no usable value."""


class LeaseLostError(HeadraceOperatorError):
    """The Lease could not be renewed in time, or is somebody else's."""


class InvalidSpecError(HeadraceOperatorError):
    """An InferenceCluster that this version cannot read; the message names the fields."""


class RetryableError(HeadraceOperatorError):
    """May pass by itself: try again later."""


class ApiUnavailableError(RetryableError):
    """The API server did not answer, or answered 429 or 5xx."""


@dataclass(frozen=True)
class Cause:
    """One entry of a Kubernetes Status: which field, and what is wrong with it."""

    field: str
    message: str


class ApiError(HeadraceOperatorError):
    """The API server refused the request for good."""

    def __init__(self, status: int, reason: str, message: str, causes: tuple[Cause, ...] = ()) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes


class ConflictError(RetryableError, ApiError):
    """409: somebody else wrote the object, owns a field of it, or it is there already."""


class NotFoundError(ApiError):
    """404."""


class GoneError(ApiError):
    """410: list again."""


class InvalidError(ApiError):
    """400 or 422: the causes name the fields."""


class ForbiddenError(ApiError):
    """401 or 403."""


class WorkerUnreachableError(RetryableError):
    """A worker did not answer, or not with what its protocol says."""


class PrometheusError(RetryableError):
    """Prometheus did not answer, or not with what its API says."""
