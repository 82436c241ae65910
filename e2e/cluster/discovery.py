"""Tells Prometheus which pods to scrape: lists them as its service account, writes a `file_sd` file.

Debian builds Prometheus without its own Kubernetes discovery.
"""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from e2e.cluster.prometheus import TARGET_PORT
from headrace_core.api.names import Label

INTERVAL_S = 1.0


def targets(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One target for each running pod with a port named `http`.

    Its labels are the namespace, the pod and the cluster: a series must outlive its worker's role.
    """
    found = []
    for pod in pods:
        address = pod.get("status", {}).get("podIP")
        if not address or pod["status"].get("phase") != "Running":
            continue
        ports = [port for one in pod["spec"]["containers"] for port in one.get("ports", [])]
        for port in ports:
            if port.get("name") == TARGET_PORT:
                labels = {
                    "namespace": pod["metadata"]["namespace"],
                    "pod": pod["metadata"]["name"],
                    "cluster": pod["metadata"]["labels"][Label.CLUSTER],
                }
                found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels})
    return found


def main() -> int:
    """Lists and writes, every second, until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.discovery", description=__doc__)
    parser.add_argument("--server", required=True, help="URL of the API server")
    parser.add_argument("--authority", required=True, help="certificate of the API server's authority")
    parser.add_argument("--token-file", type=Path, required=True, help="token of the service account")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.token_file.read_text().strip()}"}
    verified = ssl.create_default_context(cafile=options.authority)
    query = {"labelSelector": Label.CLUSTER, "resourceVersion": "0"}
    with httpx.Client(base_url=options.server, headers=headers, verify=verified, trust_env=False) as api:
        while True:
            try:
                pods = api.get("/api/v1/pods", params=query).raise_for_status().json()["items"]
            except httpx.HTTPError as error:
                # The last list stays: an API server that is away says nothing about the pods.
                print(f"keeping the last list: {error!r}", flush=True)
            else:
                unfinished = options.out.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(targets(pods)))
                unfinished.rename(options.out)
            time.sleep(INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
