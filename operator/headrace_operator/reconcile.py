"""Brings one InferenceCluster to what its spec says: gather, decide, write, in that order."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Final

from headrace_core.api import names, resources
from headrace_core.api.names import COMPONENT_WORKER, Condition, Label, Reason, Role
from headrace_operator import observe
from headrace_operator.apply import Applier, Scene
from headrace_operator.elastic import Elastic
from headrace_operator.errors import ApiError, ForbiddenError, InvalidSpecError, NotFoundError
from headrace_operator.kube import BUDGETS, CLUSTERS, FLIPS, NODES, Api, Object
from headrace_operator.manifests import gateway, worker
from headrace_operator.manifests.shared import Images, Manifest
from headrace_operator.metrics import Metrics
from headrace_operator.objects import Objects
from headrace_operator.plan import admission, disruption, flips, pods
from headrace_operator.plan.actions import Action
from headrace_operator.plan.rollout import out_of_date
from headrace_operator.plan.status import Surroundings, Verdict, cluster_status, merge_conditions
from headrace_operator.plan.view import ClusterSpec, Failures, Observed
from headrace_operator.reflector import Key, PodReflector
from headrace_operator.settings import Settings
from headrace_operator.templates import Parts, Templates
from headrace_operator.workers import Workers

CACHE_WAIT_S: Final = 0.05
"""Time between two looks whether the cache has seen our own writes; a watch event takes some milliseconds."""
WAITING_POLL_S: Final = 1.0
"""Time between two looks at a flip that waits for its turn or its worker."""
FAILURES_FORGOTTEN_S: Final = 600.0
"""Without another failure for this long, the next one is a first one again."""


@dataclass(slots=True)
class Memory:
    """What is remembered of a cluster between two reconciles. All of it can be lost: it is read or made again."""

    uid: str
    failures: Failures = field(default_factory=Failures)
    failed: frozenset[str] = frozenset()
    """UIDs of failed pods that are counted already."""
    foreign_budgets: tuple[str, ...] = ()
    budgets_checked: float = 0.0


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """Reconciles clusters; holds the rooms that a reconcile passes through."""

    api: Api
    reflector: PodReflector
    workers: Workers
    elastic: Elastic
    templates: Templates
    objects: Objects
    applier: Applier
    metrics: Metrics
    settings: Settings
    fence: int
    _memories: dict[Key, Memory] = field(default_factory=dict)

    async def __call__(self, key: Key) -> float | None:
        """Reconcile one cluster.

        Returns:
            Seconds after which to come again, or None when the cluster is gone.

        Raises:
            RetryableError: something has changed meanwhile or does not answer.
            ApiError: the API server refused something.
        """
        began = time.perf_counter()
        outcome = "error"
        try:
            delay_s = await self._reconcile(key)
            outcome = "done"
        finally:
            self.metrics.reconcile_s.labels(outcome).observe(time.perf_counter() - began)
        return delay_s

    async def _reconcile(self, key: Key) -> float | None:
        # 1. Gather.
        body = await self._read(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            await self._gone(key)
            return None
        if not self.reflector.synced or not self.reflector.has_seen(key):
            return CACHE_WAIT_S
        try:
            cluster = observe.read_cluster(body)
        except InvalidSpecError as error:
            return await self._invalid(key, body, error)
        spec = observe.cluster_spec(cluster)
        memory = self._memory(key, spec)
        token = await self.objects.token(spec)
        parts = await self.templates.merge_all(spec, self._images())
        observed = await self._observe(spec, cluster.status, memory, parts, token)
        # 2. Decide.
        actions = self._plan(observed)
        if not actions:
            wish = await self.elastic.decide(observed)
            actions = [wish] if wish is not None else []
        # 3. Write.
        scene = Scene(
            cluster=spec,
            status=cluster.status,
            resource_version=cluster.metadata.resource_version,
            templates=parts.pools,
            token=token,
            fence=self.fence,
            flips=observed.flips,
        )
        failure = await self._write(scene, observed, parts, actions)
        if actions and failure is None:
            # The status is made from what the next look sees.
            return 0.0
        # A refusal that came after a write of the journal: what was observed is older than the status by then.
        if scene.status is cluster.status:
            await self._status(scene, observed, memory, parts, failure)
        if failure is not None:
            raise failure
        return self._next(observed)

    async def _read(self, key: Key) -> Object | None:
        try:
            return await self.api.get(CLUSTERS, *key)
        except NotFoundError:
            return None

    async def _gone(self, key: Key) -> None:
        """Owner references delete what is left. Requests for a cluster that is not there get their answer."""
        memory = self._memories.pop(key, None)
        self.elastic.forget(key)
        if memory is not None:
            self.templates.forget(memory.uid)
            self.objects.forget(memory.uid)
            self.metrics.forget(*key)
        namespace, name = key
        found, _ = await self.api.list_all(FLIPS, namespace)
        for item in found:
            flip = observe.flip_view(item, "")
            if flip.cluster == name and not flip.outcome:
                text = f"there is no InferenceCluster {name}, or it is being deleted"
                await self.applier.answer(namespace, admission.refuse(flip, Reason.CLUSTER_NOT_FOUND, text))

    async def _invalid(self, key: Key, body: Object, error: InvalidSpecError) -> float:
        """Say what is wrong with a spec that this version cannot read, and leave the pods as they are."""
        before = resources.ClusterStatus.model_validate(body.get("status") or {})
        generation = int(body["metadata"].get("generation", 0))
        verdict = Verdict(met=False, reason=Reason.INVALID_SPEC, message=str(error))
        others = [item for item in before.conditions if item.type != Condition.ACCEPTED]
        accepted = merge_conditions({Condition.ACCEPTED: verdict}, before.conditions, generation, time.time())
        status = before.model_copy(
            update={"conditions": (*accepted, *others), "observed_generation": generation}
        ).manifest()
        if status != before.manifest():
            await self.api.patch_status(CLUSTERS, *key, body["metadata"]["resourceVersion"], status)
        return self.settings.tick_s

    def _memory(self, key: Key, spec: ClusterSpec) -> Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != spec.uid:
            memory = self._memories[key] = Memory(uid=spec.uid)
        return memory

    def _images(self) -> Images:
        return Images(
            worker=self.settings.worker_image,
            gateway=self.settings.gateway_image,
            pull_policy=self.settings.image_pull_policy,
            pull_secrets=self.settings.image_pull_secrets,
        )

    async def _observe(
        self, spec: ClusterSpec, status: resources.ClusterStatus, memory: Memory, parts: Parts, token: str
    ) -> Observed:
        found, _ = await self.api.list_all(FLIPS, spec.namespace)
        observed = Observed(
            cluster=spec,
            now=time.time(),
            fence=self.fence,
            pods=self.reflector.pods((spec.namespace, spec.name)),
            journal=observe.journal_view(status),
            window=observe.window_view(status),
            flips=tuple(
                observe.flip_view(item, spec.uid) for item in found if item["spec"]["clusterName"] == spec.name
            ),
            revisions={name: merged.revision for name, merged in parts.pools.items()},
        )
        observed = replace(observed, flipped=observe.flipped_view(status, observed))
        remember_failures(memory, observed)
        await self._look_at_budgets(memory, observed, parts)
        return replace(
            observed,
            failures=memory.failures,
            cordoned=await self._cordoned(observed),
            roles=await self.workers.roles(observe.pods_to_ask(observed), token),
        )

    async def _cordoned(self, observed: Observed) -> frozenset[str]:
        """Nodes that are to be drained, read only when a worker has to go. Without the right to see nodes: none."""
        too_many = any(len(observed.members(pool.name)) > observed.desired(pool) for pool in observed.cluster.pools)
        if not too_many and not any(out_of_date(observed, pod) for pod in observed.workers):
            return frozenset()
        try:
            found, _ = await self.api.list_all(NODES)
        except ForbiddenError:
            return frozenset()
        return frozenset(item["metadata"]["name"] for item in found if item["spec"].get("unschedulable"))

    async def _look_at_budgets(self, memory: Memory, observed: Observed, parts: Parts) -> None:
        """Find others' disruption budgets over our pods, once a tick."""
        if observed.now - memory.budgets_checked < self.settings.tick_s:
            return
        memory.budgets_checked = observed.now
        found, _ = await self.api.list_all(BUDGETS, observed.cluster.namespace)
        budgets = [observe.budget_view(item) for item in found]
        kinds = {(pod.pool, pod.role) for pod in observed.workers}
        labels = [
            {
                **((parts.pools[pool].template.get("metadata") or {}).get("labels") or {}),
                Label.POOL: pool,
                Label.ROLE: role,
                Label.LLMD_ROLE: role,
            }
            for pool, role in kinds
            if pool in parts.pools
        ]
        memory.foreign_budgets = disruption.foreign_budgets(budgets, labels, observed.cluster.uid)

    def _plan(self, observed: Observed) -> list[Action]:
        """Flips first: while one is stepping, the pods are not counted."""
        actions = flips.plan_flips(observed, self.settings.flip_grace_s)
        if not actions:
            actions = admission.plan_requests(observed)
        if not actions:
            actions = [*pods.plan_pods(observed), *admission.forget(observed.flips)]
        return actions

    async def _write(self, scene: Scene, observed: Observed, parts: Parts, actions: list[Action]) -> ApiError | None:
        """Apply the objects around the pods, then the actions. A refusal is returned, so that the status tells it."""
        try:
            manifests = manifests_of(observed, parts)
            await self.objects.ensure(scene.cluster, manifests)
            await self.objects.prune(scene.cluster, wanted(observed.cluster, manifests))
            await self.applier.run(scene, actions)
        except ApiError as error:
            return error
        return None

    async def _status(
        self, scene: Scene, observed: Observed, memory: Memory, parts: Parts, failure: ApiError | None
    ) -> None:
        """One status patch, and only if something in it has changed."""
        advice = self.elastic.advice(observed)
        accepted = Verdict(met=True, reason=Reason.ACCEPTED)
        if parts.refused:
            text = "; ".join(item.message for item in parts.refused)
            accepted = Verdict(met=False, reason=parts.refused[0].reason, message=text)
        around = Surroundings(
            accepted=accepted,
            gateways_ready=observe.gateways_ready(observed.pods),
            foreign_budgets=memory.foreign_budgets,
            failure=str(failure) if failure is not None else "",
            hold=advice.hold,
            advice=advice.would,
        )
        self._count_pods(observed)
        status = cluster_status(observed, around, scene.status)
        if status == scene.status.manifest():
            return
        cluster = scene.cluster
        await self.api.patch_status(CLUSTERS, cluster.namespace, cluster.name, scene.resource_version, status)

    def _count_pods(self, observed: Observed) -> None:
        cluster = observed.cluster
        roles = (*(role.value for role in Role), names.ROLE_DRAINING)
        for role in roles:
            of_role = [pod for pod in observed.workers if pod.role == role]
            ready = sum(pod.ready for pod in of_role)
            for state, count in (("ready", ready), ("not_ready", len(of_role) - ready)):
                self.metrics.pods.labels(cluster.namespace, cluster.name, role, state).set(count)

    def _next(self, observed: Observed) -> float:
        """When to come again if nothing happens."""
        delays = [self.settings.tick_s]
        if observed.journal:
            delays.append(self.settings.flip_poll_s)
        elif any(not flip.outcome for flip in observed.flips):
            delays.append(WAITING_POLL_S)
        if pods.backing_off(observed):
            delays.append(max(0.1, observed.failures.retry_at() - observed.now))
        due_s = self.elastic.due_in(observed)
        if due_s is not None:
            delays.append(max(0.1, due_s))
        return min(delays)


def remember_failures(memory: Memory, observed: Observed) -> None:
    """Count pods that have ended by themselves, each once."""
    failed = frozenset(
        pod.uid
        for pod in observed.pods
        if pod.component == COMPONENT_WORKER
        and pod.owner_uid == observed.cluster.uid
        and pod.failed
        and not pod.terminating
    )
    fresh = failed - memory.failed
    memory.failed = failed
    if fresh:
        recent = observed.now - memory.failures.last < FAILURES_FORGOTTEN_S
        before = memory.failures.count if recent else 0
        memory.failures = Failures(count=before + len(fresh), last=observed.now)


def manifests_of(observed: Observed, parts: Parts) -> list[Manifest]:
    """The objects around a cluster's pods."""
    cluster = observed.cluster
    made = [worker.service_account(cluster)]
    made += [worker.disruption_budget(cluster, role, disruption.min_available(observed, role)) for role in Role]
    if cluster.gateway.managed:
        made += [*gateway.access(cluster), gateway.service(cluster)]
        if parts.gateway is not None:
            made.append(gateway.deployment(cluster, parts.gateway.template))
    return made


def wanted(cluster: ClusterSpec, manifests: list[Manifest]) -> list[tuple[str, str]]:
    """Kind and name of all that may stay: a gateway whose template was refused keeps running as it was."""
    keep = [(item["kind"], item["metadata"]["name"]) for item in manifests]
    keep += [("PodTemplate", worker.template_name(cluster.name, pool.name)) for pool in cluster.pools]
    if cluster.gateway.managed:
        name = names.gateway_name(cluster.name)
        keep += [("PodTemplate", name), ("Deployment", name)]
    return keep
