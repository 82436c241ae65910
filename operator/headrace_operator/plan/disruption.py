"""Decides how many workers of a role must stay when nodes are drained, and finds budgets that get in the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_core.api.names import Role
from headrace_operator.plan.view import Observed


def min_available(observed: Observed, role: Role) -> int:
    """`minAvailable` of a role's budget: what its pools should have, less `rollout.maxUnavailable`; at least 0."""
    desired = sum(observed.desired(pool) for pool in observed.cluster.pools if pool.role is role)
    return max(0, desired - observed.cluster.max_unavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A PodDisruptionBudget of the namespace: its name, its controller and the labels it selects by."""

    name: str
    owner_uid: str
    match_labels: Mapping[str, str]
    match_expressions: tuple[Mapping[str, Any], ...] = ()
    selects_nothing: bool = False
    """No selector at all selects no pod; an empty one selects all (policy/v1)."""

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether it covers a pod with these labels."""
        if self.selects_nothing or any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(_holds(expression, labels) for expression in self.match_expressions)


def foreign_budgets(budgets: Iterable[Budget], pods: Iterable[Mapping[str, str]], cluster_uid: str) -> tuple[str, ...]:
    """Names of budgets of others that cover one of our pods: two over one pod make its eviction fail (500)."""
    covered = list(pods)
    return tuple(
        sorted(
            budget.name
            for budget in budgets
            if budget.owner_uid != cluster_uid and any(budget.selects(labels) for labels in covered)
        )
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels
