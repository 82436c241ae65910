"""The demo's steps, in order, each with a progress line and a deadline; what they see goes into the report."""

from __future__ import annotations

import asyncio
import time

from e2e import quickstart, traffic
from e2e.cluster.api import OPERATOR_NAMESPACE, Cluster
from e2e.demo.report import Pod, Report
from e2e.deployed import Deployed, until
from headrace_core.api import names

NAMESPACE = "llm"
READY_TIMEOUT_S = 300.0
FLIP_TIMEOUT_S = 180.0
AFTER_FLIP_S = 5.0
"""How long the load goes on after the flip, so that the flipped worker serves its new role."""
CONCURRENCY = 6


class Story:
    """Tells the demo on one cluster. Each method is a step."""

    def __init__(self, cluster: Cluster, report: Report) -> None:
        self._cluster = cluster
        self._report = report
        self._started = time.monotonic()

    def tell(self) -> Deployed:
        """All steps, in order; returns what was deployed.

        Raises:
            e2e.deployed.TimedOutError: a step did not come to its end.
            e2e.traffic.LostError: one of the first requests was not answered.
        """
        self.install()
        deployed = self.apply_quickstart()
        self.wait_until_ready(deployed)
        self._report.pods_before = _pods(deployed)
        asyncio.run(self.first_completions(deployed))
        expected = asyncio.run(self.ask_one_worker_alone(deployed))
        asyncio.run(self.load_until_flip(deployed, expected))
        self._report.pods_after = _pods(deployed)
        self.count_kv(deployed)
        return deployed

    def install(self) -> None:
        """Installs the chart with helm, and waits for the operator."""
        self._say("installing the chart with helm")
        self._cluster.install_chart(OPERATOR_NAMESPACE)

    def apply_quickstart(self) -> Deployed:
        """Makes the tiny model and applies the quickstart."""
        self._say("making a tiny model (2.5 M parameters, fixed seed)")
        manifest = quickstart.manifest()
        pools = ", ".join(f"{pool['replicas']} {pool['role'].lower()}" for pool in manifest["spec"]["pools"])
        self._say(f"applying manifests/quickstart.yaml: {pools} workers")
        self._cluster.ensure_namespace(NAMESPACE)
        self._cluster.apply(manifest, namespace=NAMESPACE)
        return Deployed(self._cluster, NAMESPACE, manifest["metadata"]["name"], quickstart.SERVED_NAME)

    def wait_until_ready(self, deployed: Deployed) -> None:
        """Waits until the InferenceCluster says that it is Ready."""
        what = "until the workers have loaded vLLM and the model"
        self._say(f"waiting {what}")
        until(what, deployed.is_ready, timeout_s=READY_TIMEOUT_S, seen=deployed.in_words, say=self._say)

    async def first_completions(self, deployed: Deployed) -> None:
        """Sends a text and a chat completion and shows the answers."""
        async with traffic.client() as http:
            for prompt in traffic.prompts(seed=0, count=2, characters=range(20, 30), max_tokens=24):
                answer = await traffic.ask(http, deployed.gateway_url, deployed.served_name, prompt)
                self._say(f"a real {prompt.kind} completion: {prompt.text!r} -> {answer[:40]!r}")

    async def ask_one_worker_alone(self, deployed: Deployed) -> dict[traffic.Prompt, str]:
        """Asks one worker, past the gateway, for the answers that the load must get."""
        self._say("asking one worker alone what each answer must be")
        wanted = traffic.prompts(seed=1, count=4, characters=range(20, 80), max_tokens=1024)
        worker = deployed.workers()[0]
        return await traffic.references(deployed.worker_url(worker), deployed.served_name, wanted, deployed.token())

    async def load_until_flip(self, deployed: Deployed, expected: dict[traffic.Prompt, str]) -> None:
        """Sends a decode-heavy load until the operator has flipped a worker by itself, and a little longer."""

        def seen() -> str:
            return f"{load.tally.answered} answers, {load.tally.lost} lost; {deployed.in_words()}"

        what = "until the operator flips an idle prefill worker"
        self._say(f"sending a decode-heavy load (short prompts, long answers) {what}")
        async with traffic.Traffic(deployed.gateway_url, deployed.served_name, expected, CONCURRENCY) as load:
            await asyncio.to_thread(
                until, what, deployed.finished_flips, timeout_s=FLIP_TIMEOUT_S, seen=seen, say=self._say
            )
            await asyncio.sleep(AFTER_FLIP_S)
        self._report.flips = deployed.finished_flips()
        self._report.requests_sent = load.tally.sent
        self._report.requests_lost = load.tally.lost
        self._report.requests_changed = load.tally.changed
        for reason in load.tally.reasons[:10]:
            self._say(reason)

    def count_kv(self, deployed: Deployed) -> None:
        """Reads from Prometheus how much KV moved between workers."""
        self._say("reading from Prometheus how much KV moved")
        time.sleep(2 * self._cluster.scrape_interval_s)
        self._report.kv_bytes_moved = _whole(deployed.metric(f"{names.Metric.WORKER_KV_RECEIVED_BYTES}_total"))
        self._report.kv_transfers = _whole(deployed.metric(f"{names.Metric.WORKER_KV_RECEIVES}_total"))

    def _say(self, text: str) -> None:
        print(f"[demo {time.monotonic() - self._started:4.0f} s] {text}", flush=True)


def _pods(deployed: Deployed) -> list[Pod]:
    return [Pod(worker.name, worker.role, worker.epoch) for worker in deployed.workers()]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def how_to_use(deployed: Deployed) -> str:
    """What a user can do with a demo that was kept running."""
    cluster = deployed.cluster
    flip = deployed.finished_flips()[-1]
    return f"""
Left running. To use it:

  export KUBECONFIG={cluster.kubeconfig}
  {cluster.kubectl_path} -n {deployed.namespace} get infc,iflip,pods --show-labels
  {cluster.kubectl_path.parent / "headrace"} flip {deployed.name} {flip.pod} {flip.from_pool} -n {deployed.namespace}
  curl {deployed.gateway_url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{deployed.served_name}", "prompt": "Where does the water go?", "max_tokens": 32}}'

  Prometheus: {cluster.prometheus_url}

`make down` ends it."""
