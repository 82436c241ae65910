"""`headrace simulate`, run whole: its report, tables and pictures, its errors, the examples of its documentation."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace_cli.errors import CliError
from headrace_cli.figures import named_by
from headrace_cli.main import main
from headrace_cli.pictures import Picture
from headrace_core.policy.admission import Bound
from headrace_core.policy.dispatch import Dispatching
from headrace_core.sim.report import ProfileKind, Report
from headrace_core.sim.report_json import from_json, json_schema

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "simulate.md").read_text()
QUICKSTART = str(ROOT / "manifests" / "quickstart.yaml")
AZURE = str(ROOT / "tests" / "data" / "azure_conv_300.csv")

MODEL = ["--model", "Qwen/Qwen3-8B", "--accelerator", "H100-SXM@2"]
POOLS = ["--prefill", "1", "--decode", "1"]
TRAFFIC = ["--rate", "4", "--count", "300", "--lengths", "512,64"]
SLO = ["--ttft", "500", "--tpot", "50"]
ALL = [*MODEL, *POOLS, *TRAFFIC, *SLO]


def run(*arguments: str) -> int:
    return main(["simulate", *arguments])


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> Report:
    assert run(*arguments, "--json") == 0
    return from_json(capsys.readouterr().out)


def without(arguments: list[str], flag: str) -> list[str]:
    """The arguments without a flag and its value."""
    at = arguments.index(flag)
    return arguments[:at] + arguments[at + 2 :]


def replaced(flag: str, value: str) -> list[str]:
    return [*without(ALL, flag), flag, value]


def test_the_report_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*ALL, "--explain") == 0
    shown = capsys.readouterr()
    for part in ("270 of 300 requests measured", "Attainment 100 ±", "TTFT ms", "prefill", "warning: ", "Why:"):
        assert part in shown.out
    assert "no request missed its SLO" in shown.out
    assert "a million output tokens" in shown.out
    assert shown.err == ""  # no bar where nobody looks at it


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_run_shows_its_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("headrace_cli.simulate.BAR_AFTER_S", 0.0)
    assert run(*replaced("--count", "4500")) == 0
    assert "simulating" in terminal.getvalue()
    assert "/4500" in terminal.getvalue()


def test_equal_runs_give_equal_reports(capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (reported(capsys, *ALL, "--seed", seed) for seed in ("3", "3", "4"))
    assert one == same
    assert one.workload_sha256 != other.workload_sha256
    assert one.seed == 3


def test_json_goes_alone_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*ALL, "--json", "--explain") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["schema_version"] == 1
    assert shown.err.startswith("Why:")


def test_a_cluster_s_file_with_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["-f", QUICKSTART, "--accelerator", "L40S", "--trace", AZURE, *SLO]
    plain = reported(capsys, *base)
    assert [(pool.name, pool.workers) for pool in plain.pools] == [("prefill", 2), ("decode", 1)]
    assert plain.profiles[0].model == "Qwen/Qwen3-8B"
    assert "azure_conv_300.csv" in plain.workload
    more = reported(capsys, *base, "--decode", "3:tp2:H200")
    assert [(pool.name, pool.workers) for pool in more.pools] == [("decode", 3), ("prefill", 2)]
    assert {(use.pool, use.accelerator, use.tensor) for use in more.profiles} == {
        ("decode", "H200", 2),
        ("prefill", "L40S", 1),
    }


CLUSTER = """
apiVersion: v1
kind: ConfigMap
metadata: {name: beside}
---
apiVersion: serving.headrace.dev/v1alpha1
kind: InferenceCluster
metadata: {name: chat}
spec:
  model: {uri: "hf://Qwen/Qwen3-8B"}
  engine:
    args:
    - {name: gpu-memory-utilization, value: "%s"}
    - {name: kv_cache_dtype, value: fp8}
    - {name: max-num-seqs, value: "7"}
  pools:
  - name: fill
    role: Prefill
    template: {spec: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}}
  - name: draw
    role: Decode
    parallelism: {tensor: 2}
    template: {spec: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-L4}}}
"""


def test_the_engine_and_the_accelerators_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = []
    for share in ("0.9", "0.6"):
        path = tmp_path / "chat.yaml"
        path.write_text(CLUSTER % share)
        found = reported(capsys, "-f", str(path), *TRAFFIC, "--ttft", "500", "--tpot", "200")
        assert [(use.pool, use.accelerator, use.tensor) for use in found.profiles] == [
            ("fill", "H100-SXM", 1),
            ("draw", "L4", 2),
        ]
        moved.append((found.totals.transferred_bytes, found.pools[1].kv_peak_share))
    # Less memory is fuller; the KV of 8 bits takes half of the bytes that --kv-dtype bfloat16 has.
    assert moved[0][1] < moved[1][1]
    assert moved[0][0] == moved[1][0]
    wide = reported(capsys, "-f", str(path), *TRAFFIC, "--ttft", "500", "--tpot", "200", "--kv-dtype", "bfloat16")
    assert wide.totals.transferred_bytes == 2 * moved[0][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [", "is no YAML"),
        ("kind: Pod\n", "holds 0 objects of kind InferenceCluster"),
        (CLUSTER % "lots", "gpu-memory-utilization is 'lots'; give a number"),
        ((CLUSTER % "0.9").replace("Prefill", "Fill"), "spec.pools.0.role"),
        ((CLUSTER % "0.9").replace("value: fp8", "value: fp2"), "kv-cache-dtype 'fp2' is not known"),
        ((CLUSTER % "0.9").replace("NVIDIA-L4}", "NVIDIA-L44}"), "the nearest are"),
    ],
)
def test_a_bad_file_names_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(text)
    assert run("-f", str(path), *TRAFFIC, *SLO) == 1
    assert message in capsys.readouterr().err


def test_slo_classes_share_the_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    found = reported(
        capsys, *MODEL, *POOLS, *TRAFFIC, "--slo", "fast=400,40,2", "--slo", "slow=4000,200", "--warmup", "0"
    )
    assert [(one.name, one.requests, one.ttft_slo_ms, one.tpot_slo_ms) for one in found.classes] == [
        ("fast", 200, 400, 40),
        ("slow", 100, 4000, 200),
    ]


def test_what_each_traffic_flag_does(capsys: pytest.CaptureFixture[str]) -> None:
    traced = [*MODEL, *POOLS, *SLO, "--trace", AZURE]
    assert reported(capsys, *traced, "--rate", "9", "--warmup", "0").sample.arrival_rate_per_s == pytest.approx(9)
    assert reported(capsys, *traced, "--count", "50").sample.requests == 50
    assert reported(capsys, *traced, "--repeat", "2").sample.requests == 600
    cut = reported(capsys, *traced, "--from", "10", "--until", "40").sample
    assert 0 < cut.requests < 300
    assert cut.window_s < 30
    for law, said in (("gamma:3", "gamma (variation 3)"), ("bursts:20,0.2,4", "bursts (bursts:20,0.2,4)")):
        assert said in reported(capsys, *ALL, "--arrivals", law).workload
    drawn = [*MODEL, *POOLS, *SLO, "--rate", "3", "--count", "200"]
    assert "LPHD of" in reported(capsys, *drawn, "--lengths", AZURE, "--length-class", "LPHD").workload
    assert "ShareGPT" in reported(capsys, *drawn, "--lengths", "sharegpt").workload


def test_colocated_workers(capsys: pytest.CaptureFixture[str]) -> None:
    mixed, first = (
        reported(capsys, *MODEL, *TRAFFIC, *SLO, "--colocated", "2", "--colocation", how)
        for how in ("Mixed", "PrefillFirst")
    )
    assert [pool.name for pool in mixed.pools] == ["colocated"]
    assert mixed.scenario_sha256 != first.scenario_sha256


def test_each_rule_reaches_the_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        [],
        ["--order", "SJF"],
        ["--batching", "LmBatch"],
        ["--chunk-tokens", "512"],
        ["--admission", "Greedy"],
        ["--bound", Bound.LOWER],
        ["--max-running", "9"],
        ["--dispatching", Dispatching.RANDOM],
        ["--deflect", "ours"],
        ["--deflect", "kairos"],
        ["--prediction-accuracy", "0.7"],
        ["--bandwidth", "5"],
        ["--same-node"],
        ["--prefix-cache-tokens", "1000"],
        ["--gpu-memory-utilization", "0.8"],
        ["--weight-dtype", "fp8"],
    ]
    hashes = [reported(capsys, *ALL, *flag).scenario_sha256 for flag in flags]
    assert len(set(hashes)) == len(flags)


def test_a_measured_profile_of_ones_own_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {
        "model": "Qwen/Qwen3-8B",
        "accelerator": "H100-SXM",
        "tensor": 1,
        "prefill": {
            "base_ms": 5,
            "token_ms": 0.02,
            "square_ms": 0,
            "residual": {"mape": 0.3, "p95": 0.5, "samples": 9},
        },
        "decode": {"base_ms": 30, "kv_token_ms": 0, "request_ms": 0},
    }
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"schema_version": 1, "source": "our bench", "profiles": [entry]}))
    found = reported(capsys, *ALL, "--profile", str(path))
    use = found.profiles[1]
    assert (use.kind, use.source, use.prefill_error, use.decode_error) == (ProfileKind.MEASURED, "our bench", 0.3, None)
    assert found.tpot.mean_ms is not None
    assert 29.9 < found.tpot.mean_ms < 32
    assert "ProfileError" in {warned.caution for warned in found.warnings}


def test_calibration_shows_what_was_observed(capsys: pytest.CaptureFixture[str]) -> None:
    found = reported(capsys, *ALL, "--calibrate", "60,15", "--warmup", "0")
    assert found.ttft.mean_ms == pytest.approx(60, rel=0.02)
    assert found.tpot.mean_ms == pytest.approx(15, rel=0.02)
    assert found.profiles[0].prefill_factor > 1
    assert found.profiles[0].kind is ProfileKind.ESTIMATED
    assert "EstimatedProfile" not in {warned.caution for warned in found.warnings}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (without(ALL, "--model"), "model: none is given; add --model NAME"),
        (replaced("--model", "llama-7"), "nearest: meta-llama/Llama-2-7b-hf"),
        (replaced("--model", "meta-llama/Llama-3.1-405B"), "does not fit on 1 H100-SXM"),
        (without(ALL, "--accelerator"), "accelerator: pool prefill names none; add --accelerator"),
        (replaced("--accelerator", "H1000"), "'H1000' is not known; the nearest are H200"),
        (replaced("--accelerator", "H100@cheap"), "price: 'cheap' of H100 is no number"),
        (replaced("--accelerator", "H100@-1"), "price: -1 of H100 cannot be"),
        (without(ALL, "--decode"), "a Prefill and a Decode pool with at least one worker each are needed"),
        ([*MODEL, *TRAFFIC, *SLO], "workers: none are given; add --prefill N --decode N"),
        (replaced("--prefill", "two"), "'two' of 'two' is no number of workers; give N[:tpT]"),
        (replaced("--prefill", "1:H100:A100"), "'A100' of '1:H100:A100' is not understood"),
        (replaced("--prefill", "1:tp3"), "tensor: 3 does not divide the 32 attention heads"),
        (without(ALL, "--rate"), "rate: no traffic is given"),
        (replaced("--rate", "-4"), "rate: -4 requests/s is not a positive number"),
        (replaced("--count", "0"), "requests: 0 leaves nothing to simulate"),
        (without(ALL, "--lengths"), "lengths: none are given"),
        (replaced("--lengths", "shargpt"), "nor the name of a fit; give PROMPT,OUTPUT, a file, or sharegpt"),
        ([*ALL, "--length-class", "HPHD"], "no pair of 512 prompt + 64 output tokens is HPHD"),
        ([*ALL, "--arrivals", "even"], "arrivals: 'even' is no law; give poisson, gamma:VARIATION"),
        ([*ALL, "--until", "5"], "--until: it cuts a trace"),
        ([*ALL, "--trace", AZURE], "--lengths: the trace has its own lengths"),
        ([*MODEL, *POOLS, *SLO, "--trace", AZURE, "--arrivals", "gamma:2"], "--arrivals: the trace has its own"),
        ([*MODEL, *POOLS, *SLO, "--trace", "no.csv"], "no.csv: cannot be read"),
        ([*MODEL, *POOLS, *SLO, "--trace", AZURE, "--from", "9999"], "no request arrives from 9999"),
        (without(ALL, "--tpot"), "slo: give --ttft MS and --tpot MS"),
        ([*ALL, "--slo", "a=1,1"], "slo: give either --slo classes or --ttft and --tpot"),
        ([*MODEL, *POOLS, *TRAFFIC, "--slo", "a=1"], "slo: 'a=1' is not NAME=TTFT,TPOT[,SHARE]"),
        (replaced("--tpot", "5"), " ms that one decode step takes on H100-SXM tp1 pp1; raise it"),
        (replaced("--ttft", "5"), " ms that the shortest prompt (512 tokens) takes on H100-SXM tp1 pp1; raise it"),
        ([*ALL, "--warmup", "1"], "warmup share: 1 leaves no request"),
        ([*ALL, "--chunk-tokens", "0"], "prefill.limit_tokens must be 1 or more"),
        ([*ALL, "--bandwidth", "0"], "bandwidth: 0 GB/s cannot be"),
        ([*ALL, "--gpu-memory-utilization", "2"], "utilization: 2.0 is no share"),
        ([*ALL, "--prediction-accuracy", "2"], "prediction.accuracy must be between 0 and 1"),
        ([*ALL, "--calibrate", "60"], "calibrate: '60' is not TTFT,TPOT"),
        ([*ALL, "--calibrate", "60,1"], "brings the simulated TPOT to 1 ms"),
        ([*ALL, "--profile", "no.json"], "no.json cannot be read"),
        ([*ALL, "--requests", "out.txt"], "--requests: out.txt ends in neither of .csv, .parquet"),
        ([*ALL, "--requests", "no/out.csv"], "no/out.csv cannot be written"),
        ([*ALL, "--picture", "latency.gif"], "--picture: latency.gif ends in none of .svg"),
        ([*ALL, "--picture", "run.svg"], "--picture: run.svg names none of latency, timeline, attainment"),
        ([*ALL, "--picture", "no/latency.svg"], "no/latency.svg cannot be written"),
    ],
)
def test_bad_input_names_the_field_and_the_remedy(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_table_of_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    path = tmp_path / f"requests.{ending}"
    found = reported(capsys, *replaced("--ttft", "25"), "--warmup", "0", "--requests", str(path))
    rows: list[dict[str, Any]]
    if ending == "csv":
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        met = sum(row["met"] == "True" for row in rows)
    else:
        rows = pq.read_table(path).to_pylist()
        met = sum(row["met"] for row in rows)
    assert len(rows) == 300
    assert 0 < met < 300
    assert met / 300 == pytest.approx(found.attainment.value)
    stages = [str(row["missed_in"]) for row in rows if row["missed_in"]]
    assert {miss.stage: miss.requests for miss in found.misses} == {stage: stages.count(stage) for stage in stages}
    first = rows[0]
    assert float(first["ttft_ms"]) == pytest.approx(float(first["first_token_ms"]) - float(first["arrival_ms"]))
    assert first["status"] == "Finished"


def test_pictures_by_the_name_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["latency.svg", "night-timeline.png", "attainment.pdf"]
    flags = [flag for name in names for flag in ("--picture", str(tmp_path / name))]
    assert run(*ALL, *flags) == 0
    starts = {"latency.svg": b"<?xml", "night-timeline.png": b"\x89PNG", "attainment.pdf": b"%PDF"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(starts[name])


def test_a_picture_says_what_it_shows_and_is_the_same_each_time(tmp_path: Path) -> None:
    texts = {}
    for kind in Picture:
        path = tmp_path / f"{kind}.svg"
        drawn = []
        for _ in range(2):
            assert run(*ALL, "--picture", str(path)) == 0
            drawn.append(path.read_text())
        assert drawn[0] == drawn[1]
        texts[kind] = drawn[0]
    for kind, words in {
        Picture.LATENCY: ["TTFT in ms", "TPOT in ms", "SLO default"],
        Picture.TIMELINE: ["wait for prefill", "wait for decode", "prefill 0", "decode 1", "time in s"],
        Picture.ATTAINMENT: ["requests/s", "both SLOs", "TTFT alone", "TPOT alone"],
    }.items():
        for word in words:
            assert word in texts[kind], (kind, word)


def test_the_picture_of_a_name() -> None:
    assert named_by(Path("x/Prod-Latency.PNG"), Picture) is Picture.LATENCY
    with pytest.raises(CliError):
        named_by(Path("latency"), Picture)


def test_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schema") == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def examples() -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", DOCUMENT, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("command", examples(), ids=range(len(examples())))
def test_each_example_of_the_documentation_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command[:2] == ["headrace", "simulate"]
    for folder in ("tests", "manifests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0
    assert capsys.readouterr().out
    for name in ("--picture", "--requests"):
        for flag, value in itertools.pairwise(command):
            if flag == name:
                assert (tmp_path / value).stat().st_size > 0


def test_the_documentation_names_each_field_of_the_report_and_each_flag() -> None:
    table = DOCUMENT.split("## The report as JSON")[1]
    named = set(re.findall(r"`(\w+)`", table))
    assert set(json_schema()["properties"]) <= named
    for flag in ("--trace", "--calibrate", "--requests", "--picture", "--explain", "--json", "--schema", "--deflect"):
        assert flag in DOCUMENT
