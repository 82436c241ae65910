"""`python -m e2e.cluster up|down|status|env`: a cluster by hand."""

from __future__ import annotations

import argparse
import sys

from e2e.cluster.api import Cluster, open_cluster
from e2e.cluster.ours import LocalCluster
from e2e.cluster.progress import ClusterError, say


def main() -> int:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status", "env"])
    parser.add_argument("--name", default="dev", help="name of the cluster (default: %(default)s)")
    options = parser.parse_args()
    cluster = open_cluster(options.name)
    try:
        return _obey(options.command, cluster)
    except ClusterError as error:
        print(f"[cluster] failed: {error}", file=sys.stderr)
        return 1


def _obey(command: str, cluster: Cluster) -> int:
    if command == "up":
        cluster.up(keep=True)
        say(f"up; export KUBECONFIG={cluster.kubeconfig}; Prometheus: {cluster.prometheus_url}")
    elif command == "down":
        cluster.down()
        say(f"{cluster.name} is down")
    elif command == "env":
        print(f"export KUBECONFIG={cluster.kubeconfig}\nexport PATH={cluster.kubectl_path.parent}:$PATH")
    elif isinstance(cluster, LocalCluster) and not cluster.is_up:
        say(f"{cluster.name} is down")
        return 1
    else:
        print(cluster.kubectl("get", "nodes,pods", "-A", "-o", "wide"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
