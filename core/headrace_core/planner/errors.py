"""The planner's error. Its message names the field at fault and the remedy."""

from __future__ import annotations


class PlanError(ValueError):
    """What was asked for has no plan: a model that does not fit, an SLO under the floor, too few GPUs."""
