"""`headrace status`: shows clusters, their conditions and pools, and each worker's role and epoch."""

from __future__ import annotations

import argparse

from headrace_cli.render import as_json, cluster_text, now


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `status [CLUSTER]` to the command line."""
    command = subparsers.add_parser("status", help="show clusters, their conditions, and each worker's role and epoch")
    command.add_argument("cluster", metavar="CLUSTER", nargs="?", help="only this InferenceCluster")
    command.add_argument("-n", "--namespace", help="namespace (default: the context's)")
    command.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # The Kubernetes client takes a second to import: only what needs it pays.
    from headrace_cli.kube import Kube  # noqa: PLC0415

    kube = Kube(arguments.namespace)
    clusters = [kube.cluster(arguments.cluster)] if arguments.cluster else kube.clusters()
    pods = {cluster["metadata"]["name"]: kube.worker_pods(cluster["metadata"]["name"]) for cluster in clusters}
    if arguments.output == "json":
        print(as_json([item for cluster in clusters for item in (cluster, *pods[cluster["metadata"]["name"]])]))
    elif clusters:
        texts = (cluster_text(cluster, pods[cluster["metadata"]["name"]], now()) for cluster in clusters)
        print("\n\n".join(texts))
    else:
        print(f"no InferenceCluster in namespace {kube.namespace!r}")
    return 0
