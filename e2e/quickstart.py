"""What the demo and the tests apply: the quickstart, fitted to a machine without a GPU, and a tiny model for it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "manifests" / "quickstart.yaml"
MODEL_MAKER = ROOT / "cli" / "headrace_cli" / "tiny_model.py"
MODELS = ROOT / "build" / "models"
"""Below `build`, which the nodes of a kind cluster see at its own path."""
MODEL_PATH = "/models/tiny"
SERVED_NAME = "tiny"
MAX_MODEL_LEN = 2048

# By vLLM's defaults for CPUs each worker would take all cores, and 4 GiB for its KV cache.
CPU_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
CPU_ARGS = {
    "enforce-eager": "true",
    "dtype": "float32",
    "max-num-seqs": "64",
    "kv-cache-memory-bytes": str(512 * 2**20),
}


def tiny_model() -> Path:
    """Makes the model, once for each version of its maker, and returns its directory."""
    directory = MODELS / f"tiny-{hashlib.sha256(MODEL_MAKER.read_bytes()).hexdigest()[:12]}"
    if not directory.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as making:
            made = Path(making) / directory.name
            subprocess.run([sys.executable, "-m", "headrace_cli", "tiny-model", str(made)], check=True)
            if not directory.exists():  # another run may have been faster
                made.rename(directory)
    return directory


def on_this_machine(cluster: dict[str, Any]) -> dict[str, Any]:
    """Fits an InferenceCluster to nodes without a GPU: the tiny model from a host path, and short windows.

    The pools keep their names, roles and numbers, so what is shown is the quickstart's own shape.
    """
    spec = cluster["spec"]
    spec["model"] = {"uri": f"file://{MODEL_PATH}", "servedName": SERVED_NAME, "maxModelLen": MAX_MODEL_LEN}
    spec["engine"] = {
        "args": [{"name": name, "value": value} for name, value in CPU_ARGS.items()],
        "env": [{"name": name, "value": value} for name, value in CPU_ENV.items()],
    }
    for pool in spec["pools"]:
        pool["template"] = {"spec": _model_volume(tiny_model())}
    spec["elasticity"] = {
        "mode": "Auto",
        "policy": "IdleThreshold",
        "interval": "5s",
        "flips": {"mode": "Allowed", "cooldown": "30s", "drainTimeout": "1m", "idleBelow": "40%", "idleFor": "15s"},
    }
    spec["gateway"] = {"mode": "Managed", "replicas": 1}
    return cluster


def _model_volume(model: Path) -> dict[str, Any]:
    return {
        "containers": [{"name": "worker", "volumeMounts": [{"name": "model", "mountPath": MODEL_PATH}]}],
        "volumes": [{"name": "model", "hostPath": {"path": str(model), "type": "Directory"}}],
    }


def manifest() -> dict[str, Any]:
    """The quickstart's InferenceCluster, fitted to this machine."""
    loaded: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    return on_this_machine(loaded)
