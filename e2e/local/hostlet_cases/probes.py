"""Probes: their handlers, thresholds and delays, and what they do to a container."""

from __future__ import annotations

import asyncio
from typing import Any

from e2e.local.hostlet_cases.harness import (
    HTTP_SERVER,
    POD_IP,
    Room,
    condition,
    holds_against,
    is_running,
    python,
    restarted,
    seconds,
    shell,
    state_of,
    status_of,
)

PROBES = "concepts/configuration/liveness-readiness-startup-probes/"
TASK = "tasks/configure-pod-container/configure-liveness-readiness-startup-probes/"
LIFECYCLE = "concepts/workloads/pods/pod-lifecycle/"
EMPTY = [{"name": "e", "emptyDir": {}}]
MOUNTS = [{"name": "e", "mountPath": "/state"}]


def http(path: str, **fields: Any) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "web"}, "periodSeconds": 1, **fields}


def ready_after_s(pod: dict[str, Any]) -> float:
    """From the start of the container until the pod was ready, to the second."""
    return seconds(condition(pod, "Ready")["lastTransitionTime"]) - seconds(state_of(pod)[1]["startedAt"])


def server(name: str = "c", **fields: Any) -> dict[str, Any]:
    return python(HTTP_SERVER, name, env=[POD_IP], ports=[{"name": "web", "containerPort": 8080}], **fields)


@holds_against(PROBES + "#readiness-probe")
async def readiness_turns_with_its_probe_and_restarts_nothing(room: Room) -> None:
    probe = {"exec": {"command": ["test", "-e", "/state/ok"]}, "periodSeconds": 1, "failureThreshold": 1}
    script = "sleep 1.5; touch /state/ok; sleep 4; rm /state/ok; sleep 60"
    pod = await room.start(shell(script, readinessProbe=probe, volumeMounts=MOUNTS), volumes=EMPTY)
    await pod.until(is_running())
    assert not status_of(pod.now)["ready"], "a container with a readiness probe begins as not ready"
    assert status_of(pod.now)["started"]
    await pod.until_ready()
    last = await pod.until_now(lambda each: condition(each, "Ready").get("status") == "False")
    assert status_of(last)["restartCount"] == 0
    assert is_running()(last)
    assert last["status"]["phase"] == "Running"
    await pod.until_event("Unhealthy", "Readiness probe failed")


@holds_against(TASK + "#configure-probes")
async def success_threshold_counts_successes_in_a_row(room: Room) -> None:
    count = "echo x >> /state/n; test $(wc -l < /state/n) -ge 2 && test $(wc -l < /state/n) -ne 3"
    probe = {"exec": {"command": ["sh", "-c", count]}, "periodSeconds": 1, "successThreshold": 2, "failureThreshold": 1}
    pod = await room.start(shell("sleep 60", readinessProbe=probe, volumeMounts=MOUNTS), volumes=EMPTY)
    ready = await pod.until_ready()
    # Probe 1 fails, 2 succeeds, 3 fails, 4 and 5 succeed: ready after the fifth, four periods after the first.
    assert 4 <= ready_after_s(ready) < 12


@holds_against(TASK + "#define-a-liveness-command")
async def liveness_restarts_after_the_failure_threshold(room: Room) -> None:
    probe = {"exec": {"command": ["sh", "-c", "echo x >> /state/n; exit 1"]}, "periodSeconds": 1, "failureThreshold": 3}
    script = "trap 'wc -l < /state/n; exit 0' TERM; sleep 60 & wait"
    pod = await room.start(
        shell(script, livenessProbe=probe, volumeMounts=MOUNTS), volumes=EMPTY, restartPolicy="Always"
    )
    again = await pod.until(restarted(1))
    assert (await pod.log(previous="true")).strip() == "3", "SIGTERM came after another number of failures"
    assert status_of(again)["lastState"]["terminated"]["exitCode"] == 0
    await pod.until_event("Unhealthy", "Liveness probe failed")


@holds_against(TASK + "#probe-level-terminationgraceperiodseconds")
async def a_probe_has_its_own_grace_period(room: Room) -> None:
    probe = {
        "exec": {"command": ["false"]},
        "periodSeconds": 1,
        "failureThreshold": 1,
        "terminationGracePeriodSeconds": 1,
    }
    pod = await room.start(
        shell("trap '' TERM; exec sleep 60", livenessProbe=probe),
        restartPolicy="Always",
        terminationGracePeriodSeconds=600,
    )
    again = await pod.until(restarted(1))
    assert status_of(again)["lastState"]["terminated"]["exitCode"] == 137


@holds_against(PROBES + "#startup-probe")
async def a_startup_probe_holds_the_others_back(room: Room) -> None:
    startup = {"exec": {"command": ["test", "-e", "/state/up"]}, "periodSeconds": 1, "failureThreshold": 30}
    liveness = {"exec": {"command": ["sh", "-c", "echo x >> /state/n; test -e /state/up"]}, "periodSeconds": 1}
    readiness = {"exec": {"command": ["test", "-e", "/state/up"]}, "periodSeconds": 1}
    script = "sleep 3; test -e /state/n && echo too early; touch /state/up; sleep 60"
    pod = await room.start(
        shell(
            script,
            startupProbe=startup,
            livenessProbe={**liveness, "failureThreshold": 1},
            readinessProbe=readiness,
            volumeMounts=MOUNTS,
        ),
        volumes=EMPTY,
        restartPolicy="Always",
    )
    running = await pod.until(is_running())
    assert not status_of(running)["started"]
    ready = await pod.until_ready()
    assert status_of(ready)["started"]
    assert status_of(ready)["restartCount"] == 0
    assert "too early" not in await pod.log()


@holds_against(PROBES + "#startup-probe")
async def a_startup_probe_that_never_succeeds_ends_the_container(room: Room) -> None:
    startup = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 2}
    pod = await room.start(shell("trap 'exit 0' TERM; sleep 60 & wait", startupProbe=startup))
    last = await pod.until_phase("Succeeded")
    assert state_of(last)[1]["exitCode"] == 0
    assert not any(status_of(each).get("started") for each in pod.versions)
    await pod.until_event("Unhealthy", "Startup probe failed")


@holds_against(TASK + "#define-a-liveness-http-request")
async def http_probes_accept_200_to_399(room: Room) -> None:
    good = server(readinessProbe=http("/redirect"))
    bad = {**server("d", readinessProbe=http("/broken")), "args": []}
    bad["command"] = [*good["command"][:-1], HTTP_SERVER.replace("8080", "8081")]
    bad["ports"] = [{"name": "web", "containerPort": 8081}]
    pod = await room.start(good, bad)
    await pod.until(lambda each: bool(status_of(each).get("ready")))
    await pod.until_log("/broken kube-probe/1.36", "d")
    await asyncio.sleep(1)
    assert not status_of(pod.now, "d")["ready"]
    assert condition(pod.now, "ContainersReady")["message"] == "containers with unready status: [d]"


@holds_against(TASK + "#http-probes")
async def http_probes_send_the_headers_they_are_given(room: Room) -> None:
    probe = http("/")
    probe["httpGet"]["httpHeaders"] = [{"name": "X-Mark", "value": "of the probe"}]
    pod = await room.start(server(readinessProbe=probe))
    await pod.until_ready()
    assert "/ kube-probe/1.36 of the probe" in await pod.until_log("of the probe")


@holds_against(TASK + "#define-a-tcp-liveness-probe")
async def tcp_probes_succeed_when_the_port_opens(room: Room) -> None:
    program = (
        "import os, socket, time\ntime.sleep(1.5)\n"
        "s = socket.create_server((os.environ['POD_IP'], 9000))\nprint('open', flush=True)\ntime.sleep(60)"
    )
    probe = {"tcpSocket": {"port": 9000}, "periodSeconds": 1}
    pod = await room.start(python(program, env=[POD_IP], readinessProbe=probe))
    assert ready_after_s(await pod.until_ready()) >= 1


@holds_against(TASK + "#configure-probes")
async def an_exec_probe_that_times_out_fails(room: Room) -> None:
    probe = {"exec": {"command": ["sleep", "5"]}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1}
    pod = await room.start(shell("sleep 60", readinessProbe=probe))
    await pod.until(is_running())
    await pod.until_event("Unhealthy", "timed out after 1s")
    assert not status_of(pod.now)["ready"]


@holds_against(TASK + "#configure-probes")
async def probes_wait_for_their_initial_delay(room: Room) -> None:
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1, "initialDelaySeconds": 3}
    pod = await room.start(shell("sleep 60", readinessProbe=probe))
    assert ready_after_s(await pod.until_ready()) >= 3


@holds_against("concepts/containers/container-lifecycle-hooks/#container-hooks")
async def a_failing_post_start_hook_ends_the_container(room: Room) -> None:
    hook = {"postStart": {"exec": {"command": ["sh", "-c", "exit 1"]}}}
    pod = await room.start(shell("trap 'exit 9' TERM; sleep 60 & wait", lifecycle=hook))
    last = await pod.until_phase("Failed")
    assert state_of(last)[1]["exitCode"] in {9, 143, 137}
    await pod.until_event("FailedPostStartHook")
