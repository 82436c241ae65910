"""The API server refuses what an InferenceCluster or InferenceFlip must not say, and names the field."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from e2e.cluster.api import ROOT, Cluster
from headrace_core.api import engine_args, names

Spec = dict[str, Any]
Change = Callable[[Spec], object]

GOOD: Spec = {
    "model": {"uri": "hf://Qwen/Qwen3-8B"},
    "pools": [
        {"name": "prefill", "role": "Prefill", "replicas": 2, "maxReplicas": 3},
        {"name": "decode", "role": "Decode", "replicas": 1, "maxReplicas": 3},
    ],
}


def put(*path: str | int, value: object) -> Change:
    """Sets one value of a spec."""

    def change(spec: Spec) -> None:
        here: Any = spec
        for key in path[:-1]:
            here = here[key] if isinstance(key, int) else here.setdefault(key, {})
        here[path[-1]] = value

    return change


def arg(name: str) -> Change:
    """Sets one engine argument."""
    return put("engine", "args", value=[{"name": "max-num-seqs", "value": "8"}, {"name": name, "value": "1"}])


def env(name: str) -> Change:
    """Sets one environment variable."""
    return put("engine", "env", value=[{"name": name, "value": "1"}])


ARG = "spec.engine.args[1].name"
ENV = "spec.engine.env[0].name"
FLIPS = ("elasticity", "flips")

# name -> what is wrong, the field that the refusal must name, and a word of its reason
BAD: dict[str, tuple[Change, str, str]] = {
    "no model": (lambda s: s.pop("model"), "spec.model", "Required"),
    "no uri": (put("model", value={}), "spec.model.uri", "Required"),
    "uri without scheme": (put("model", "uri", value="Qwen/Qwen3-8B"), "spec.model.uri", "should match"),
    "uri of an unknown scheme": (put("model", "uri", value="s3://bucket/key"), "spec.model.uri", "should match"),
    "hf uri of three parts": (put("model", "uri", value="hf://a/b/c"), "spec.model.uri", "should match"),
    "relative file uri": (put("model", "uri", value="file://models/x"), "spec.model.uri", "should match"),
    "revision of a file": (
        lambda s: s.update(model={"uri": "file:///models/x", "revision": "main"}),
        "spec.model.revision",
        "hf:// models only",
    ),
    "no room for a token": (
        put("model", "maxModelLen", value=0),
        "spec.model.maxModelLen",
        "greater than or equal to 1",
    ),
    "one pool": (lambda s: s["pools"].pop(), "spec.pools", "at least 2 items"),
    "no pools": (lambda s: s.pop("pools"), "spec.pools", "Required"),
    "nine pools": (
        lambda s: s["pools"].extend({"name": f"p{n}", "role": "Decode"} for n in range(7)),
        "spec.pools",
        "at most 8 items",
    ),
    "no decode pool": (put("pools", 1, "role", value="Prefill"), "spec.pools", "the role Decode"),
    "no prefill pool": (put("pools", 0, "role", value="Decode"), "spec.pools", "the role Prefill"),
    "pool without role": (lambda s: s["pools"][0].pop("role"), "spec.pools[0].role", "Required"),
    "pool of an unknown role": (put("pools", 0, "role", value="prefill"), "spec.pools[0].role", "supported values"),
    "two pools of a name": (put("pools", 1, "name", value="prefill"), "spec.pools[1]", "Duplicate value"),
    "pool name that is no label": (put("pools", 0, "name", value="Pre_fill"), "spec.pools[0].name", "should match"),
    "pool name too long": (put("pools", 0, "name", value="p" * 41), "spec.pools[0].name", "Too long"),
    "no replicas": (put("pools", 0, "replicas", value=0), "spec.pools[0].replicas", "greater than or equal to 1"),
    "too many replicas": (put("pools", 0, "replicas", value=1001), "spec.pools[0].replicas", "less than or equal to"),
    "minimum above maximum": (
        lambda s: s["pools"][0].update(minReplicas=3, maxReplicas=2, replicas=2),
        "spec.pools[0].minReplicas",
        "must not exceed maxReplicas",
    ),
    "replicas above maximum": (put("pools", 0, "replicas", value=4), "spec.pools[0].replicas", "must lie between"),
    "replicas below minimum": (
        lambda s: s["pools"][0].update(minReplicas=3, replicas=2),
        "spec.pools[0].replicas",
        "must lie between",
    ),
    "unequal shapes with flips": (
        put("pools", 0, "parallelism", value={"tensor": 2}),
        "spec.pools",
        "equal parallelism",
    ),
    "unequal pipelines with flips": (
        put("pools", 1, "parallelism", value={"pipeline": 2}),
        "spec.pools",
        "equal parallelism",
    ),
    "tensor degree 0": (put("pools", 0, "parallelism", value={"tensor": 0}), "spec.pools[0].parallelism.tensor", "1"),
    "more GPUs than a node has": (
        lambda s: [pool.update(parallelism={"tensor": 8, "pipeline": 4}) for pool in s["pools"]],
        "spec.pools[0].parallelism",
        "at most 16",
    ),
    "misspelt part of a template": (
        put("pools", 0, "template", value={"spce": {}}),
        "spec.pools[0].template.spce",
        "unknown field",
    ),
    "template that is a list": (put("pools", 0, "template", value=[]), "spec.pools[0].template", "must be of type"),
    "unknown field": (put("pools", 0, "replicaCount", value=2), "spec.pools[0].replicaCount", "unknown field"),
    "field of a later version": (put("slo", value={"ttft": "1s"}), "spec.slo", "unknown field"),
    "external scaling": (put("pools", 0, "scaling", value="External"), "spec.pools[0].scaling", "supported values"),
    "duration without unit": (put(*FLIPS, "cooldown", value="120"), "spec.elasticity.flips.cooldown", "should match"),
    "duration with a fraction": (put(*FLIPS, "idleFor", value="1.5m"), "spec.elasticity.flips.idleFor", "should match"),
    "negative duration": (put(*FLIPS, "cooldown", value="-5s"), "spec.elasticity.flips.cooldown", "should match"),
    "duration as a number": (put("elasticity", "interval", value=15), "spec.elasticity.interval", "must be of type"),
    "interval too short": (
        put("elasticity", "interval", value="10ms"),
        "spec.elasticity.interval",
        "between 1s and 1h",
    ),
    "drain of two hours": (
        put(*FLIPS, "drainTimeout", value="2h"),
        "spec.elasticity.flips.drainTimeout",
        "between 1s and 1h",
    ),
    "cool-down of two days": (
        put(*FLIPS, "cooldown", value="48h"),
        "spec.elasticity.flips.cooldown",
        "between 0s and 24h",
    ),
    "share as a fraction": (put(*FLIPS, "idleBelow", value="0.1"), "spec.elasticity.flips.idleBelow", "should match"),
    "share above all": (put(*FLIPS, "idleBelow", value="101%"), "spec.elasticity.flips.idleBelow", "should match"),
    "share just above all": (
        put(*FLIPS, "idleBelow", value="100.1%"),
        "spec.elasticity.flips.idleBelow",
        "should match",
    ),
    "no flip at a time": (put(*FLIPS, "maxConcurrent", value=0), "spec.elasticity.flips.maxConcurrent", "1"),
    "unknown policy": (
        put("elasticity", "policy", value="CapacityModel"),
        "spec.elasticity.policy",
        "supported values",
    ),
    "mode as a boolean": (put("elasticity", "mode", value=True), "spec.elasticity.mode", "must be of type"),
    "gateway without pods": (put("gateway", "replicas", value=0), "spec.gateway.replicas", "1"),
    "rollout that may take nothing": (put("rollout", "maxUnavailable", value=0), "spec.rollout.maxUnavailable", "1"),
    "owned argument": (arg("tensor-parallel-size"), ARG, "parallelism"),
    "owned argument with underscores": (arg("kv_transfer_config"), ARG, "KV connector"),
    "owned argument with a dotted child": (arg("kv-transfer-config.kv_role"), ARG, "KV connector"),
    "owned argument with both": (arg("kv_transfer_config.kv_connector_extra_config.a"), ARG, "KV connector"),
    "owned argument that adds to a list": (arg("served-model-name.0+"), ARG, "spec.model"),
    "owned argument cut short": (arg("tensor-p"), ARG, "parallelism"),
    "owned argument in capitals": (arg("Max-Model-Len"), ARG, "spec.model"),
    "owned argument with dashes before it": (arg("--port"), ARG, "should match"),
    "owned argument with its value": (arg("port=1"), ARG, "should match"),
    "short form of an owned argument": (arg("tp"), ARG, "parallelism"),
    "file of arguments": (arg("config"), ARG, "server"),
    "another server key": (arg("api-key"), ARG, "server"),
    "another scheduler": (arg("scheduler-cls"), ARG, "scheduler"),
    "another executor": (arg("distributed_executor_backend"), ARG, "one engine"),
    "argument without a name": (arg(""), ARG, "at least 1 chars"),
    "two arguments of a name": (arg("max-num-seqs"), "spec.engine.args[1]", "Duplicate value"),
    "reserved variable": (env("HEADRACE_ROLE"), ENV, "operator's own"),
    "variable that unloads the plug-ins": (env("VLLM_PLUGINS"), ENV, "sets this variable itself"),
    "variable that is no name": (env("A-B"), ENV, "should match"),
}


def manifest(spec: Spec, name: str = "chat") -> dict[str, Any]:
    """An InferenceCluster."""
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": names.API_VERSION, "kind": names.Kind.CLUSTER, "metadata": metadata, "spec": spec}


def refusal(cluster: Cluster, wanted: dict[str, Any], *verb: str) -> str:
    """What the API server says against an object; empty where it takes it. Nothing is stored."""
    verb = verb or ("create", "--dry-run=server")
    done = cluster.try_kubectl(*verb, "-f", "-", stdin=json.dumps(wanted))
    return "" if done.returncode == 0 else done.stderr


def changed(*changes: Change) -> Spec:
    """The good spec with changes."""
    spec = copy.deepcopy(GOOD)
    for change in changes:
        change(spec)
    return spec


def names_field(said: str, field: str) -> bool:
    """Whether a refusal is about a field: as the path of a cause, or as an unknown field."""
    return f"{field}: " in said or f'unknown field "{field}"' in said


def test_the_spec_that_the_bad_ones_differ_from_is_good(headrace: Cluster) -> None:
    assert refusal(headrace, manifest(GOOD)) == ""


@pytest.mark.parametrize("sample", ["quickstart.yaml", "flip.yaml"])
def test_the_samples_are_taken(headrace: Cluster, sample: str) -> None:
    done = headrace.try_kubectl("create", "--dry-run=server", "-f", str(ROOT / "manifests" / sample))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_refused_with_its_field(headrace: Cluster, case: str) -> None:
    change, field, reason = BAD[case]
    said = refusal(headrace, manifest(changed(change)))
    assert names_field(said, field), said or "it was accepted"
    assert reason in said


GOOD_CHANGES: dict[str, tuple[Change, ...]] = {
    "unequal shapes with flips forbidden": (
        put("pools", 0, "parallelism", value={"tensor": 2}),
        put(*FLIPS, "mode", value="Forbidden"),
    ),
    "unequal shapes with elasticity off": (
        put("pools", 0, "parallelism", value={"tensor": 2}),
        put("elasticity", "mode", value="Off"),
    ),
    "unequal shape of a static pool": (
        put("pools", 0, "parallelism", value={"tensor": 2}),
        put("pools", 0, "scaling", value="Static"),
    ),
    "static pool beyond the default maximum": (
        put("pools", 0, "scaling", value="Static"),
        put("pools", 0, "replicas", value=100),
    ),
    "a template with anything in its spec": (
        put("pools", 0, "template", value={"metadata": {"labels": {"a": "b"}}, "spec": {"x": [{"y": 1}]}}),
    ),
    "a file": (put("model", "uri", value="file:///models/tiny-1.0"),),
    "long durations of several parts": (put(*FLIPS, "cooldown", value="1h30m0s500ms"),),
    "every share": (put(*FLIPS, "idleBelow", value="99.999%"),),
    "an argument that begins like an owned one": (arg("model-impl"),),
    "an argument with a child": (arg("compilation_config.max_cudagraph_capture_size"),),
}


@pytest.mark.parametrize("case", GOOD_CHANGES)
def test_what_is_allowed_is_taken(headrace: Cluster, case: str) -> None:
    assert refusal(headrace, manifest(changed(*GOOD_CHANGES[case]))) == ""


NAMES = {
    "longest": ("c" * 40, ""),
    "too long": ("c" * 41, "metadata.name: "),
    "with a dot": ("chat.one", "metadata.name: "),
    "with a digit first": ("1chat", "metadata.name: "),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_cluster_name_fits_a_service_name(headrace: Cluster, case: str) -> None:
    name, said = NAMES[case]
    assert said in refusal(headrace, manifest(GOOD, name))
    assert bool(said) == bool(refusal(headrace, manifest(GOOD, name)))


def test_defaults_are_written_out(headrace: Cluster) -> None:
    text = headrace.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(manifest(GOOD)))
    stored = json.loads(text)
    assert stored["spec"]["elasticity"]["flips"]["idleBelow"] == "10%"
    assert stored["spec"]["pools"][0]["parallelism"] == {"tensor": 1, "pipeline": 1}
    assert stored["status"]["observedGeneration"] == -1


def flip(**spec: str) -> dict[str, Any]:
    """An InferenceFlip of a cluster that is not there."""
    metadata = {"name": "bad-specs", "namespace": "default"}
    spec = {"clusterName": "chat", "podName": "chat-w0", "targetPool": "decode", **spec}
    return {"apiVersion": names.API_VERSION, "kind": names.Kind.FLIP, "metadata": metadata, "spec": spec}


def test_a_flip_does_not_change(headrace: Cluster) -> None:
    headrace.kubectl("create", "-f", "-", stdin=json.dumps(flip()))
    try:
        said = refusal(headrace, flip(targetPool="prefill"), "replace")
        assert "spec: " in said
        assert "delete it and create another" in said
        assert refusal(headrace, flip(), "replace") == ""
    finally:
        headrace.kubectl("delete", "-f", "-", stdin=json.dumps(flip()))


def test_a_flip_needs_a_pool_name(headrace: Cluster) -> None:
    assert "spec.targetPool: " in refusal(headrace, flip(targetPool="De_code"))


# vLLM is asked for its arguments in a process of its own: importing it takes many seconds and much memory.
LIST_OPTIONS = """
import json
import subprocess
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print("OPTIONS " + json.dumps(sorted(s for a in parser._actions for s in a.option_strings if s.startswith("--"))))
"""


@pytest.fixture(scope="module")
def engine_options() -> list[str]:
    """Every long option of `vllm serve`, without its dashes."""
    done = subprocess.run([sys.executable, "-c", LIST_OPTIONS], capture_output=True, text=True, check=True, timeout=240)
    line = next(line for line in done.stdout.splitlines() if line.startswith("OPTIONS "))
    return [option.removeprefix("--") for option in json.loads(line.removeprefix("OPTIONS "))]


def accepted(cluster: Cluster, options: Iterable[str]) -> set[str]:
    """The options that the API server takes as engine arguments, asked for in groups as long as the list may be."""
    wanted, taken = sorted(set(options)), set[str]()
    for start in range(0, len(wanted), 60):
        group = wanted[start : start + 60]
        said = refusal(cluster, manifest(changed(put("engine", "args", value=[{"name": one} for one in group]))))
        taken |= {one for index, one in enumerate(group) if f"spec.engine.args[{index}].name: " not in said}
    return taken


def test_owned_arguments_are_the_engine_s_own_and_refused(headrace: Cluster, engine_options: list[str]) -> None:
    owned = {name for group in engine_args.OWNED for name in group.names}
    short_forms = {"tp", "pp", "dp", "pcp", "asc"}
    assert owned - short_forms <= set(engine_options), "names that this vLLM does not have"
    assert accepted(headrace, engine_options) == set(engine_options) - owned


def test_every_abbreviation_of_an_owned_argument_is_refused(headrace: Cluster, engine_options: list[str]) -> None:
    owned = {name for group in engine_args.OWNED for name in group.names}
    beginnings = {option[:end] for option in owned for end in range(1, len(option))} - set(engine_options)
    assert accepted(headrace, beginnings) == set()
