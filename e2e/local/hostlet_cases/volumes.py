"""Volumes: their files, modes, links and updates, and the service account's token."""

from __future__ import annotations

import json

from e2e.local.hostlet_cases.harness import Room, holds_against, python, restarted, shell

SECRET = "concepts/configuration/secret/"
CONFIG_MAP = "concepts/configuration/configmap/"
PROJECTED = "concepts/storage/projected-volumes/"
VOLUMES = "concepts/storage/volumes/"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@holds_against(SECRET + "#using-secrets-as-files-from-a-pod")
async def each_key_of_a_secret_is_a_file(room: Room) -> None:
    secret = await room.make("secrets", {"stringData": {"user": "admin", "pass": "word"}})
    volumes = [
        {"name": "all", "secret": {"secretName": secret, "defaultMode": 0o400}},
        {
            "name": "one",
            "secret": {"secretName": secret, "items": [{"key": "user", "path": "deep/name", "mode": 0o440}]},
        },
    ]
    mounts = [{"name": "all", "mountPath": "/etc/all"}, {"name": "one", "mountPath": "/etc/one"}]
    script = (
        "cat /etc/all/user /etc/all/pass /etc/one/deep/name; echo; ls /etc/one; stat -L -c %a /etc/all/user "
        "/etc/one/deep/name; readlink /etc/all/user"
    )
    pod = await room.start(shell(script, volumeMounts=mounts), volumes=volumes)
    await pod.until_phase("Succeeded")
    assert (await pod.log()).splitlines() == ["adminwordadmin", "deep", "400", "440", "..data/user"]


@holds_against(CONFIG_MAP + "#mounted-configmaps-are-updated-automatically")
async def a_changed_config_map_is_swapped_in_whole(room: Room) -> None:
    config = await room.make("configmaps", {"data": {"a": "1", "b": "1", "old": "x"}})
    volumes = [{"name": "v", "configMap": {"name": config}}]
    mounts = [
        {"name": "v", "mountPath": "/etc/v"},
        {"name": "v", "mountPath": "/etc/still", "subPath": "a"},
    ]
    script = """
while :; do
  test -L /etc/v/..data || echo gap
  d=$(readlink -f /etc/v/..data); pair=$(cat $d/a $d/b 2>/dev/null)
  case "$pair" in 12|21) echo torn "$pair" ;; 22) break ;; esac; sleep 0.05
done
echo new "$(cat /etc/v/a)" "$(ls /etc/v | tr '\\n' ' ')" still "$(cat /etc/still)"
sleep 60
"""
    pod = await room.start(shell(script, volumeMounts=mounts), volumes=volumes)
    await pod.until_ready()
    await room.change("configmaps", config, {"data": {"a": "2", "b": "2", "old": None, "new": "y"}})
    log = await pod.until_log("new")
    assert log == "new 2 a b new  still 1\n"


@holds_against("tasks/inject-data-application/downward-api-volume-expose-pod-information/")
async def labels_in_a_volume_follow_the_pod(room: Room) -> None:
    items = [
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "uid", "fieldRef": {"fieldPath": "metadata.uid"}},
        {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}},
    ]
    script = "cat /info/uid /info/cpu; echo; until grep -qx 'step=\"two\"' /info/labels; do sleep 0.1; done; echo seen"
    pod = await room.start(
        shell(script, volumeMounts=[{"name": "v", "mountPath": "/info"}], resources={"limits": {"cpu": "1500m"}}),
        volumes=[{"name": "v", "downwardAPI": {"items": items}}],
        labels={"step": "one"},
    )
    await pod.until_ready()
    await pod.patch({"metadata": {"labels": {"step": "two"}}})
    last = await pod.until_phase("Succeeded")
    assert (await pod.log()).splitlines() == [last["metadata"]["uid"] + "1500", "seen"]


@holds_against(VOLUMES + "#emptydir")
async def an_empty_dir_is_shared_and_outlives_a_crash(room: Room) -> None:
    mounts = [{"name": "e", "mountPath": "/cache/deep"}]
    crash = "test -e /cache/deep/mark && { echo kept; sleep 60; }; ls -A /cache/deep; touch /cache/deep/mark; exit 1"
    other = "until test -e /cache/deep/mark; do sleep 0.1; done; echo shared; sleep 60"
    pod = await room.start(
        shell(crash, volumeMounts=mounts),
        shell(other, name="d", volumeMounts=mounts),
        restartPolicy="Always",
        volumes=[{"name": "e", "emptyDir": {}}],
    )
    await pod.until(restarted(1))
    assert await pod.until_log("kept") == "kept\n"
    assert await pod.log(previous="true") == "", "the folder was not empty at first"
    await pod.until_log("shared", "d")


@holds_against(VOLUMES + "#hostpath-volume-types")
async def a_host_path_is_a_path_of_the_node(room: Room) -> None:
    volumes = [
        {"name": "dir", "hostPath": {"path": "/usr/lib", "type": "Directory"}},
        {"name": "file", "hostPath": {"path": "/proc/version", "type": "File"}},
    ]
    mounts = [
        {"name": "dir", "mountPath": "/deep/er/lib", "readOnly": True},
        {"name": "file", "mountPath": "/deep/version"},
    ]
    pod = await room.start(
        shell("test -e /deep/er/lib/os-release && cat /deep/version", volumeMounts=mounts), volumes=volumes
    )
    await pod.until_phase("Succeeded")
    assert "Linux" in await pod.log()
    wrong = [{"name": "dir", "hostPath": {"path": "/usr/lib", "type": "File"}}]
    stuck = await room.start(shell("true", volumeMounts=mounts[:1]), volumes=wrong)
    await stuck.until_event("FailedMount", "hostPath type check failed")
    assert stuck.now["status"]["phase"] == "Pending"


@holds_against(SECRET + "#restriction-secret-must-exist")
async def a_pod_waits_for_a_secret_that_is_not_there(room: Room) -> None:
    name = room.name()
    optional = {"name": "o", "secret": {"secretName": room.name(), "optional": True}}
    pod = await room.start(
        shell(
            "ls -A /o; cat /s/k; sleep 60",
            volumeMounts=[{"name": "s", "mountPath": "/s"}, {"name": "o", "mountPath": "/o"}],
        ),
        volumes=[{"name": "s", "secret": {"secretName": name}}, optional],
    )
    await pod.until_event("FailedMount", f'secret "{name}" not found')
    assert "PodReadyToStartContainers" not in {
        each["type"] for each in pod.now["status"]["conditions"] if each["status"] == "True"
    }
    await room.make("secrets", {"stringData": {"k": "came later"}}, name)
    await pod.until_ready()
    await pod.until_log("came later")


@holds_against(PROJECTED + "#serviceaccounttoken")
async def the_token_is_bound_to_the_pod(room: Room) -> None:
    sources = [
        {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.pem"}]}},
        {"downwardAPI": {"items": [{"path": "ns", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    script = (
        f"cat {ACCOUNT}/token; echo; cat /p/token; echo; cat /p/ns {ACCOUNT}/namespace; echo; "
        "head -1 /p/ca.pem; sleep 60"
    )
    pod = await room.start(
        shell(script, volumeMounts=[{"name": "p", "mountPath": "/p"}]),
        volumes=[{"name": "p", "projected": {"sources": sources}}],
    )
    token, other, namespaces, ca = (await pod.until_log("BEGIN")).splitlines()
    assert namespaces == room.namespace * 2
    assert ca == "-----BEGIN CERTIFICATE-----"
    for value, audiences in ((token, []), (other, ["vault"])):
        review = await room.kube.call(
            "POST",
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {"spec": {"token": value, "audiences": audiences}},
        )
        status = review["status"]
        assert status.get("authenticated"), status
        assert status["user"]["username"] == f"system:serviceaccount:{room.namespace}:default"
        assert status["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [pod.now["metadata"]["uid"]]


@holds_against("tasks/run-application/access-api-from-pod/#accessing-the-api-from-within-a-pod")
async def clients_find_the_api_server_from_within_a_pod(room: Room) -> None:
    program = """
from kubernetes import client, config
config.load_config()
try:
    client.CoreV1Api().list_namespaced_pod("kube-system")
except client.ApiException as error:
    print(error.status, error.body)
"""
    if room.sandbox == "namespaces":
        program = program.replace("load_config", "load_incluster_config")
    pod = await room.start(python(program))
    await pod.until_phase("Succeeded")
    status, _, body = (await pod.log()).partition(" ")
    assert status == "403"
    assert f"system:serviceaccount:{room.namespace}:default" in json.loads(body)["message"]


@holds_against("tasks/configure-pod-container/configure-service-account/#opt-out-of-api-credential-automounting")
async def a_pod_can_do_without_a_token(room: Room) -> None:
    script = f"test -e {ACCOUNT}/token || echo none; env | grep -c KUBECONFIG || true"
    pod = await room.start(shell(script), automountServiceAccountToken=False)
    await pod.until_phase("Succeeded")
    assert (await pod.log()).split() == ["none", "0"]


@holds_against(VOLUMES + "#using-subpath")
async def a_sub_path_is_one_folder_of_the_volume(room: Room) -> None:
    volumes = [{"name": "e", "emptyDir": {}}]
    writer = shell(
        "echo x > /data/file", name="i", volumeMounts=[{"name": "e", "mountPath": "/data", "subPath": "a/b"}]
    )
    mounts = [
        {"name": "e", "mountPath": "/all"},
        {"name": "e", "mountPath": "/named", "subPathExpr": "$(POD)"},
    ]
    env = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    script = "cat /all/a/b/file; touch /named/here; ls /all"
    pod = await room.start(shell(script, volumeMounts=mounts, env=env), initContainers=[writer], volumes=volumes)
    await pod.until_phase("Succeeded")
    assert (await pod.log()).split() == ["x", *sorted(["a", pod.name])]
