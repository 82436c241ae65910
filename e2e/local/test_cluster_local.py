"""The local cluster is a real one: its locks hold, its programs come back, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.cluster import prometheus
from e2e.cluster.api import ROOT, Ability, Cluster, open_cluster, wait_for
from e2e.cluster.ours import LocalCluster
from e2e.cluster.processes import is_running
from e2e.cluster.progress import ClusterError
from headrace_core.api.names import Label

pytestmark = pytest.mark.needs(*Ability)

COMPONENTS = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("hostlet", "discovery", "prometheus"),
)
AUDIENCE = "test-audience"
METRICS_SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"e2e_answer 42\\n")
http.server.HTTPServer((os.environ["POD_IP"], 8000), Handler).serve_forever()
"""


@pytest.fixture
def local(cluster: Cluster) -> LocalCluster:
    assert isinstance(cluster, LocalCluster)
    return cluster


@pytest.fixture(scope="module")
def second() -> Iterator[LocalCluster]:
    other = LocalCluster(f"second-{os.getpid()}")
    other.up()
    yield other
    other.down()
    other.discard_logs()


def pod(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "test/shell", "command": ["/bin/sh", "-c", script]}
    whole = {"containers": [container | spec.pop("container", {})], "terminationGracePeriodSeconds": 1, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": whole}


def verified(local: LocalCluster) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=local.folder / "pki" / "ca.crt")


def server(local: LocalCluster) -> str:
    config = json.loads(local.kubectl("config", "view", "-o", "json"))
    url: str = config["clusters"][0]["cluster"]["server"]
    return url


def test_a_service_account_may_do_what_a_role_says_and_no_more(local: LocalCluster, namespace: str) -> None:
    config = local.kubeconfig_for("default", namespace=namespace)

    refused = local.try_kubectl("get", "pods", "-n", namespace, kubeconfig=config)
    assert refused.returncode != 0
    assert "Forbidden" in refused.stderr
    assert f"system:serviceaccount:{namespace}:default" in refused.stderr

    local.kubectl("create", "role", "reader", "-n", namespace, "--verb=list", "--resource=pods")
    account = f"--serviceaccount={namespace}:default"
    local.kubectl("create", "rolebinding", "reader", "-n", namespace, "--role=reader", account)
    assert local.try_kubectl("get", "pods", "-n", namespace, kubeconfig=config).returncode == 0
    assert local.try_kubectl("get", "secrets", "-n", namespace, kubeconfig=config).returncode != 0


def test_a_node_may_touch_itself_and_its_own_pods_only(local: LocalCluster, namespace: str) -> None:
    config = local.folder / "pki" / "node-a.kubeconfig"
    local.apply(pod("elsewhere", "sleep 60", nodeName="node-b"), namespace=namespace)
    local.apply(pod("here", "sleep 60", nodeName="node-a"), namespace=namespace)

    def label(node: str, name: str) -> subprocess.CompletedProcess[str]:
        return local.try_kubectl("label", "--overwrite", "node", node, f"{name}=yes", kubeconfig=config)

    def patch(name: str) -> httpx.Response:
        # kubectl would read the status first, which a node may not.
        identity = verified(local)
        identity.load_cert_chain(config.with_suffix(".crt"), config.with_suffix(".key"))
        url = f"{server(local)}/api/v1/namespaces/{namespace}/pods/{name}/status"
        headers = {"Content-Type": "application/strategic-merge-patch+json"}
        with httpx.Client(verify=identity, trust_env=False) as http:
            return http.patch(url, headers=headers, content='{"status": {"message": "touched"}}')

    assert label("node-a", "headrace.test/mark").returncode == 0
    assert "only its own Node object" in label("node-b", "headrace.test/mark").stderr
    restricted = label("node-a", "node-restriction.kubernetes.io/trusted")
    assert "is not allowed to modify labels" in restricted.stderr, "the admission plug-in NodeRestriction is off"
    assert patch("here").status_code == httpx.codes.OK
    refused = patch("elsewhere")
    assert refused.status_code == httpx.codes.FORBIDDEN
    assert "can only update pod status for pods with spec.nodeName set to itself" in refused.text


def test_without_credentials_there_is_health_and_nothing_else(local: LocalCluster) -> None:
    def status(path: str) -> int:
        return httpx.get(f"{server(local)}{path}", verify=verified(local), trust_env=False).status_code

    assert status("/readyz") == httpx.codes.OK
    assert status("/version") == httpx.codes.UNAUTHORIZED
    assert status("/api/v1/nodes") == httpx.codes.UNAUTHORIZED


def test_etcd_takes_no_identity_of_the_cluster(local: LocalCluster) -> None:
    slot = json.loads((local.folder / "ready.json").read_text())["slot"]
    pki = local.folder / "pki"

    def health(certificate: str, key: str) -> int:
        context = ssl.create_default_context(cafile=pki / "etcd" / "ca.crt")
        context.load_cert_chain(pki / certificate, pki / key)
        # The address is the API server's: etcd listens beside it.
        url = f"{server(local).rpartition(':')[0]}:{slot['ports']['etcd']}/health"
        return httpx.get(url, verify=context, trust_env=False).status_code

    assert health("etcd/etcd.crt", "etcd/etcd.key") == httpx.codes.OK
    with pytest.raises(httpx.TransportError):
        health("admin.crt", "admin.key")


def test_a_projected_token_works_until_its_pod_is_gone(local: LocalCluster, namespace: str) -> None:
    source = {"serviceAccountToken": {"path": "token", "audience": AUDIENCE, "expirationSeconds": 600}}
    manifest = pod(
        "holder",
        "cat /var/run/test/token; sleep 60",
        volumes=[{"name": "token", "projected": {"sources": [source]}}],
        container={"volumeMounts": [{"name": "token", "mountPath": "/var/run/test"}]},
    )
    local.apply(manifest, namespace=namespace)
    local.wait("pod/holder", "condition=Ready", namespace=namespace)

    def review(audience: str) -> dict[str, Any]:
        spec = {"token": token, "audiences": [audience]}
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        found = json.loads(local.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(asked)))
        status: dict[str, Any] = found["status"]
        return status

    wait_for("the token in the log", lambda: local.kubectl("logs", "holder", "-n", namespace), timeout_s=10)
    token = local.kubectl("logs", "holder", "-n", namespace).strip()
    user = review(AUDIENCE)["user"]
    assert user["username"] == f"system:serviceaccount:{namespace}:default"
    assert user["extra"]["authentication.kubernetes.io/pod-name"] == ["holder"]
    assert not review("another").get("authenticated")
    local.delete(manifest, namespace=namespace)
    # The API server remembers for 10 s that a token was good.
    wait_for("the token to end with its pod", lambda: not review(AUDIENCE).get("authenticated"), timeout_s=20)


def test_all_goes_on_after_the_api_server_is_restarted(local: LocalCluster, namespace: str) -> None:
    local.kubectl("create", "configmap", "kept", "-n", namespace, "--from-literal=a=b")
    others = {name: local.pid_of(name) for name in COMPONENTS if name != "kube-apiserver"}
    before = local.pid_of("kube-apiserver")
    local.restart_apiserver()
    assert local.pid_of("kube-apiserver") != before
    assert local.get("configmap", "kept", namespace=namespace)["data"] == {"a": "b"}

    labels = {"app": "after"}
    template = {"metadata": {"labels": labels}, "spec": pod("", "sleep 60")["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "after"}, "spec": spec}
    local.apply(deployment, namespace=namespace)
    # Seen by the controllers, the scheduler and a node: the watch of each has come back.
    local.wait("deployment/after", "condition=Available", namespace=namespace, timeout_s=30)
    assert {name: local.pid_of(name) for name in others} == others, "a program was restarted along with it"


def test_prometheus_scrapes_pods_of_clusters_and_can_be_stopped(local: LocalCluster, namespace: str) -> None:
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        "command": [sys.executable, "-c", METRICS_SERVER],
        "env": [address],
        "ports": [{"name": prometheus.TARGET_PORT, "containerPort": 8000}],
    }
    manifest = pod("scraped", "", container=container)
    manifest["metadata"]["labels"] = {Label.CLUSTER: "chat"}
    local.apply(manifest, namespace=namespace)

    def samples() -> list[dict[str, Any]]:
        query = f'e2e_answer{{namespace="{namespace}"}}'
        answer = httpx.get(f"{local.prometheus_url}/api/v1/query", params={"query": query}, trust_env=False)
        found: list[dict[str, Any]] = answer.json()["data"]["result"] if answer.is_success else []
        return found

    wait_for("a sample", samples, timeout_s=30)
    [sample] = samples()
    assert sample["value"][1] == "42"
    wanted = {"namespace": namespace, "pod": "scraped", "cluster": "chat"}
    assert {name: sample["metric"].get(name) for name in wanted} == wanted

    with local.held("prometheus"), pytest.raises(httpx.ConnectError):
        samples()
    wait_for("Prometheus", lambda: _answers(f"{local.prometheus_url}/-/ready"), timeout_s=30)
    assert samples(), "what was scraped before the stop is lost"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


def test_two_clusters_side_by_side(local: LocalCluster, second: LocalCluster) -> None:
    second.kubectl("create", "namespace", "only-there")
    assert local.try_kubectl("get", "namespace", "only-there").returncode != 0
    with pytest.raises(ClusterError, match="is running"):
        LocalCluster(second.name).up()
    foreign = local.try_kubectl("get", "nodes", f"--server={server(second)}")
    assert "certificate" in foreign.stderr, "one cluster takes the other's credentials"


def test_the_current_context_loses_only_what_was_made_there(
    second: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER", "current")
    monkeypatch.setenv("KUBECONFIG", str(second.kubeconfig))
    monkeypatch.setenv("PROMETHEUS_URL", second.prometheus_url)
    second.kubectl("create", "namespace", "somebody-elses")

    def all_names() -> set[str]:
        kinds = "namespaces,crds,clusterroles,clusterrolebindings"
        return set(second.kubectl("get", kinds, "-o", "name").split())

    before = all_names()
    killed = open_cluster(f"current-{os.getpid()}")
    killed.up()
    killed.install_chart("ours")
    killed.ensure_namespace("somebody-elses")

    # The first one never gets to its end; the second finds what it left, and clears it away.
    current = open_cluster(killed.name)
    current.up()
    assert "namespace/ours" not in all_names()
    current.install_chart("ours")
    current.down()
    assert all_names() == before

    second.apply(ROOT / "crds", namespace="default")
    with pytest.raises(ClusterError, match=r"inferenceclusters\.serving\.headrace\.dev.* is installed: uninstall it"):
        current.up()


@pytest.mark.parametrize("victim", ["the run", "the parent of its programs"])
def test_a_killed_cluster_leaves_nothing(victim: str) -> None:
    name = f"killed-{os.getpid()}"
    script = f"from e2e.cluster.ours import LocalCluster; import time; LocalCluster({name!r}).up(); time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    killed = LocalCluster(name)
    try:
        wait_for("the cluster", lambda: killed.is_up or run.poll() is not None, timeout_s=100)
        killed.apply(pod("sleeper", "sleep 600"), namespace="default")
        killed.wait("pod/sleeper", "condition=Ready", namespace="default")
        in_pod = [pid for pid in killed.pod_pids() if is_running(pid)]
        assert in_pod
        processes = [*in_pod, *(killed.pid_of(component) for component in COMPONENTS)]
        parent = killed.parent_pid()
        assert parent is not None
        os.kill(run.pid if victim == "the run" else parent, signal.SIGKILL)
        wait_for("all processes to be gone", lambda: not any(map(is_running, processes)), timeout_s=20)
        killed.up()
        assert killed.try_kubectl("get", "pod", "sleeper").returncode != 0, "the next run starts afresh"
    finally:
        run.kill()
        run.wait()
        killed.down()
    assert [entry.name for entry in killed.folder.iterdir()] == ["logs"], "data stayed behind"
    killed.discard_logs()
