"""The errors of the performance model. Each message names the field at fault and the remedy.

`PerfError` is the root: a name that is not known, a shape or degree that cannot be. `FitError`: measured steps from
which no coefficients follow. `DoesNotFitError`: a model that leaves no memory for KV.
"""

from __future__ import annotations


class PerfError(ValueError):
    """Input to the performance model that names no known thing, or that cannot be."""


class FitError(PerfError):
    """Measured steps from which no coefficients follow."""


class DoesNotFitError(PerfError):
    """A model that leaves no memory for KV on the given accelerators."""
