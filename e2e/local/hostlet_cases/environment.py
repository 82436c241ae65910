"""Environment, command and arguments."""

from __future__ import annotations

from e2e.local.hostlet_cases.harness import Room, holds_against, shell

EXPANSION = "tasks/inject-data-application/define-interdependent-environment-variables/"
COMMAND = "tasks/inject-data-application/define-command-argument-container/"
DOWNWARD = "concepts/workloads/pods/downward-api/"


@holds_against(EXPANSION + "#define-an-environment-dependent-variable-for-a-container")
async def variables_refer_to_earlier_ones(room: Room) -> None:
    env = [
        {"name": "LATE", "value": "$(HOST_PART)"},
        {"name": "HOST_PART", "value": "db"},
        {"name": "URL", "value": "tcp://$(HOST_PART):$(KUBERNETES_SERVICE_PORT)/$(MISSING)"},
        {"name": "ESCAPED", "value": "$$(HOST_PART) $(HOST_PART"},
    ]
    script = 'printf "%s|" "$LATE" "${URL%:*}" "${URL##*/}" "$ESCAPED"'
    pod = await room.start(shell(script, env=env))
    await pod.until_phase("Succeeded")
    assert await pod.log() == "$(HOST_PART)|tcp://db|$(MISSING)|$(HOST_PART) $(HOST_PART|"


@holds_against(COMMAND + "#use-environment-variables-to-define-arguments")
async def arguments_take_variables(room: Room) -> None:
    container = {
        "name": "c",
        "image": "test/shell:1",
        "command": ["printf", "%s|"],
        "args": ["$(A)", "$$(A)", "$(NO_SUCH)", "x$(A)$(B)"],
        "env": [{"name": "A", "value": "one"}, {"name": "B", "value": "two"}],
    }
    pod = await room.start(container)
    await pod.until_phase("Succeeded")
    assert await pod.log() == "one|$(A)|$(NO_SUCH)|xonetwo|"


@holds_against(COMMAND + "#notes")
async def command_replaces_the_entry_point_and_args_follow_it(room: Room) -> None:
    entry_and_args = shell("echo entry point", name="a")
    command_only = {"name": "b", "image": "test/shell", "command": ["echo", "command"]}
    both = {"name": "c", "image": "test/shell@sha256:" + "0" * 64, "command": ["echo", "both"], "args": ["and args"]}
    pod = await room.start(entry_and_args, command_only, both)
    await pod.until_phase("Succeeded")
    assert [await pod.log(name) for name in "abc"] == ["entry point\n", "command\n", "both and args\n"]


@holds_against("tasks/inject-data-application/define-command-argument-container/#run-a-command-in-a-shell")
async def the_working_directory_is_as_asked(room: Room) -> None:
    pod = await room.start(shell("pwd", workingDir="/usr/lib"), shell("pwd", name="d"))
    await pod.until_phase("Succeeded")
    assert (await pod.log(), await pod.log("d")) == ("/usr/lib\n", "/\n")


@holds_against(DOWNWARD + "#downwardapi-fieldRef")
async def fields_of_the_pod_are_values(room: Room) -> None:
    fields = {
        "NAME": "metadata.name",
        "NS": "metadata.namespace",
        "UID_": "metadata.uid",
        "LABEL": "metadata.labels['app.kubernetes.io/name']",
        "NOTE": "metadata.annotations['note']",
        "NODE": "spec.nodeName",
        "SA": "spec.serviceAccountName",
        "POD_IP": "status.podIP",
        "POD_IPS": "status.podIPs",
        "HOST_IP": "status.hostIP",
    }
    env = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()]
    script = "; ".join(f'echo "{key}=${key}"' for key in fields)
    pod = await room.start(shell(script, env=env), labels={"app.kubernetes.io/name": "web"})
    last = await pod.until_phase("Succeeded")
    said = dict(line.split("=", 1) for line in (await pod.log()).splitlines())
    assert said == {
        "NAME": pod.name,
        "NS": room.namespace,
        "UID_": last["metadata"]["uid"],
        "LABEL": "web",
        "NOTE": "of the case",
        "NODE": last["spec"]["nodeName"],
        "SA": "default",
        "POD_IP": last["status"]["podIP"],
        "POD_IPS": last["status"]["podIPs"][0]["ip"],
        "HOST_IP": last["status"]["hostIP"],
    }


@holds_against(DOWNWARD + "#downwardapi-resourceFieldRef")
async def resources_are_values_in_units_of_the_divisor(room: Room) -> None:
    def ref(resource: str, divisor: str = "0") -> dict[str, object]:
        return {"resourceFieldRef": {"resource": resource, "divisor": divisor}}

    env = [
        {"name": "CPU", "valueFrom": ref("requests.cpu")},
        {"name": "MILLI", "valueFrom": ref("requests.cpu", "1m")},
        {"name": "MIB", "valueFrom": ref("limits.memory", "1Mi")},
        {"name": "WHOLE", "valueFrom": ref("limits.cpu")},
    ]
    resources = {"requests": {"cpu": "250m"}, "limits": {"memory": "65Mi"}}
    pod = await room.start(shell('echo "$CPU $MILLI $MIB $WHOLE"', env=env, resources=resources))
    last = await pod.until_phase("Succeeded")
    node = await room.kube.call("GET", f"/api/v1/nodes/{last['spec']['nodeName']}")
    assert (await pod.log()).split() == ["1", "250", "65", node["status"]["allocatable"]["cpu"]]


@holds_against("concepts/configuration/secret/#using-secrets-as-environment-variables")
async def secrets_and_config_maps_are_variables(room: Room) -> None:
    secret = await room.make("secrets", {"stringData": {"user": "admin", "both": "secret"}})
    config = await room.make("configmaps", {"data": {"both": "config", "mode": "fast"}})
    none = room.name()

    def key(kind: str, name: str, key_name: str, optional: bool = False) -> dict[str, object]:
        return {f"{kind}KeyRef": {"name": name, "key": key_name, "optional": optional}}

    container = shell(
        'echo "$user $both $P_mode $USER_ $MODE ${NONE-unset} ${NO_KEY-unset}"',
        envFrom=[
            {"secretRef": {"name": secret}},
            {"configMapRef": {"name": config}},
            {"prefix": "P_", "configMapRef": {"name": config}},
            {"secretRef": {"name": none, "optional": True}},
        ],
        env=[
            {"name": "USER_", "valueFrom": key("secret", secret, "user")},
            {"name": "MODE", "valueFrom": key("configMap", config, "mode")},
            {"name": "NONE", "valueFrom": key("secret", none, "user", optional=True)},
            {"name": "NO_KEY", "valueFrom": key("configMap", config, "nothing", optional=True)},
        ],
    )
    pod = await room.start(container)
    await pod.until_phase("Succeeded")
    assert await pod.log() == "admin config fast admin fast unset unset\n"


@holds_against("concepts/services-networking/service/#environment-variables")
async def services_of_the_namespace_are_variables(room: Room) -> None:
    name = await room.make("services", {"spec": {"ports": [{"name": "http", "port": 81}], "selector": {"no": "one"}}})
    service = await room.kube.call("GET", f"/api/v1/namespaces/{room.namespace}/services/{name}")
    stem = name.upper().replace("-", "_")
    script = f'echo "${stem}_SERVICE_HOST ${stem}_SERVICE_PORT ${stem}_SERVICE_PORT_HTTP ${stem}_PORT_81_TCP"'
    with_links = await room.start(shell(script))
    without = await room.start(shell(script + '; test -n "$KUBERNETES_SERVICE_HOST"'), enableServiceLinks=False)
    await with_links.until_phase("Succeeded")
    await without.until_phase("Succeeded")
    address = service["spec"]["clusterIP"]
    assert (await with_links.log()).split() == [address, "81", "81", f"tcp://{address}:81"]
    assert (await without.log()).split() == []


@holds_against("concepts/containers/container-environment/#container-information")
async def the_host_name_is_the_pods_name(room: Room) -> None:
    pod = await room.start(
        shell('echo "$HOSTNAME"; cat /etc/hosts'), hostAliases=[{"ip": "127.0.0.9", "hostnames": ["x.y"]}]
    )
    last = await pod.until_phase("Succeeded")
    lines = (await pod.log()).splitlines()
    assert lines[0] == pod.name
    assert f"{last['status']['podIP']}\t{pod.name}" in lines
    assert "127.0.0.9\tx.y" in lines
