"""`headrace flip`: asks the operator to move a worker to another pool, and waits for the outcome if asked to."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace_cli.errors import CliError, ForbiddenError, WaitTimeout
from headrace_cli.render import flip_state
from headrace_core.api.names import API_VERSION, Condition, Kind, Outcome

if TYPE_CHECKING:
    from headrace_cli.kube import Kube

DEFAULT_WAIT_S = 300
POLL_S = 0.5


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `flip CLUSTER POD POOL` to the command line."""
    command = subparsers.add_parser(
        "flip",
        help="move a worker to another pool, without a restart",
        description="Create an InferenceFlip. The operator drains the worker, changes its role, and keeps the record.",
        epilog="Exit code: 0 created (with --wait: Succeeded), 1 failed, 3 not finished within --wait.",
    )
    command.add_argument("cluster", metavar="CLUSTER", help="name of the InferenceCluster")
    command.add_argument("pod", metavar="POD", help="name of the worker's pod, as `headrace status` shows it")
    command.add_argument("pool", metavar="POOL", help="the pool that the worker should join")
    command.add_argument("--reason", default="asked for by hand", help="why, for the record")
    command.add_argument(
        "--wait",
        nargs="?",
        type=_seconds,
        const=DEFAULT_WAIT_S,
        metavar="SECONDS",
        help=f"wait for the outcome (default {DEFAULT_WAIT_S} s)",
    )
    command.add_argument("-n", "--namespace", help="namespace (default: the context's)")
    command.set_defaults(run=_run)


def flip_body(cluster: str, pod: str, pool: str, reason: str) -> dict[str, Any]:
    """The InferenceFlip to create. The API server completes its name."""
    return {
        "apiVersion": API_VERSION,
        "kind": Kind.FLIP.value,
        "metadata": {"generateName": f"{pod}-"},
        "spec": {"clusterName": cluster, "podName": pod, "targetPool": pool, "reason": reason},
    }


def check_pool(cluster: Mapping[str, Any], pool: str) -> None:
    """Raises CliError when a cluster has no such pool."""
    pools = [item["name"] for item in cluster["spec"]["pools"]]
    if pool not in pools:
        raise CliError(f"cluster {cluster['metadata']['name']!r} has no pool {pool!r}: it has {', '.join(pools)}")


def outcome_text(flip: Mapping[str, Any]) -> str:
    """A finished flip in one line."""
    status, spec = flip["status"], flip["spec"]
    drain_s, switch_ms = status.get("drainSeconds"), status.get("switchMilliseconds")
    times = [
        *([f"drained in {drain_s:.2f} s"] if drain_s is not None else []),
        *([f"switched in {switch_ms:.1f} ms"] if switch_ms is not None else []),
    ]
    notes = [
        str(condition["message"])
        for condition in status.get("conditions") or ()
        if condition.get("message") and condition["type"] in (Condition.ACCEPTED, Condition.COMPLETE)
    ]
    details = ", ".join(times) if status["outcome"] == Outcome.SUCCEEDED else "; ".join(notes)
    return f"{spec['podName']} to {spec['targetPool']}: {status['outcome']}" + (f" ({details})" if details else "")


def _run(arguments: argparse.Namespace) -> int:
    # The Kubernetes client takes a second to import: only what needs it pays.
    from headrace_cli.kube import Kube  # noqa: PLC0415

    kube = Kube(arguments.namespace)
    # Who may create flips need not be allowed to read clusters: then the operator is the one to refuse.
    with contextlib.suppress(ForbiddenError):
        check_pool(kube.cluster(arguments.cluster), arguments.pool)
    created = kube.create_flip(flip_body(arguments.cluster, arguments.pod, arguments.pool, arguments.reason))
    name = created["metadata"]["name"]
    if arguments.wait is None:
        print(f"InferenceFlip {name} created; `headrace flips -n {kube.namespace}` shows what becomes of it")
        return 0
    finished = _wait(kube, name, arguments.wait)
    print(outcome_text(finished))
    return 0 if finished["status"]["outcome"] == Outcome.SUCCEEDED else 1


def _wait(kube: Kube, name: str, wait_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + wait_s
    while True:
        flip = kube.flip(name)
        if (flip.get("status") or {}).get("outcome"):
            return flip
        if time.monotonic() >= deadline_s:
            raise WaitTimeout(
                f"InferenceFlip {name} is {flip_state(flip)} after {wait_s:g} s; it goes on. "
                f"`headrace flips -n {kube.namespace}` shows it, `kubectl describe iflip {name} -n {kube.namespace}` "
                "what it waits for."
            )
        time.sleep(POLL_S)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
