"""Addresses of pods, and Services in front of them."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

from e2e.local.hostlet_cases.harness import (
    HTTP_SERVER,
    POD_IP,
    PodHandle,
    Room,
    condition,
    holds_against,
    is_running,
    python,
    shell,
    state_of,
)

SERVICE = "concepts/services-networking/service/"
PROBE = {"exec": {"command": ["test", "!", "-e", "/state/down"]}, "periodSeconds": 1, "failureThreshold": 1}


async def web(room: Room, app: str, program: str = HTTP_SERVER, **fields: Any) -> PodHandle:
    container = python(program, env=[POD_IP], ports=[{"name": "web", "containerPort": 8080}], **fields)
    return await room.start(container, labels={"app": app}, volumes=[{"name": "e", "emptyDir": {}}])


async def service(room: Room, app: str, target: int | str) -> str:
    name = await room.make(
        "services", {"spec": {"selector": {"app": app}, "ports": [{"port": 80, "targetPort": target}]}}
    )
    found = await room.kube.call("GET", f"/api/v1/namespaces/{room.namespace}/services/{name}")
    return str(found["spec"]["clusterIP"])


async def ask(address: str, port: int = 80) -> str:
    """The body of one GET, or "refused"."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = await reader.read()
            writer.close()
    except ConnectionRefusedError:
        return "refused"
    except (ConnectionResetError, TimeoutError) as error:
        return type(error).__name__
    return answer.decode().rpartition("\r\n\r\n")[2].strip()


async def until(is_so: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    for _ in range(int(timeout_s / 0.1)):
        if await is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within {timeout_s:g} s: {is_so}")


@holds_against("concepts/workloads/pods/#pod-networking")
async def every_pod_has_an_address_of_its_own(room: Room) -> None:
    pods = [await room.start(shell("sleep 60")) for _ in range(3)]
    ready = [await pod.until_ready() for pod in pods]
    addresses = [each["status"]["podIP"] for each in ready]
    assert len(set(addresses)) == len(addresses)
    for pod, address in zip(ready, addresses, strict=True):
        node = await room.kube.call("GET", f"/api/v1/nodes/{pod['spec']['nodeName']}")
        assert ipaddress.ip_address(address) in ipaddress.ip_network(node["spec"]["podCIDR"])
        assert pod["status"]["hostIP"] == node["status"]["addresses"][0]["address"]
        assert pod["status"]["podIPs"] == [{"ip": address}]


@holds_against(SERVICE + "#defining-a-service")
async def a_service_reaches_its_ready_pods_in_turn(room: Room) -> None:
    app = room.name()
    address = await service(room, app, "web")
    assert await ask(address) == "refused", "a service without pods refuses"
    mounts = [{"name": "e", "mountPath": "/state"}]
    pods = [await web(room, app, readinessProbe=PROBE, volumeMounts=mounts) for _ in range(2)]
    other = await web(room, "another-app")
    for pod in (*pods, other):
        await pod.until_ready()

    async def both() -> bool:
        return {await ask(address) for _ in range(4)} == {pod.name for pod in pods}

    await until(both)
    answers = [await ask(address) for _ in range(6)]
    assert answers[0::2] == [answers[0]] * 3
    assert answers[1::2] == [answers[1]] * 3
    assert answers[0] != answers[1]


@holds_against(SERVICE + "#services-without-selectors")
async def pods_that_are_not_ready_or_end_get_nothing(room: Room) -> None:
    app = room.name()
    address = await service(room, app, 8080)
    gate = [{"conditionType": "example.com/never"}]
    container = python(HTTP_SERVER, env=[POD_IP])
    unready = await room.start(container, labels={"app": app}, readinessGates=gate)
    hook = {"preStop": {"exec": {"command": ["sleep", "4"]}}}
    stays = await web(room, app, lifecycle=hook)
    await stays.until_ready()
    await unready.until(lambda each: condition(each, "ContainersReady").get("status") == "True")

    async def answered() -> bool:
        return await ask(address) == stays.name

    await until(answered)
    assert {await ask(address) for _ in range(6)} == {stays.name}
    await stays.delete()

    async def refused() -> bool:
        return await ask(address) == "refused"

    # The server still listens while its hook runs: it is the deletion that takes it out.
    await until(refused)
    assert not stays.is_gone


HALF_CLOSE = """
import os, socket
server = socket.create_server((os.environ["POD_IP"], 8080))
while True:
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(65536):
        total += len(data)
    connection.sendall(b"got %d" % total)
    connection.close()
"""


@holds_against(SERVICE + "#protocol-tcp")
async def a_half_closed_connection_still_answers(room: Room) -> None:
    app = room.name()
    address = await service(room, app, 8080)
    pod = await web(room, app, HALF_CLOSE, readinessProbe={"tcpSocket": {"port": 8080}, "periodSeconds": 1})
    await pod.until_ready()

    async def answered() -> bool:
        return await ask(address) != "refused"

    await until(answered)
    reader, writer = await asyncio.open_connection(address, 80)
    for _ in range(30):
        writer.write(b"x" * 100_000)
        await writer.drain()
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 10) == b"got 3000000"
    writer.close()


@holds_against("concepts/cluster-administration/networking/#the-kubernetes-network-model")
async def a_pod_that_listens_for_all_addresses_is_ended(room: Room) -> None:
    program = (
        "import socket, time\ns = socket.socket(socket.AF_INET{v})\ns.bind(('{a}', 0))\ns.listen()\ntime.sleep(60)"
    )
    for version, address in (("", "0.0.0.0"), ("6", "::")):  # noqa: S104 - what is refused
        pod = await room.start(python(program.format(v=version, a=address)), restartPolicy="Always")
        last = await pod.until_phase("Failed")
        assert last["status"]["reason"] == "ListensOnAllAddresses"
        assert "status.podIP" in last["status"]["message"]
        assert last["status"]["podIP"] in last["status"]["message"]
        assert state_of(last)[0] == "terminated"
    fine = await room.start(python(program.format(v="", a="127.0.0.1")))
    await fine.until(is_running())
    await asyncio.sleep(2.5)
    assert is_running()(fine.now)
