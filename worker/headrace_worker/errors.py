"""The exceptions of the worker: one tree, and nothing in it is caught to carry on unseen."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of every error that the worker raises on purpose."""


class SettingsError(WorkerError):
    """The environment does not describe a worker that can run. The message names the variable and the remedy."""
