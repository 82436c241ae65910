"""Ends of pods: hooks, signals, grace periods and deletion."""

from __future__ import annotations

import asyncio
import time

from e2e.cluster.hostlet.kube import KubeRefused
from e2e.local.hostlet_cases.harness import (
    HTTP_SERVER,
    POD_IP,
    Room,
    condition,
    holds_against,
    is_running,
    python,
    shell,
    state_of,
)

TERMINATION = "concepts/workloads/pods/pod-lifecycle/#pod-termination-flow"
HOOKS = "concepts/containers/container-lifecycle-hooks/"
PATIENT = "trap 'echo term; sleep 0.5; echo bye; exit 0' TERM; echo up; sleep 60 & wait"
DEAF = "trap '' TERM; echo up; exec sleep 60"


@holds_against(TERMINATION)
async def pre_stop_comes_before_sigterm(room: Room) -> None:
    mounts = [{"name": "e", "mountPath": "/state"}]
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 0.7; touch /state/hook"]}}}
    script = "trap 'test -e /state/hook && exit 0; exit 5' TERM; echo up; sleep 60 & wait"
    pod = await room.start(shell(script, lifecycle=hook, volumeMounts=mounts), volumes=[{"name": "e", "emptyDir": {}}])
    await pod.until_log("up")
    await pod.delete()
    await pod.until_gone()
    assert state_of(pod.now)[1]["exitCode"] == 0, "SIGTERM came before the hook was done"


@holds_against(TERMINATION)
async def the_object_stays_until_all_has_ended(room: Room) -> None:
    pod = await room.start(shell(PATIENT))
    await pod.until_log("up")
    await pod.until_ready()
    await pod.delete()
    marked = await pod.until(lambda each: "deletionTimestamp" in each["metadata"])
    assert is_running()(marked)
    await pod.until_gone()
    assert state_of(pod.now)[0] == "terminated"
    assert pod.now["status"]["phase"] == "Succeeded", "a pod ends in a terminal phase before its object goes"
    assert condition(pod.now, "Ready")["status"] == "False"


@holds_against(TERMINATION)
async def sigkill_comes_when_the_grace_period_is_over(room: Room) -> None:
    pod = await room.start(shell(DEAF), terminationGracePeriodSeconds=2)
    await pod.until_log("up")
    begun = time.monotonic()
    await pod.delete()
    await pod.until_gone()
    assert 1.8 < time.monotonic() - begun < 8
    assert state_of(pod.now)[1]["exitCode"] == 137
    assert pod.now["status"]["phase"] == "Failed"


@holds_against(HOOKS + "#hook-handler-execution")
async def the_grace_period_includes_the_hook(room: Room) -> None:
    hook = {"preStop": {"exec": {"command": ["sleep", "30"]}}}
    pod = await room.start(shell(DEAF, lifecycle=hook), terminationGracePeriodSeconds=2)
    await pod.until_log("up")
    begun = time.monotonic()
    await pod.delete()
    await pod.until_gone()
    # Two seconds more are given once to a container whose hook has used up the time.
    assert 3.5 < time.monotonic() - begun < 10


@holds_against(HOOKS + "#hook-handler-implementations")
async def a_hook_may_be_an_http_request(room: Room) -> None:
    hook = {"preStop": {"httpGet": {"path": "/stop-soon", "port": 8080}}}
    probe = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    # Deaf to SIGTERM, so that there is time to read its log before it goes.
    server = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HTTP_SERVER}"
    pod = await room.start(
        python(server, env=[POD_IP], lifecycle=hook, readinessProbe=probe), terminationGracePeriodSeconds=3
    )
    await pod.until_ready()
    await pod.delete()
    await pod.until_log("/stop-soon")
    await pod.until_gone()


@holds_against(TERMINATION)
async def sigterm_goes_to_the_first_process_only(room: Room) -> None:
    script = (
        "sh -c 'trap \"echo child got it\" TERM; for i in $(seq 60); do sleep 0.05; done' & "
        "trap 'sleep 0.5; echo first got it; exit 0' TERM; echo up; sleep 60 & wait"
    )
    pod = await room.start(shell(script))
    await pod.until_log("up")
    await pod.delete()
    log = ""
    while not pod.is_gone:
        try:
            log = await pod.log()
        except KubeRefused:
            break
        await asyncio.sleep(0.05)
    await pod.until_gone()
    assert state_of(pod.now)[1]["exitCode"] == 0
    assert "child got it" not in log


@holds_against("concepts/workloads/pods/pod-lifecycle/#pod-termination-forced")
async def a_forced_deletion_frees_the_name_at_once(room: Room) -> None:
    pod = await room.start(shell(DEAF), terminationGracePeriodSeconds=600)
    await pod.until_log("up")
    begun = time.monotonic()
    await pod.delete(grace_s=0)
    await pod.until_gone(5)
    assert time.monotonic() - begun < 5


@holds_against("concepts/workloads/pods/pod-lifecycle/#pod-termination-flow")
async def a_second_deletion_may_shorten_the_grace_period(room: Room) -> None:
    pod = await room.start(shell(DEAF), terminationGracePeriodSeconds=600)
    await pod.until_log("up")
    await pod.delete()
    await pod.until(lambda each: "deletionTimestamp" in each["metadata"])
    await pod.delete(grace_s=1)
    await pod.until_gone(15)
    assert state_of(pod.now)[1]["exitCode"] == 137


@holds_against("concepts/workloads/pods/pod-lifecycle/#pod-termination-flow")
async def a_pod_that_never_started_is_deleted_too(room: Room) -> None:
    waiting = await room.start({"name": "c", "image": "nowhere/nothing"})
    crashing = await room.start(shell("exit 1"), restartPolicy="Always")
    unmounted = await room.start(
        shell("true", volumeMounts=[{"name": "s", "mountPath": "/s"}]),
        volumes=[{"name": "s", "secret": {"secretName": "never-there"}}],
    )
    await crashing.until(lambda each: state_of(each)[1].get("reason") == "CrashLoopBackOff")
    for pod in (waiting, crashing, unmounted):
        await pod.until(lambda each: bool(each["status"].get("containerStatuses")))
        await pod.delete()
    for pod in (waiting, crashing, unmounted):
        await pod.until_gone(10)


@holds_against("concepts/workloads/pods/pod-lifecycle/#pod-termination-flow")
async def a_pod_that_is_done_is_deleted_at_once(room: Room) -> None:
    pod = await room.start(shell("true"), terminationGracePeriodSeconds=600)
    await pod.until_phase("Succeeded")
    await pod.delete()
    await pod.until_gone(5)
