"""The local cluster is a real one: RBAC and NodeRestriction hold, it comes back, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.cluster.api import ROOT, Ability, Cluster
from e2e.cluster.ours import LocalCluster
from e2e.cluster.pki import write_kubeconfig
from e2e.cluster.progress import ClusterError

pytestmark = pytest.mark.needs(*Ability)


@pytest.fixture
def local(cluster: Cluster) -> LocalCluster:
    assert isinstance(cluster, LocalCluster)
    return cluster


@pytest.fixture
def second(tmp_path: Path) -> Iterator[LocalCluster]:
    del tmp_path
    other = LocalCluster(f"second-{os.getpid()}")
    yield other
    other.down()


def as_user(cluster: LocalCluster, kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(cluster.kubectl_path), f"--kubeconfig={kubeconfig}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_service_account_without_rights_is_refused(local: LocalCluster, namespace: str, tmp_path: Path) -> None:
    token = local.kubectl("create", "token", "default", "-n", namespace).strip()
    pki = local.folder / "pki"
    server = json.loads(local.kubectl("config", "view", "-o", "json"))["clusters"][0]["cluster"]["server"]
    config = write_kubeconfig(tmp_path / "config", server, pki / "ca.crt", {"token": token})

    refused = as_user(local, config, "get", "pods", "-n", namespace)
    assert refused.returncode != 0
    assert "Forbidden" in refused.stderr
    assert f"system:serviceaccount:{namespace}:default" in refused.stderr


def test_a_node_may_not_touch_another_node_or_call_itself_special(local: LocalCluster) -> None:
    config = local.folder / "pki" / "node-a.kubeconfig"

    def label(node: str, name: str) -> subprocess.CompletedProcess[str]:
        return as_user(local, config, "label", "--overwrite", "node", node, f"{name}=yes")

    assert label("node-a", "headrace.test/mark").returncode == 0
    assert "only its own Node object" in label("node-b", "headrace.test/mark").stderr
    restricted = label("node-a", "node-restriction.kubernetes.io/trusted")
    assert restricted.returncode != 0, "the admission plug-in NodeRestriction is off"
    assert "is not allowed to modify labels" in restricted.stderr


def test_anonymous_requests_are_refused(local: LocalCluster) -> None:
    server = json.loads(local.kubectl("config", "view", "-o", "json"))["clusters"][0]["cluster"]["server"]
    verified = ssl.create_default_context(cafile=local.folder / "pki" / "ca.crt")
    answer = httpx.get(f"{server}/api/v1/nodes", verify=verified, trust_env=False)
    assert answer.status_code == httpx.codes.UNAUTHORIZED


def test_a_restarted_api_server_keeps_its_objects(local: LocalCluster, namespace: str) -> None:
    local.kubectl("create", "configmap", "kept", "-n", namespace, "--from-literal=a=b")
    before = local.pid_of("kube-apiserver")
    local.restart_apiserver()
    assert local.pid_of("kube-apiserver") != before
    assert local.get("configmap", "kept", namespace=namespace)["data"] == {"a": "b"}


def test_two_clusters_side_by_side_and_a_killed_one_leaves_nothing(local: LocalCluster, second: LocalCluster) -> None:
    second.up()
    second.kubectl("create", "namespace", "only-there")
    assert local.try_kubectl("get", "namespace", "only-there").returncode != 0
    components = [second.pid_of(name) for name in ("etcd", "kube-apiserver", "hostlet", "prometheus")]
    with pytest.raises(ClusterError, match="is running"):
        LocalCluster(second.name).up()

    os.kill(int((second.folder / "pid").read_text().split()[0]), signal.SIGKILL)
    _wait_gone(components)

    second.up()
    assert second.try_kubectl("get", "namespace", "only-there").returncode != 0, "the next run starts afresh"
    assert local.try_kubectl("get", "nodes").returncode == 0


def test_a_killed_run_takes_its_cluster_along(tmp_path: Path) -> None:
    name = f"orphan-{os.getpid()}"
    script = f"from e2e.cluster.ours import LocalCluster; import time; LocalCluster({name!r}).up(); time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    orphan = LocalCluster(name)
    deadline = time.monotonic() + 60
    while not orphan.is_up:
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.2)
    components = [orphan.pid_of(name) for name in ("etcd", "kube-apiserver", "hostlet", "prometheus")]
    run.kill()
    run.wait()
    _wait_gone(components)


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)
