"""Carries out actions: creates, deletes, labels, asks workers, writes outcomes. It decides nothing."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace_core.api import names, resources
from headrace_core.api.names import Annotation, Condition, FlipStep, Label, Outcome, Reason
from headrace_core.api.wire import RoleRequest
from headrace_operator import times
from headrace_operator.errors import ConflictError, InvalidError, NotFoundError
from headrace_operator.events import Recorder
from headrace_operator.kube import CLUSTERS, FLIPS, PODS, Api, Object, resource_version
from headrace_operator.manifests import worker
from headrace_operator.manifests.shared import owner
from headrace_operator.metrics import Metrics
from headrace_operator.plan import actions as act
from headrace_operator.plan.status import Verdict, journal_status, merge_conditions
from headrace_operator.plan.view import ClusterSpec, FlipObject, Pod
from headrace_operator.reflector import Key, PodReflector
from headrace_operator.templates import Merged
from headrace_operator.workers import Workers

log: Final = logging.getLogger(__name__)

CRASH_EXIT_STATUS: Final = 70


@dataclass(slots=True, kw_only=True)
class Scene:
    """What the actions of one reconcile share. `resource_version` moves on with each write of the status."""

    cluster: ClusterSpec
    status: resources.ClusterStatus
    resource_version: str
    templates: Mapping[str, Merged]
    token: str
    fence: int
    flips: tuple[FlipObject, ...]

    @property
    def key(self) -> Key:
        """The cluster's namespace and name."""
        return (self.cluster.namespace, self.cluster.name)


class Applier:
    """Carries out actions in their order; the first that fails ends the reconcile, and the next one plans anew."""

    def __init__(
        self,
        api: Api,
        reflector: PodReflector,
        workers: Workers,
        recorder: Recorder,
        metrics: Metrics,
        *,
        crash_after: str = "",
    ) -> None:
        self._api = api
        self._reflector = reflector
        self._workers = workers
        self._recorder = recorder
        self._metrics = metrics
        self._crash_after = crash_after

    async def run(self, scene: Scene, actions: Iterable[act.Action]) -> None:
        """Carry them out.

        Raises:
            RetryableError: an object has changed since it was read, or somebody does not answer.
            ApiError: the API server refused for good.
        """
        for action in actions:
            await self._one(scene, action)

    async def _one(self, scene: Scene, action: act.Action) -> None:
        match action:
            case act.CreatePod():
                await self._create_pod(scene, action)
            case act.DeletePod():
                await self._delete_pod(scene, action)
            case act.AdoptPod():
                await self._adopt_pod(scene, action)
            case act.WriteJournal():
                await self._write_journal(scene, action)
            case act.LabelDraining():
                await self._label_draining(scene, action)
            case act.PostRole():
                await self._post_role(scene, action)
            case act.Relabel():
                await self._relabel(scene, action)
            case act.OwnFlip():
                await self._own_flip(scene, action)
            case act.HoldFlip():
                await self._hold_flip(scene, action)
            case act.FinishFlip():
                await self._finish_flip(scene, action)
            case act.ForgetFlip():
                await self._forget_flip(scene, action)
            case act.CreateFlip():
                await self._create_flip(scene, action)

    def crash_point(self, step: str) -> None:
        """End the process at once where a test asked for it; nothing else ever sets the name of a step."""
        if self._crash_after and self._crash_after == step:
            log.error("ending after step %s, as HEADRACE_CRASH_AFTER asks", step)
            os._exit(CRASH_EXIT_STATUS)

    async def _create_pod(self, scene: Scene, action: act.CreatePod) -> None:
        merged = scene.templates[action.pool]
        body = worker.pod(scene.cluster, action.slot, merged.template, merged.revision)
        try:
            self._wrote(scene, await self._api.create(PODS, body))
        except ConflictError:
            await self._take_back(scene, body["metadata"]["name"])
            raise
        except InvalidError as error:
            # The template alone was fine, so it is the pod as a whole that is not; say so where people look.
            text = f"pod {body['metadata']['name']} was refused: {error.message}"
            await self._recorder.record(scene.cluster, Reason.TEMPLATE_REFUSED, text, warning=True)
            raise
        text = f"created pod {body['metadata']['name']} in pool {action.pool}"
        await self._recorder.record(scene.cluster, action.reason, text)

    async def _take_back(self, scene: Scene, name: str) -> None:
        """Give a worker of ours the label again by which it is found; without it, its name would be taken for good."""
        try:
            body = await self._api.get(PODS, scene.cluster.namespace, name)
        except NotFoundError:
            return
        meta = body["metadata"]
        owners = [item["uid"] for item in meta.get("ownerReferences") or [] if item.get("controller")]
        if scene.cluster.uid not in owners or Label.CLUSTER in (meta.get("labels") or {}):
            return
        labels = {"labels": {Label.CLUSTER: scene.cluster.name}}
        written = await self._api.patch_metadata(PODS, scene.cluster.namespace, name, meta["resourceVersion"], labels)
        self._wrote(scene, written)
        text = f"{name} had lost its label {Label.CLUSTER}: labels repaired"
        await self._recorder.record(scene.cluster, Reason.ROLE_REPAIRED, text, warning=True)

    async def _delete_pod(self, scene: Scene, action: act.DeletePod) -> None:
        pod = action.pod
        try:
            self._wrote(scene, await self._api.delete(PODS, pod.namespace, pod.name, pod.uid))
        except NotFoundError:
            return
        text = f"deleted pod {pod.name}" + (f": {action.message}" if action.message else "")
        await self._recorder.record(scene.cluster, action.reason, text, warning=action.reason in _ALARMING)

    async def _adopt_pod(self, scene: Scene, action: act.AdoptPod) -> None:
        pod = action.pod
        operations: list[Object] = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": str(pod.resource_version)},
            {"op": "add", "path": "/metadata/ownerReferences", "value": [owner(scene.cluster)]},
        ]
        await self._patch_pod(scene, pod, operations)
        await self._recorder.record(scene.cluster, action.reason, f"adopted the orphaned pod {pod.name}")

    async def _write_journal(self, scene: Scene, action: act.WriteJournal) -> None:
        cluster = scene.cluster
        status = journal_status(action.journal, action.flipped, action.window, scene.status)
        written = await self._api.patch_status(
            CLUSTERS, cluster.namespace, cluster.name, scene.resource_version, status
        )
        scene.resource_version = written["metadata"]["resourceVersion"]
        scene.status = resources.InferenceCluster.model_validate(written).status
        log.info("%s/%s: %s %s", cluster.namespace, cluster.name, action.reason, action.message)
        if action.reason in (Reason.FLIP_RESERVED, Reason.FLIP_DROPPED, Reason.FLIP_REBUILT):
            await self._recorder.record(cluster, action.reason, action.message)
        if action.reason is Reason.FLIP_RESERVED:
            self.crash_point(FlipStep.RESERVED)

    async def _label_draining(self, scene: Scene, action: act.LabelDraining) -> None:
        entry = action.entry
        marks = {
            Annotation.FLIP_ID: entry.name,
            Annotation.FROM_ROLE: action.from_role.value,
            Annotation.TARGET_ROLE: action.to_role.value,
            Annotation.TARGET_POOL: entry.to_pool,
            Annotation.DEADLINE: times.micro(entry.deadline),
            Annotation.BOOT_ID: entry.boot_id,
        }
        labels = {Label.ROLE: names.ROLE_DRAINING, Label.LLMD_ROLE: names.ROLE_DRAINING}
        await self._mark_pod(scene, action.pod, labels, marks)
        self.crash_point(FlipStep.LABELLED)

    async def _post_role(self, scene: Scene, action: act.PostRole) -> None:
        request = RoleRequest(
            role=action.to_role,
            expected_epoch=action.entry.epoch,
            # Within what RoleRequest takes: above 0, since next to no time may be left, and at most an hour.
            drain_timeout=min(3600.0, max(0.1, action.drain_timeout_s)),
            pod_uid=action.pod.uid,
            boot_id=action.entry.boot_id or None,
            fence=scene.fence,
        )
        await self._workers.change(action.pod, request, scene.token)
        self.crash_point(FlipStep.DRAINING)

    async def _relabel(self, scene: Scene, action: act.Relabel) -> None:
        pod = action.pod
        self.crash_point(FlipStep.SWITCHED)
        labels = {Label.ROLE: action.role.value, Label.LLMD_ROLE: action.role.value, Label.POOL: action.pool}
        await self._mark_pod(scene, pod, labels, {Annotation.EPOCH: str(action.epoch), **dict.fromkeys(_FLIP_MARKS)})
        if action.reason is Reason.ROLE_REPAIRED:
            text = f"{pod.name} is a {action.role.value} worker at epoch {action.epoch}: labels repaired"
            await self._recorder.record(scene.cluster, action.reason, text, warning=True)
        self.crash_point(FlipStep.RELABELLED)

    async def _own_flip(self, scene: Scene, action: act.OwnFlip) -> None:
        reference = owner(scene.cluster) | {"controller": False}
        body = {"op": "add", "path": "/metadata/ownerReferences", "value": [reference]}
        test = {"op": "test", "path": "/metadata/uid", "value": action.flip.uid}
        try:
            await self._api.patch_json(FLIPS, scene.cluster.namespace, action.flip.name, [test, body])
        except NotFoundError:
            return

    async def _hold_flip(self, scene: Scene, action: act.HoldFlip) -> None:
        verdict = Verdict(met=False, reason=action.reason, message=action.message)
        await self._flip_status(scene.cluster.namespace, action.flip.name, {Condition.ACCEPTED: verdict}, {})

    async def answer(self, namespace: str, action: act.FinishFlip) -> bool:
        """Write the outcome of a flip to its InferenceFlip; False where that is gone or has one already."""
        refused = action.outcome is Outcome.REFUSED
        verdicts = {
            Condition.ACCEPTED: Verdict(
                met=not refused,
                reason=action.reason if refused else Reason.ACCEPTED,
                message=action.message if refused else "",
            ),
            Condition.COMPLETE: Verdict(met=True, reason=action.reason, message=action.message),
        }
        fields: Object = {"outcome": action.outcome.value, "finished": times.micro(time.time())}
        if action.started is not None:
            fields["started"] = times.micro(action.started)
        if action.from_pool:
            fields["fromPool"] = action.from_pool
        if action.drain_s is not None:
            fields["drainSeconds"] = round(action.drain_s, 6)
        if action.switch_s is not None:
            fields["switchMilliseconds"] = round(action.switch_s * 1000, 6)
        return await self._flip_status(namespace, action.name, verdicts, fields)

    async def _finish_flip(self, scene: Scene, action: act.FinishFlip) -> None:
        if await self.answer(scene.cluster.namespace, action):
            self._count(scene.cluster, action)
            flip = next((flip for flip in scene.flips if flip.name == action.name), None)
            reason = Reason.FLIPPED if action.outcome is Outcome.SUCCEEDED else action.reason
            asked = f" (asked for: {flip.reason})" if flip is not None and flip.reason else ""
            warning = action.outcome is not Outcome.SUCCEEDED
            await self._recorder.record(scene.cluster, reason, action.message + asked, warning=warning)
        self.crash_point(f"{FlipStep.RELABELLED}Outcome")

    async def _flip_status(
        self, namespace: str, name: str, verdicts: Mapping[Condition, Verdict], fields: Object
    ) -> bool:
        """Write an InferenceFlip's status; False where it is gone or has its outcome already."""
        try:
            body = await self._api.get(FLIPS, namespace, name)
            before = resources.InferenceFlip.model_validate(body)
            if before.status.outcome is not None:
                return False
            generation = before.metadata.generation
            conditions = merge_conditions(verdicts, before.status.conditions, generation, math.floor(time.time()))
            status = {
                "observedGeneration": generation,
                "conditions": [condition.manifest() for condition in conditions],
                **fields,
            }
            await self._api.patch_status(FLIPS, namespace, name, before.metadata.resource_version, status)
        except NotFoundError:
            return False
        return True

    def _count(self, cluster: ClusterSpec, action: act.FinishFlip) -> None:
        where = (cluster.namespace, cluster.name)
        self._metrics.flips.labels(*where, action.outcome.value, action.reason.value).inc()
        if action.drain_s is not None:
            self._metrics.drain_s.labels(*where).observe(action.drain_s)
        if action.switch_s is not None:
            self._metrics.switch_s.labels(*where).observe(action.switch_s)

    async def _forget_flip(self, scene: Scene, action: act.ForgetFlip) -> None:
        try:
            await self._api.delete(FLIPS, scene.cluster.namespace, action.flip.name, action.flip.uid)
        except NotFoundError:
            return

    async def _create_flip(self, scene: Scene, action: act.CreateFlip) -> None:
        cluster = scene.cluster
        labels = {Label.CLUSTER: cluster.name, Label.APP_MANAGED_BY: names.MANAGER}
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.Kind.FLIP.value,
            "metadata": {
                "name": action.name,
                "namespace": cluster.namespace,
                "labels": labels,
                "ownerReferences": [owner(cluster) | {"controller": False}],
            },
            "spec": {
                "clusterName": cluster.name,
                "podName": action.pod,
                "targetPool": action.to_pool,
                "reason": action.reason,
            },
        }
        try:
            await self._api.create(FLIPS, body)
        except ConflictError:
            # Another operator asked for the same flip in the same second.
            return

    async def _mark_pod(
        self, scene: Scene, pod: Pod, labels: Mapping[str, str], marks: Mapping[str, str | None]
    ) -> None:
        """Set labels and annotations of a pod that nobody has touched since it was read.

        A JSON patch would fail for good on a label or an annotation that somebody has removed.
        """
        metadata = {"labels": dict(labels), "annotations": dict(marks)}
        written = await self._api.patch_metadata(PODS, pod.namespace, pod.name, str(pod.resource_version), metadata)
        self._wrote(scene, written)

    async def _patch_pod(self, scene: Scene, pod: Pod, operations: list[Object]) -> None:
        try:
            written = await self._api.patch_json(PODS, pod.namespace, pod.name, operations)
        except InvalidError as error:
            # A failed test means that the pod is not as it was read: the next reconcile reads it anew.
            text = f"{pod.name} has changed meanwhile: {error.message}"
            raise ConflictError(error.status, error.reason, text, error.causes) from error
        self._wrote(scene, written)

    def _wrote(self, scene: Scene, written: Object) -> None:
        if written.get("kind") == "Pod":
            self._reflector.wrote(scene.key, resource_version(written))


_ALARMING: Final = frozenset(
    {Reason.POD_FAILED, Reason.WORKER_FAILED, Reason.WORKER_SILENT, Reason.WORKER_STUCK, Reason.ROLE_REPAIRED}
)
_FLIP_MARKS: Final[tuple[str, ...]] = (
    Annotation.FLIP_ID,
    Annotation.FROM_ROLE,
    Annotation.TARGET_ROLE,
    Annotation.TARGET_POOL,
    Annotation.DEADLINE,
    Annotation.BOOT_ID,
)
