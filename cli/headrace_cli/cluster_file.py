"""Reads an InferenceCluster from a YAML file: what it says of the model, the engine and the pools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import yaml
from pydantic import ValidationError

from headrace_cli.errors import CliError
from headrace_core.api.names import Kind
from headrace_core.api.resources import InferenceCluster
from headrace_core.api.spec import Pool

GPU_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
"""Set on nodes by NVIDIA's GPU feature discovery; a pool that selects it says which accelerator it runs on."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine arguments that step times and memory follow from. None: not given."""

    utilization: float | None
    batched_tokens: int | None
    max_running: int | None
    block_tokens: int | None
    kv_dtype: str | None


def read_cluster(path: Path) -> InferenceCluster:
    """The one InferenceCluster of a file, which may hold other objects beside.

    Raises:
        CliError: the file cannot be read, is no YAML, has no or several clusters, or one that is not valid.
    """
    try:
        documents = [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]
    except OSError as error:
        raise CliError(f"{path}: cannot be read ({error.strerror}); give a file with an InferenceCluster") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise CliError(f"{path}: is no YAML ({error}); give a file with an InferenceCluster") from error
    clusters = [item for item in documents if isinstance(item, dict) and item.get("kind") == Kind.CLUSTER]
    if len(clusters) != 1:
        raise CliError(f"{path}: holds {len(clusters)} objects of kind InferenceCluster; give a file with one")
    try:
        return InferenceCluster.model_validate(clusters[0])
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CliError(f"{path}: {field}: {first['msg']}") from error


def model_name(cluster: InferenceCluster) -> str:
    """The model as the Hugging Face Hub names it, or the path inside the worker's container."""
    return cluster.spec.model.uri.removeprefix("hf://").removeprefix("file://")


def accelerator_name(pool: Pool) -> str | None:
    """The accelerator that a pool's template selects by node label; None where it selects none."""
    spec: dict[str, Any] = pool.template.get("spec") or {}
    selector: dict[str, Any] = spec.get("nodeSelector") or {}
    name = selector.get(GPU_PRODUCT_LABEL)
    return str(name) if name else None


def engine_settings(cluster: InferenceCluster) -> EngineSettings:
    """What `spec.engine.args` says.

    Raises:
        CliError: a number is none.
    """
    given = {arg.name.lower().replace("_", "-"): arg.value for arg in cluster.spec.engine.args}
    return EngineSettings(
        utilization=_number(given, "gpu-memory-utilization"),
        batched_tokens=_whole_number(given, "max-num-batched-tokens"),
        max_running=_whole_number(given, "max-num-seqs"),
        block_tokens=_whole_number(given, "block-size"),
        kv_dtype=given.get("kv-cache-dtype"),
    )


def _number(given: dict[str, str], name: str) -> float | None:
    if name not in given:
        return None
    try:
        return float(given[name])
    except ValueError:
        raise CliError(f"spec.engine.args: {name} is {given[name]!r}; give a number") from None


def _whole_number(given: dict[str, str], name: str) -> int | None:
    if name not in given:
        return None
    try:
        return int(given[name])
    except ValueError:
        raise CliError(f"spec.engine.args: {name} is {given[name]!r}; give a whole number") from None
