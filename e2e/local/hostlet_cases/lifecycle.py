"""Phases, container states, restarts, init containers and conditions."""

from __future__ import annotations

from e2e.cluster.hostlet.kube import STRATEGIC_PATCH
from e2e.local.hostlet_cases.harness import (
    Room,
    condition,
    holds_against,
    is_running,
    restarted,
    seconds,
    shell,
    state_of,
    status_of,
    waits_for,
)

LIFECYCLE = "concepts/workloads/pods/pod-lifecycle/"
INIT = "concepts/workloads/pods/init-containers/"
SIDECARS = "concepts/workloads/pods/sidecar-containers/"


@holds_against(LIFECYCLE + "#pod-phase")
async def succeeded_when_all_containers_exit_0(room: Room) -> None:
    pod = await room.start(shell("sleep 0.3"), shell("exit 0", name="d"))
    last = await pod.until_phase("Succeeded")
    phases = [each["status"]["phase"] for each in pod.versions]
    assert [each for i, each in enumerate(phases) if i == 0 or phases[i - 1] != each] in (
        ["Pending", "Running", "Succeeded"],
        ["Pending", "Succeeded"],
    )
    kind, state = state_of(last)
    assert (kind, state["exitCode"], state["reason"]) == ("terminated", 0, "Completed")
    assert condition(last, "Ready")["reason"] == "PodCompleted"
    assert condition(last, "Initialized")["status"] == "True"
    assert not status_of(last)["ready"]


@holds_against(LIFECYCLE + "#pod-phase")
async def failed_when_one_container_fails_and_none_restarts(room: Room) -> None:
    pod = await room.start(shell("exit 3"), shell("sleep 1", name="d"))
    last = await pod.until_phase("Failed")
    assert state_of(last, "d")[1]["exitCode"] == 0, "the phase is Failed only when all containers have ended"
    _, state = state_of(last)
    assert (state["exitCode"], state["reason"]) == (3, "Error")
    assert state["containerID"] == status_of(last)["containerID"]
    assert seconds(state["startedAt"]) <= seconds(state["finishedAt"])
    assert condition(last, "Ready")["reason"] == "PodFailed"


@holds_against(LIFECYCLE + "#container-state-terminated")
async def a_signal_gives_exit_code_128_and_its_number(room: Room) -> None:
    # A process that is number 1 of its namespace cannot kill itself, so another process does it.
    pod = await room.start(shell("kill -TERM $$; sleep 0.2 & exec sh -c 'exit 143'"))
    assert state_of(await pod.until_phase("Failed"))[1]["exitCode"] == 143


@holds_against(LIFECYCLE + "#restart-policy")
async def on_failure_restarts_until_success(room: Room) -> None:
    mounts = [{"name": "e", "mountPath": "/state"}]
    pod = await room.start(
        shell("test -e /state/second && exit 0; touch /state/second; exit 7", volumeMounts=mounts),
        restartPolicy="OnFailure",
        volumes=[{"name": "e", "emptyDir": {}}],
    )
    last = await pod.until_phase("Succeeded")
    assert status_of(last)["restartCount"] == 1
    assert status_of(last)["lastState"]["terminated"]["exitCode"] == 7


@holds_against(LIFECYCLE + "#how-pods-handle-problems-with-containers")
async def crash_loops_back_off_exponentially(room: Room) -> None:
    pod = await room.start(shell("exit 1"), restartPolicy="Always")
    await pod.until(lambda each: status_of(each).get("restartCount", 0) >= 3)
    waiting = next(each for each in pod.versions if waits_for("CrashLoopBackOff")(each))
    assert "back-off" in state_of(waiting)[1]["message"]
    assert status_of(waiting)["lastState"]["terminated"]["exitCode"] == 1
    assert waiting["status"]["phase"] == "Running"
    assert condition(waiting, "Ready")["reason"] == "ContainersNotReady"
    messages = [state_of(each)[1]["message"].split()[1] for each in pod.versions if waits_for("CrashLoopBackOff")(each)]
    delays = [float(each.rstrip("s")) for each in dict.fromkeys(messages)]
    assert delays[1] == 2 * delays[0]
    await pod.until_event("BackOff")


@holds_against(LIFECYCLE + "#restart-policy")
async def always_restarts_also_after_success(room: Room) -> None:
    pod = await room.start(shell("sleep 0.2; exit 0"), restartPolicy="Always")
    again = await pod.until(restarted(1))
    last = status_of(again)["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (0, "Completed")
    assert last["containerID"] != status_of(again)["containerID"]


@holds_against(LIFECYCLE + "#pod-conditions")
async def conditions_come_true_in_order(room: Room) -> None:
    pod = await room.start(shell("sleep 60"), initContainers=[shell("sleep 1.2", name="i")])
    await pod.until_ready()
    order = ["PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"]
    first = [
        next(i for i, each in enumerate(pod.versions) if condition(each, kind).get("status") == "True")
        for kind in order
    ]
    assert first == sorted(first)
    during = next(each for each in pod.versions if is_running("i")(each))
    assert condition(during, "PodReadyToStartContainers")["status"] == "True"
    assert condition(during, "Initialized")["reason"] == "ContainersNotInitialized"
    assert condition(during, "Initialized")["message"] == "containers with incomplete status: [i]"
    assert condition(during, "ContainersReady")["message"] == "containers with unready status: [c]"
    assert state_of(during)[1]["reason"] == "PodInitializing"
    assert during["status"]["phase"] == "Pending"
    assert condition(pod.now, "Ready")["lastTransitionTime"] > condition(during, "Ready")["lastTransitionTime"]
    assert all(each["observedGeneration"] == 1 for each in pod.now["status"]["conditions"] if each["type"] in order[1:])
    assert pod.now["status"]["observedGeneration"] == pod.now["metadata"]["generation"]


@holds_against(LIFECYCLE + "#pod-readiness-gate")
async def readiness_gates_hold_back_ready(room: Room) -> None:
    pod = await room.start(shell("sleep 60"), readinessGates=[{"conditionType": "example.com/gate"}])
    held = await pod.until(lambda each: condition(each, "ContainersReady").get("status") == "True")
    assert condition(held, "Ready")["reason"] == "ReadinessGatesNotReady"
    assert "does not exist" in condition(held, "Ready")["message"]
    gate = {"type": "example.com/gate", "status": "True"}
    await pod.patch({"status": {"conditions": [gate]}}, "/status", STRATEGIC_PATCH)
    await pod.until_ready()
    gate["status"] = "False"
    await pod.patch({"status": {"conditions": [gate]}}, "/status", STRATEGIC_PATCH)
    again = await pod.until_now(lambda each: condition(each, "Ready").get("status") == "False")
    assert 'is not "True", but False' in condition(again, "Ready")["message"]


@holds_against(INIT + "#understanding-init-containers")
async def init_containers_run_one_after_another(room: Room) -> None:
    mounts = [{"name": "e", "mountPath": "/state"}]
    steps = [
        shell(f"test -e /state/{before} || exit 9; sleep 0.2; touch /state/{name}", name=name, volumeMounts=mounts)
        for before, name in (("", "one"), ("one", "two"))
    ]
    pod = await room.start(
        shell("test -e /state/two && sleep 60", volumeMounts=mounts),
        initContainers=steps,
        volumes=[{"name": "e", "emptyDir": {}}],
    )
    ready = await pod.until_ready()
    one, two = (state_of(ready, name)[1] for name in ("one", "two"))
    assert (one["exitCode"], two["exitCode"]) == (0, 0)
    assert status_of(ready, "one")["ready"]
    assert not any(is_running("one")(each) and is_running("two")(each) for each in pod.versions)


@holds_against(INIT + "#detailed-behavior")
async def a_failed_init_container_fails_a_pod_that_never_restarts(room: Room) -> None:
    pod = await room.start(shell("sleep 60"), initContainers=[shell("exit 4", name="i")])
    last = await pod.until_phase("Failed")
    assert state_of(last, "i")[1]["exitCode"] == 4
    assert state_of(last)[0] == "waiting"
    assert not any(is_running()(each) for each in pod.versions)


@holds_against(INIT + "#detailed-behavior")
async def a_failed_init_container_is_retried_where_the_pod_restarts(room: Room) -> None:
    mounts = [{"name": "e", "mountPath": "/state"}]
    script = "test -e /state/second && exit 0; touch /state/second; exit 5"
    pod = await room.start(
        shell("sleep 60"),
        initContainers=[shell(script, name="i", volumeMounts=mounts)],
        restartPolicy="Always",
        volumes=[{"name": "e", "emptyDir": {}}],
    )
    ready = await pod.until_ready()
    assert status_of(ready, "i")["restartCount"] == 1
    assert all(each["status"]["phase"] == "Pending" for each in pod.versions if not is_running()(each))


@holds_against(SIDECARS + "#sidecar-containers-and-pod-lifecycle")
async def a_sidecar_starts_first_and_ends_last(room: Room) -> None:
    mounts = [{"name": "e", "mountPath": "/state"}]
    script = "trap 'test -e /state/main-ended && sleep 0.7 && exit 0; exit 6' TERM; touch /state/side; sleep 60 & wait"
    sidecar = shell(script, name="s", restartPolicy="Always", volumeMounts=mounts)
    sidecar["startupProbe"] = {"exec": {"command": ["test", "-e", "/state/side"]}, "periodSeconds": 1}
    main = "test -e /state/side || exit 9; sleep 0.5; touch /state/main-ended"
    pod = await room.start(
        shell(main, volumeMounts=mounts), initContainers=[sidecar], volumes=[{"name": "e", "emptyDir": {}}]
    )
    last = await pod.until_phase("Succeeded")
    assert state_of(last)[1]["exitCode"] == 0, "the sidecar had not started when the main container did"
    assert state_of(last, "s")[1]["exitCode"] == 0, "the sidecar was ended before the main container"
    assert condition(last, "Initialized")["status"] == "True"
    assert all(
        each["status"]["phase"] == "Running"
        for each in pod.versions
        if state_of(each)[0] == "terminated" and is_running("s")(each)
    )


@holds_against("concepts/containers/images/#imagepullbackoff")
async def an_unknown_image_is_pulled_again_and_again(room: Room) -> None:
    pod = await room.start({"name": "c", "image": "nowhere/nothing:2"})
    await pod.until(waits_for("ErrImagePull"))
    waiting = await pod.until(waits_for("ImagePullBackOff"))
    assert "nowhere/nothing:2" in state_of(waiting)[1]["message"]
    assert waiting["status"]["phase"] == "Pending"


@holds_against("tasks/configure-pod-container/configure-pod-configmap/#restrictions")
async def a_missing_key_keeps_the_container_from_being_created(room: Room) -> None:
    name = room.name()
    reference = {"secretKeyRef": {"name": name, "key": "k"}}
    pod = await room.start(shell('test "$K" = v && sleep 60', env=[{"name": "K", "valueFrom": reference}]))
    waiting = await pod.until(waits_for("CreateContainerConfigError"))
    assert state_of(waiting)[1]["message"] == f'secret "{name}" not found'
    assert waiting["status"]["phase"] == "Pending"
    await room.make("secrets", {"stringData": {"other": "x"}}, name)
    await pod.until(lambda each: "couldn't find key k" in state_of(each)[1].get("message", ""))
    await room.change("secrets", name, {"stringData": {"k": "v"}})
    assert status_of(await pod.until_ready())["restartCount"] == 0


@holds_against("tasks/debug/debug-application/debug-pods/#my-pod-stays-waiting")
async def a_command_that_is_not_there_cannot_start(room: Room) -> None:
    pod = await room.start({"name": "c", "image": "test/shell:1", "command": ["/no/such/program"]})
    _, state = state_of(await pod.until_phase("Failed"))
    assert (state["exitCode"], state["reason"]) == (128, "StartError")
    assert "/no/such/program" in state["message"]


@holds_against("tasks/debug/debug-application/determine-reason-pod-failure/")
async def last_words_are_the_termination_message(room: Room) -> None:
    script = "echo from the log; printf 'from the file' > $TERMINATION_LOG; exit 1"
    path = [{"name": "TERMINATION_LOG", "value": "/dev/termination-log"}]
    quiet = shell("echo one; echo from the log; exit 1", name="d", terminationMessagePolicy="FallbackToLogsOnError")
    own = shell("printf 'own path' > /last-words", name="o", terminationMessagePath="/last-words")
    pod = await room.start(shell(script, env=path), quiet, own)
    last = await pod.until_phase("Failed")
    assert state_of(last)[1]["message"] == "from the file"
    assert "from the log" in state_of(last, "d")[1]["message"]
    assert state_of(last, "o")[1]["message"] == "own path"


@holds_against("concepts/workloads/controllers/job/#job-termination-and-cleanup")
async def an_active_deadline_fails_the_pod(room: Room) -> None:
    pod = await room.start(shell("trap 'exit 0' TERM; sleep 60 & wait"), activeDeadlineSeconds=2)
    last = await pod.until_phase("Failed")
    assert last["status"]["reason"] == "DeadlineExceeded"


@holds_against("concepts/cluster-administration/logging/#basic-logging-in-kubernetes")
async def logs_of_each_run_can_be_read(room: Room) -> None:
    script = "echo out one; echo err one >&2; echo two; test -e /state/x && sleep 60; touch /state/x; exit 1"
    pod = await room.start(
        shell(script, volumeMounts=[{"name": "e", "mountPath": "/state"}]),
        restartPolicy="Always",
        volumes=[{"name": "e", "emptyDir": {}}],
    )
    await pod.until(restarted(1))
    await pod.until_log("two")
    assert sorted((await pod.log()).splitlines()) == ["err one", "out one", "two"]
    assert "out one" in await pod.log(previous="true")
    assert await pod.log(tailLines="1") == "two\n"
    assert await pod.log(limitBytes="3") in {"out", "err"}


@holds_against(LIFECYCLE + "#container-states")
async def what_a_container_leaves_behind_ends_with_it(room: Room) -> None:
    loop = "while :; do date +%s%N > /state/next; mv /state/next /state/alive; sleep 0.1; done"
    script = f"(setsid sh -c '{loop}' &) ; sleep 0.5; exit 0"
    watcher = 'sleep 2; a=$(cat /state/alive); sleep 0.5; b=$(cat /state/alive); test -n "$a" && test $a = $b'
    mounts = [{"name": "e", "mountPath": "/state"}]
    pod = await room.start(
        shell(script, volumeMounts=mounts),
        shell(watcher, name="w", volumeMounts=mounts),
        volumes=[{"name": "e", "emptyDir": {}}],
    )
    assert (await pod.until_phase("Succeeded"))["status"]["phase"] == "Succeeded"
