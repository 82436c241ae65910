"""`headrace flips`: shows the ledger of role changes, oldest first."""

from __future__ import annotations

import argparse

from headrace_cli.render import FLIP_COLUMNS, as_json, flip_row, now, table


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `flips [CLUSTER]` to the command line."""
    command = subparsers.add_parser("flips", help="list the role changes of a namespace's workers, oldest first")
    command.add_argument("cluster", metavar="CLUSTER", nargs="?", help="only this InferenceCluster's")
    command.add_argument("-n", "--namespace", help="namespace (default: the context's)")
    command.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # The Kubernetes client takes a second to import: only what needs it pays.
    from headrace_cli.kube import Kube  # noqa: PLC0415

    kube = Kube(arguments.namespace)
    flips = [flip for flip in kube.flips() if arguments.cluster in (None, flip["spec"]["clusterName"])]
    flips.sort(key=lambda flip: str(flip["metadata"].get("creationTimestamp", "")))
    if arguments.output == "json":
        print(as_json(flips))
    elif flips:
        print(table(FLIP_COLUMNS, (flip_row(flip, now()) for flip in flips)))
    else:
        print(f"no flips in namespace {kube.namespace!r}")
    return 0
