"""Touches one container of a pod: starts it, probes it, starts it again after it ends, and stops it."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from e2e.cluster.hostlet.backoff import Backoff, restarts
from e2e.cluster.hostlet.environment import ConfigError, expand
from e2e.cluster.hostlet.probes import Outcome, Target, named_ports, probe, run_handler
from e2e.cluster.hostlet.sandbox import Launch, Mount, Running, Sandbox, StartError
from e2e.cluster.hostlet.status import ContainerRecord, Started, Terminated, Waiting

Json = dict[str, Any]

log = logging.getLogger(__name__)

_CONFIG_RETRY_S = 1.0
# The kubelet leaves a container this long after preStop even when preStop took the whole grace period.
_LEAST_GRACE_S = 2.0
_STOP_STEP_S = 0.2
_MESSAGE_BYTES = 4096
_LOG_TAIL_BYTES = 2048
_START_FAILED = 128


class PodView(Protocol):
    """What a container needs of its pod."""

    sandbox: Sandbox
    pod_ip: str
    hostname: str
    grace_s: float
    stopping: asyncio.Event

    def remaining_s(self) -> float:
        """Seconds left of the grace period of a pod that stops."""
        ...

    def image_argv(self, image: str) -> list[str] | None:
        """The entry point of an image, None where the node has no such image."""
        ...

    def environment(self, spec: Json) -> dict[str, str]:
        """All variables of the container; raises `ConfigError`."""
        ...

    def mounts(self, spec: Json, env: Mapping[str, str]) -> list[Mount]:
        """All mounts of the container; raises `ConfigError`."""
        ...

    def container_folder(self, name: str) -> Path:
        """A folder of the container's own."""
        ...

    def log_path(self, name: str, restart: int) -> Path:
        """Where the outputs of one run of the container go."""
        ...

    def changed(self) -> None:
        """Something that the status shows has changed."""
        ...

    def event(self, kind: str, reason: str, message: str) -> None:
        """Tell the cluster (an Event of kind Normal or Warning on the pod)."""
        ...


@dataclass(frozen=True)
class Delays:
    """The node's restart delays, in seconds."""

    base_s: float
    max_s: float


class Container:
    """One container over all its restarts."""

    def __init__(self, pod: PodView, spec: Json, record: ContainerRecord, policy: str, delays: Delays) -> None:
        self.pod = pod
        self.spec = spec
        self.record = record
        self._policy = policy
        self._backoff = Backoff(delays.base_s, delays.max_s)
        self._pull_backoff = Backoff(delays.base_s, delays.max_s)
        self.running: Running | None = None
        # Set once the container has started for the first time (its startup probe included).
        self.has_started = asyncio.Event()
        self._ever_started = bool(record.container_id)
        self._ended_for: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._startup_task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The container's name in the pod."""
        return str(self.spec["name"])

    def is_to_run(self) -> bool:
        """Whether the container is yet to be started, or to be started again."""
        state = self.record.state
        return not isinstance(state, Terminated) or restarts(self._policy, state.exit_code)

    async def run(self) -> None:
        """Run until the container has ended for good or the pod stops."""
        if not self.is_to_run():
            return
        if isinstance(self.record.state, Terminated):
            self._backoff.next_delay_s(time.monotonic())
        while not self.pod.stopping.is_set():
            argv = await self._image()
            launch = await self._launch(argv) if argv is not None else None
            if launch is None:
                return
            ended = await self._run_once(launch)
            if self.pod.stopping.is_set() or not restarts(self._policy, ended.exit_code):
                return
            await self._back_off()

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self.pod.stopping.wait()
        except TimeoutError:
            pass

    def _wait_for(self, reason: str, message: str) -> None:
        state = Waiting(reason, message)
        if state != self.record.state:
            if isinstance(self.record.state, Terminated):
                self.record.last = self.record.state
            self.record.state = state
            self.pod.changed()

    async def _image(self) -> list[str] | None:
        image = self.spec["image"]
        self._pull_backoff.next_delay_s(time.monotonic())
        while not self.pod.stopping.is_set():
            argv = self.pod.image_argv(image)
            if argv is not None:
                return argv
            message = f'the node has no image "{image}": it is not in the hostlet\'s table of images'
            self._wait_for("ErrImagePull", message)
            self.pod.event("Warning", "Failed", f'Failed to pull image "{image}": {message}')
            delay_s = self._pull_backoff.next_delay_s(time.monotonic())
            await self._pause(min(delay_s, 1.0))
            self._wait_for("ImagePullBackOff", f'Back-off pulling image "{image}": {message}')
            await self._pause(delay_s)
        return None

    async def _launch(self, entry_point: Sequence[str]) -> Launch | None:
        while not self.pod.stopping.is_set():
            try:
                return self._prepare(entry_point)
            except (ConfigError, OSError) as error:
                if not isinstance(self.record.state, Waiting) or self.record.state.message != str(error):
                    self.pod.event("Warning", "Failed", f"Error: {error}")
                self._wait_for("CreateContainerConfigError", str(error))
                await self._pause(_CONFIG_RETRY_S)
        return None

    def _prepare(self, entry_point: Sequence[str]) -> Launch:
        spec, folder = self.spec, self.pod.container_folder(self.name)
        env = self.pod.environment(spec)
        command = [expand(each, env) for each in spec.get("command") or entry_point]
        arguments = [expand(each, env) for each in spec.get("args") or []]
        message = folder / "termination-log"
        message.write_bytes(b"")
        mounts = self.pod.mounts(spec, env)
        mounts.append(Mount(message, spec.get("terminationMessagePath") or "/dev/termination-log"))
        restart = self.record.restart_count + (1 if self._ever_started else 0)
        return Launch(
            argv=[*command, *arguments],
            env=env,
            workdir=spec.get("workingDir") or "/",
            mounts=mounts,
            hostname=self.pod.hostname,
            folder=folder,
            log_path=self.pod.log_path(self.name, restart),
        )

    async def _run_once(self, launch: Launch) -> Terminated:
        record = self.record
        if isinstance(record.state, Terminated):
            record.last = record.state
        if self._ever_started:
            record.restart_count += 1
        self._ever_started = True
        record.container_id = f"hostlet://{uuid.uuid4().hex}"
        record.image_id = f"hostlet://{self.spec['image']}"
        self._ended_for = None
        begun = time.time()
        self._ending = None
        try:
            self.running = await self.pod.sandbox.start(launch)
        except StartError as error:
            log.info("%s: cannot start: %s", self.name, error)
            self.pod.event("Warning", "Failed", f"Error: {error}")
            return self._terminated(_START_FAILED, "StartError", begun, str(error))
        record.state = Started(begun)
        record.started = "startupProbe" not in self.spec
        record.ready = record.started and "readinessProbe" not in self.spec
        if record.started:
            self.has_started.set()
        self.pod.event("Normal", "Started", f"Container {self.name} started")
        self.pod.changed()
        if self.pod.stopping.is_set():
            # The pod began to stop while the program was being started.
            self._ending = asyncio.create_task(self.stop(self.pod.remaining_s))
        self._begin_watching()
        try:
            code = await self.running.wait()
        finally:
            for task in self._tasks:
                task.cancel()
        self.running = None
        reason = self._ended_for or ("Completed" if code == 0 else "Error")
        return self._terminated(code, reason, begun, self._last_words(launch, code))

    def _terminated(self, code: int, reason: str, begun: float, message: str) -> Terminated:
        record = self.record
        state = Terminated(code, reason, begun, time.time(), record.container_id, message)
        record.state, record.ready, record.started = state, False, False
        self.pod.changed()
        return state

    def _last_words(self, launch: Launch, code: int) -> str:
        text = (launch.folder / "termination-log").read_bytes()[:_MESSAGE_BYTES]
        if not text and code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            text = launch.log_path.read_bytes()[-_LOG_TAIL_BYTES:]
        return text.decode(errors="replace")

    async def _back_off(self) -> None:
        delay_s = self._backoff.next_delay_s(time.monotonic())
        if delay_s > 0:
            message = f"back-off {delay_s:g}s restarting failed container={self.name}"
            self.pod.event("Warning", "BackOff", f"Back-off restarting failed container {self.name}")
            self._wait_for("CrashLoopBackOff", message)
            await self._pause(delay_s)

    # Probes and hooks.

    def target(self) -> Target:
        """Where this container's probes and hooks are aimed."""
        return Target(self.pod.pod_ip, named_ports(self.spec), self.exec)

    async def exec(self, argv: Sequence[str]) -> asyncio.subprocess.Process:
        """Run a program in the container; raises `ProcessLookupError` when it does not run."""
        if self.running is None:
            raise ProcessLookupError(f"container {self.name} is not running")
        return await self.pod.sandbox.exec(self.running, argv)

    def _begin_watching(self) -> None:
        self._tasks = []
        if hook := (self.spec.get("lifecycle") or {}).get("postStart"):
            self._task(self._post_start(hook))
        if "startupProbe" in self.spec:
            self._startup_task = self._task(probe(self.spec["startupProbe"], self.target(), self._startup_verdict))
        else:
            self._begin_probes(0.0)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    def _begin_probes(self, passed_s: float) -> None:
        tells: list[tuple[str, Callable[[bool, Outcome], None]]] = [
            ("readinessProbe", self._readiness_verdict),
            ("livenessProbe", self._liveness_verdict),
        ]
        for kind, tell in tells:
            if spec := self.spec.get(kind):
                # initialDelaySeconds counts from the container's start, also behind a startup probe.
                left_s = max(0.0, (spec.get("initialDelaySeconds") or 0) - passed_s)
                self._task(probe({**spec, "initialDelaySeconds": left_s}, self.target(), tell))

    async def _post_start(self, hook: Json) -> None:
        outcome = await run_handler(hook, self.target(), None)
        if not outcome.ok:
            self.pod.event("Warning", "FailedPostStartHook", f"PostStartHook failed: {outcome.message}")
            self.restart()

    def _startup_verdict(self, ok: bool, outcome: Outcome) -> None:
        if ok and not self.record.started and isinstance(self.record.state, Started):
            self.record.started = True
            self.record.ready = "readinessProbe" not in self.spec
            self.has_started.set()
            self.pod.changed()
            if self._startup_task:
                self._startup_task.cancel()
            self._begin_probes(time.time() - self.record.state.started_at)
        elif not ok:
            self._unhealthy("Startup", outcome)
            self.restart((self.spec["startupProbe"]).get("terminationGracePeriodSeconds"))

    def _readiness_verdict(self, ok: bool, outcome: Outcome) -> None:
        if not ok:
            self._unhealthy("Readiness", outcome)
        if ok != self.record.ready:
            self.record.ready = ok
            self.pod.changed()

    def _liveness_verdict(self, ok: bool, outcome: Outcome) -> None:
        if not ok:
            self._unhealthy("Liveness", outcome)
            self.restart((self.spec["livenessProbe"]).get("terminationGracePeriodSeconds"))

    def _unhealthy(self, kind: str, outcome: Outcome) -> None:
        self.pod.event("Warning", "Unhealthy", f"{kind} probe failed: {outcome.message}")

    # Ending.

    def restart(self, grace_s: float | None = None) -> None:
        """End this run of the container, with its grace period; the restart policy decides what follows."""
        if self._ending is None and not self.pod.stopping.is_set():
            if grace_s is None:
                grace_s = self.pod.grace_s
            deadline = time.monotonic() + grace_s
            self.record.ready = False
            self.pod.changed()
            self.pod.event("Normal", "Killing", f"Container {self.name} will be restarted")
            self._ending = asyncio.create_task(self.stop(lambda: deadline - time.monotonic()))

    async def stop(self, remaining_s: Callable[[], float]) -> None:
        """End the container: preStop, SIGTERM to its first process, SIGKILL to all when `remaining_s` reaches 0.

        Source: concepts/workloads/pods/pod-lifecycle, "Termination of Pods".
        """
        running = self.running
        if running is None:
            return
        exit_task = asyncio.ensure_future(running.wait())
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        least_until = 0.0
        if hook:
            hook_task = asyncio.ensure_future(run_handler(hook, self.target(), None))
            await _until([hook_task, exit_task], remaining_s)
            if not hook_task.done():
                hook_task.cancel()
            elif not hook_task.result().ok:
                self.pod.event("Warning", "FailedPreStopHook", f"PreStopHook failed: {hook_task.result().message}")
            least_until = time.monotonic() + _LEAST_GRACE_S
        running.signal_main(signal.SIGTERM)
        await _until([exit_task], lambda: max(remaining_s(), least_until - time.monotonic()))
        if not exit_task.done():
            running.signal_everything(signal.SIGKILL)
        await exit_task

    def kill(self, number: signal.Signals = signal.SIGKILL, reason: str | None = None) -> None:
        """Signal every process at once; `reason` is shown as why the container ended."""
        self._ended_for = reason
        if self.running:
            self.running.signal_everything(number)


async def _until(tasks: Sequence[asyncio.Future[Any]], remaining_s: Callable[[], float]) -> None:
    """Wait until one task is done or no time remains; the time may be shortened meanwhile."""
    while (left_s := remaining_s()) > 0:
        done, _ = await asyncio.wait(tasks, timeout=min(left_s, _STOP_STEP_S), return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
