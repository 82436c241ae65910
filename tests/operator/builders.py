"""Fluent builders of what the planners see: a cluster of two pools, its pods, its flips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_core.api.names import ROLE_DRAINING, Role
from headrace_core.api.wire import LastSwitch, Phase, RoleState
from headrace_operator.plan.view import (
    ClusterSpec,
    Entry,
    Failures,
    FlipMarks,
    FlipObject,
    FlipRules,
    GatewaySpec,
    ModelSpec,
    Observed,
    Pod,
    PoolSpec,
    Silent,
    Window,
)

NOW = 1_000_000.0
FENCE = 7
UID = "cluster-uid"
GRACE_S = 30.0
RULES = FlipRules(
    automatic=True,
    advised=False,
    allowed=True,
    cooldown_s=120,
    drain_timeout_s=60,
    max_concurrent=1,
    max_per_hour=20,
    idle_below=0.1,
    idle_for_s=60,
    interval_s=15,
)


def pool(name: str, role: Role, replicas: int = 2, **changes: Any) -> PoolSpec:
    plain = PoolSpec(name=name, role=role, elastic=True, replicas=replicas, min_replicas=1, max_replicas=8)
    return replace(plain, **changes)


def pod(slot: int, in_pool: str = "prefill", **changes: Any) -> Pod:
    role = {"prefill": "prefill", "decode": "decode"}.get(in_pool, "prefill")
    plain = Pod(
        namespace="llm",
        name=f"chat-w{slot}",
        uid=f"uid-{slot}",
        resource_version=100 + slot,
        cluster="chat",
        component="worker",
        pool=in_pool,
        role=role,
        revision="r1",
        origin_pool=in_pool,
        owner_uid=UID,
        phase="Running",
        ready=True,
        created=NOW - 1000 + slot,
        address=f"127.1.0.{slot + 1}",
        node="node-a",
    )
    return replace(plain, **changes)


def draining(slot: int, flip: str = "f1", to_pool: str = "decode", **changes: Any) -> Pod:
    marks = FlipMarks(
        flip=flip, from_role="prefill", to_role="decode", to_pool=to_pool, deadline=NOW + 60, boot_id="boot"
    )
    return pod(slot, role=ROLE_DRAINING, flip=marks, **changes)


def entry(slot: int = 0, name: str = "f1", **changes: Any) -> Entry:
    plain = Entry(
        name=name,
        pod=f"chat-w{slot}",
        pod_uid=f"uid-{slot}",
        from_pool="prefill",
        to_pool="decode",
        epoch=0,
        boot_id="boot",
        fence=FENCE,
        started=NOW - 5,
        deadline=NOW + 60,
    )
    return replace(plain, **changes)


def state(role: str = "prefill", epoch: int = 0, phase: Phase = Phase.READY, **changes: Any) -> RoleState:
    return RoleState(role=Role(role), epoch=epoch, boot_id="boot", phase=phase, **changes)


def switched(role: str = "decode", epoch: int = 1, outcome: str = "Succeeded") -> RoleState:
    last = LastSwitch(
        epoch=epoch,
        from_role=Role.PREFILL,
        to_role=Role.DECODE,
        outcome=outcome,
        drain_seconds=1.5,
        switch_seconds=0.004,
    )
    return state(role, epoch, last_switch=last)


def flip(name: str = "f1", slot: int = 0, to_pool: str = "decode", **changes: Any) -> FlipObject:
    plain = FlipObject(
        name=name,
        uid=f"uid-{name}",
        cluster="chat",
        pod=f"chat-w{slot}",
        to_pool=to_pool,
        reason="by hand",
        created=NOW - 1,
    )
    return replace(plain, **changes)


@dataclass
class World:
    """Builds an `Observed`; each method returns the builder."""

    pools: tuple[PoolSpec, ...] = (pool("prefill", Role.PREFILL), pool("decode", Role.DECODE, 1))
    rules: FlipRules = RULES
    max_unavailable: int = 1
    values: dict[str, Any] = field(default_factory=dict)

    def with_pools(self, *pools: PoolSpec) -> World:
        self.pools = pools
        return self

    def with_rules(self, **changes: Any) -> World:
        self.rules = replace(self.rules, **changes)
        return self

    def unavailable(self, count: int) -> World:
        self.max_unavailable = count
        return self

    def with_pods(self, *pods: Pod) -> World:
        return self._set("pods", pods)

    def with_roles(self, roles: Mapping[int, RoleState | Silent]) -> World:
        return self._set("roles", {f"uid-{slot}": value for slot, value in roles.items()})

    def with_journal(self, *entries: Entry) -> World:
        return self._set("journal", entries)

    def with_flips(self, *flips: FlipObject) -> World:
        return self._set("flips", flips)

    def flipped(self, **counts: int) -> World:
        return self._set("flipped", counts)

    def in_window(self, window: Window) -> World:
        return self._set("window", window)

    def with_revisions(self, **revisions: str) -> World:
        return self._set("revisions", revisions)

    def with_failures(self, count: int, last: float) -> World:
        return self._set("failures", Failures(count=count, last=last))

    def cordoned(self, *nodes: str) -> World:
        return self._set("cordoned", frozenset(nodes))

    def at(self, now: float) -> World:
        return self._set("now", now)

    def look(self) -> Observed:
        cluster = ClusterSpec(
            namespace="llm",
            name="chat",
            uid=UID,
            generation=3,
            model=ModelSpec(uri="hf://org/model", served_name="model"),
            pools=self.pools,
            flips=self.rules,
            gateway=GatewaySpec(),
            max_unavailable=self.max_unavailable,
        )
        defaults: dict[str, Any] = {
            "now": NOW,
            "fence": FENCE,
            "revisions": {each.name: "r1" for each in self.pools},
        }
        return Observed(cluster=cluster, **(defaults | self.values))

    def _set(self, name: str, value: Any) -> World:
        self.values[name] = value
        return self
