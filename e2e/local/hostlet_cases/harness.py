"""What a conformance case works with: pods of its own, every version of them that the API server showed, and logs."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from e2e.cluster.hostlet.kube import MERGE_PATCH, Kube, KubeRefused, reflect
from e2e.cluster.hostlet.services import SANDBOX_ANNOTATION

Json = dict[str, Any]

DOCS = "https://kubernetes.io/docs/"
TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Case:
    """One case: what it does, and the page of the documentation whose words it checks."""

    name: str
    page: str
    run: Callable[[Room], Awaitable[None]]


CASES: list[Case] = []


def holds_against(page: str) -> Callable[[Callable[[Room], Awaitable[None]]], Callable[[Room], Awaitable[None]]]:
    """Register a case; `page` is a path below https://kubernetes.io/docs/, with its section."""

    def register(function: Callable[[Room], Awaitable[None]]) -> Callable[[Room], Awaitable[None]]:
        CASES.append(Case(function.__name__, page, function))
        return function

    return register


class Pods:
    """Every version of every pod of one namespace, in the order seen."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self.namespace = namespace
        self.versions: dict[str, list[Json]] = defaultdict(list)
        self.gone: set[str] = set()
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow(self) -> None:
        """Watch until cancelled."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        await reflect(self._kube, path, on_list=self._listed, on_event=self._event)

    def _listed(self, pods: list[Json]) -> None:
        for pod in pods:
            self._event("MODIFIED", pod)

    def _event(self, kind: str, pod: Json) -> None:
        name = pod["metadata"]["name"]
        self.versions[name].append(pod)
        if kind == "DELETED":
            self.gone.add(name)
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, is_so: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
        """Wait for a state of the pods; raises `AssertionError` with `what` was seen instead."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(is_so)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s; last seen: {what()}") from None


class PodHandle:
    """One pod of a case."""

    def __init__(self, kube: Kube, pods: Pods, name: str) -> None:
        self._kube = kube
        self._pods = pods
        self.name = name
        self.path = f"/api/v1/namespaces/{pods.namespace}/pods/{name}"

    @property
    def versions(self) -> list[Json]:
        """All versions so far."""
        return self._pods.versions[self.name]

    @property
    def now(self) -> Json:
        """The last version."""
        return self.versions[-1]

    @property
    def is_gone(self) -> bool:
        """Whether the object was deleted."""
        return self.name in self._pods.gone

    async def until(self, is_so: Callable[[Json], bool], timeout_s: float = TIMEOUT_S) -> Json:
        """The first version, past or to come, for which `is_so`."""
        await self._pods.until(
            lambda: any(is_so(each) for each in self.versions),
            lambda: str(self.versions[-1].get("status") if self.versions else None),
            timeout_s,
        )
        return next(each for each in self.versions if is_so(each))

    async def until_now(self, is_so: Callable[[Json], bool], timeout_s: float = TIMEOUT_S) -> Json:
        """Wait until the latest version is such."""
        await self._pods.until(
            lambda: bool(self.versions) and is_so(self.now), lambda: str(self.now.get("status")), timeout_s
        )
        return self.now

    async def until_gone(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the object is deleted."""
        await self._pods.until(lambda: self.is_gone, lambda: str(self.now.get("status")), timeout_s)

    async def until_phase(self, phase: str) -> Json:
        """The first version with that phase."""
        done = ("Succeeded", "Failed", phase)
        found = await self.until(lambda pod: pod["status"].get("phase") in done)
        assert found["status"]["phase"] == phase, found["status"]
        return found

    async def until_ready(self) -> Json:
        """The first version whose condition Ready is True."""
        return await self.until(lambda pod: condition(pod, "Ready").get("status") == "True")

    async def log(self, container: str = "c", **options: str) -> str:
        """The log as `kubectl logs` gets it."""
        query = "&".join(f"{key}={value}" for key, value in {"container": container, **options}.items())
        return await self._kube.text(f"{self.path}/log?{query}")

    async def until_log(self, wanted: str, container: str = "c", timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the log holds a text."""
        text = ""
        try:
            async with asyncio.timeout(timeout_s):
                while wanted not in text:
                    await asyncio.sleep(0.1)
                    try:
                        text = await self.log(container)
                    except KubeRefused:  # the container has no log yet
                        continue
        except TimeoutError:
            raise AssertionError(f"{wanted!r} is not in the log of {self.name}: {text!r}") from None
        return text

    async def delete(self, grace_s: int | None = None) -> None:
        """Ask for the pod's deletion."""
        body: Json = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        await self._kube.call("DELETE", self.path, body)

    async def patch(self, body: Json, part: str = "", content: str = MERGE_PATCH) -> None:
        """Change the object, or its status with part="/status"."""
        await self._kube.call("PATCH", self.path + part, body, content=content)

    async def until_event(self, reason: str, text: str = "") -> Json:
        """Wait for an Event about this pod with that reason and a text in its message."""
        path = f"/api/v1/namespaces/{self._pods.namespace}/events"
        seen: list[Json] = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    seen, _ = await self._kube.list(path, {"fieldSelector": f"involvedObject.name={self.name}"})
                    for each in seen:
                        if each["reason"] == reason and text in each["message"]:
                            return each
                    await asyncio.sleep(0.3)
        except TimeoutError:
            said = [(each["reason"], each["message"]) for each in seen]
            raise AssertionError(f"no Event {reason} with {text!r} about {self.name}, only {said}") from None


class Room:
    """What one case has: a namespace shared by all cases, names of its own, and one way for pods to see volumes."""

    _numbers = itertools.count()

    def __init__(self, kube: Kube, pods: Pods, case: Case, sandbox: str) -> None:
        self.kube = kube
        self.pods = pods
        self.sandbox = sandbox
        self.namespace = pods.namespace
        self._started: list[PodHandle] = []
        self._stem = f"{case.name.replace('_', '-')[:38].strip('-')}-{sandbox[0]}"

    def name(self) -> str:
        """A name that no other object of the run has."""
        return f"{self._stem}-{next(self._numbers)}"

    async def start(self, *containers: Json, labels: dict[str, str] | None = None, **spec: Any) -> PodHandle:
        """Create a pod with these containers and further fields of its spec."""
        annotations = {SANDBOX_ANNOTATION: self.sandbox, "note": "of the case"}
        metadata: Json = {"name": self.name(), "labels": labels or {}, "annotations": annotations}
        body = {
            "metadata": metadata,
            "spec": {"terminationGracePeriodSeconds": 10, "restartPolicy": "Never", "containers": containers, **spec},
        }
        await self.kube.call("POST", f"/api/v1/namespaces/{self.namespace}/pods", body)
        handle = PodHandle(self.kube, self.pods, metadata["name"])
        self._started.append(handle)
        return handle

    async def clean_up(self) -> None:
        """Delete the case's pods, so that they take no time from the cases that follow."""
        for pod in self._started:
            if not pod.is_gone:
                try:
                    await pod.delete(grace_s=0)
                except KubeRefused as refused:
                    if refused.reason != "NotFound":
                        raise

    async def make(self, plural: str, body: Json, name: str = "") -> str:
        """Create another core object and return its name."""
        name = name or self.name()
        await self.kube.call(
            "POST", f"/api/v1/namespaces/{self.namespace}/{plural}", {"metadata": {"name": name}, **body}
        )
        return name

    async def change(self, plural: str, name: str, body: Json) -> None:
        """Merge into another core object."""
        path = f"/api/v1/namespaces/{self.namespace}/{plural}/{name}"
        await self.kube.call("PATCH", path, body, content=MERGE_PATCH)


def shell(script: str, name: str = "c", **fields: Any) -> Json:
    """A container that runs a shell script as its first process."""
    return {"name": name, "image": "test/shell:1", "args": ["-c", script], **fields}


def python(program: str, name: str = "c", **fields: Any) -> Json:
    """A container that runs a Python program as its first process."""
    return {"name": name, "image": "test/shell:1", "command": ["python3", "-u", "-c", program], **fields}


POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}

# An HTTP server on the pod's address that answers /healthz while the file /state/ok is there.
HTTP_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = {"/redirect": 302, "/broken": 500}.get(self.path, 200)
        self.send_response(status)
        self.end_headers()
        self.wfile.write((os.environ["HOSTNAME"] + " " + self.headers.get("X-Mark", "")).encode())
    def log_message(self, *args):
        print(self.path, self.headers.get("User-Agent"), self.headers.get("X-Mark"))
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""


def condition(pod: Json, kind: str) -> Json:
    """One condition of a pod, empty when it is not there."""
    conditions = pod["status"].get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})


def status_of(pod: Json, name: str = "c") -> Json:
    """The status of one container, empty when it is not there."""
    status = pod["status"]
    everyone = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return next((each for each in everyone if each["name"] == name), {})


def state_of(pod: Json, name: str = "c") -> tuple[str, Json]:
    """(waiting, running or terminated, its fields) of one container."""
    return next(iter((status_of(pod, name).get("state") or {"none": {}}).items()))


def waits_for(reason: str, name: str = "c") -> Callable[[Json], bool]:
    """Whether a container waits for that reason."""
    return lambda pod: state_of(pod, name)[0] == "waiting" and state_of(pod, name)[1].get("reason") == reason


def is_running(name: str = "c") -> Callable[[Json], bool]:
    """Whether a container runs."""
    return lambda pod: state_of(pod, name)[0] == "running"


def restarted(times: int, name: str = "c") -> Callable[[Json], bool]:
    """Whether a container runs and was restarted at least so often."""
    return lambda pod: is_running(name)(pod) and status_of(pod, name)["restartCount"] >= times


def seconds(text: str) -> float:
    """Seconds since the epoch of a time in the API."""
    return datetime.fromisoformat(text).timestamp()


async def run_all(kube: Kube, namespace: str, sandboxes: list[str], at_once: int) -> dict[str, Any]:
    """Run every case in every sandbox, `at_once` at a time; returns "case[sandbox]" -> None or what went wrong."""
    pods = Pods(kube, namespace)
    following = asyncio.create_task(pods.follow())
    gate = asyncio.Semaphore(at_once)
    results: dict[str, BaseException | None] = {}

    async def one(case: Case, sandbox: str) -> None:
        async with gate:
            room = Room(kube, pods, case, sandbox)
            try:
                await case.run(room)
            except Exception as error:
                results[f"{case.name}[{sandbox}]"] = error
            else:
                results[f"{case.name}[{sandbox}]"] = None
            await room.clean_up()

    work = [(case, sandbox) for case in CASES for sandbox in sandboxes]
    random.Random(0).shuffle(work)
    await asyncio.gather(*(one(case, sandbox) for case, sandbox in work))
    following.cancel()
    return results
