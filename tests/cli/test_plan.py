"""`headrace plan`: flags in, tables, JSON, patch and pictures out. A closed form stands for the simulator."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_cli import planning
from headrace_cli.main import main
from headrace_cli.plan_text import plan_text
from headrace_core.api.resources import InferenceCluster
from headrace_core.planner import goodput, settle, trial
from headrace_core.planner.headroom import Surprise
from headrace_core.planner.result import from_json
from headrace_core.sim import calibration, cluster
from headrace_core.sim.workload import Workload
from tests.core.planner import queue

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "manifests" / "quickstart.yaml"
SIZES = "--model facebook/opt-13b --accelerator A100-80G --gpus-per-node 1"
TRAFFIC = "--rate 4 --lengths 300,101 --ttft 400 --tpot 60"
Plan = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command in one process of its own pool; returns its code, output and errors."""
    monkeypatch.setattr(cluster, "simulate", queue.simulate)
    monkeypatch.setattr(calibration, "simulate", queue.simulate)
    monkeypatch.setattr(trial, "SCREEN_REQUESTS", 150)
    monkeypatch.setattr(trial, "MOST_REQUESTS", 300)
    monkeypatch.setattr(goodput, "REPLICATION_FACTOR", 1)

    def run(text: str) -> tuple[int, str, str]:
        try:
            code = main(["plan", "--processes", "1", *shlex.split(text)])
        except SystemExit as left:
            code = int(str(left.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A hundred seconds of 10 requests/s, ten of them of 60/s."""
    times: list[float] = []
    for number in range(10):
        count = 600 if number == 5 else 100
        times += [10 * number + 10 * place / count for place in range(count)]
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt,output\n" + "".join(f"{time:.5f},300,101\n" for time in times))
    return path


def test_a_plan_as_text(plan: Plan) -> None:
    code, out, _ = plan(f"{SIZES} {TRAFFIC} --explain")
    assert code == 0
    assert "facebook/opt-13b: 4 requests/s, 0.9 of them within default TTFT 400 ms TPOT 60 ms" in out
    for words in ("apart", "paired on a node", "colocated", "is lost", "rate 20 % higher", "Why:"):
        assert words in out, words
    for words in ("gives way first", "measured, DistServe", "simulations; intervals are of 95 %", "replicas: "):
        assert words in out, words


def test_a_plan_as_json_is_the_one_that_is_printed(plan: Plan) -> None:
    code, out, errors = plan(f"{SIZES} {TRAFFIC} --json --explain")
    result = from_json(out)
    assert code == 0
    assert errors.startswith("Why:")
    assert result.asked.rate_per_s == 4
    assert "1      " in plan_text(result)
    assert plan(f"{SIZES} {TRAFFIC} --json")[1] == out, "the same question has the same answer"


def test_the_schema_needs_nothing_else(plan: Plan) -> None:
    code, out, _ = plan("--schema")
    assert code == 0
    assert json.loads(out)["title"] == "PlanResult"


def test_prices_of_several_accelerators(plan: Plan) -> None:
    text = f"--model facebook/opt-13b --gpus-per-node 1 {TRAFFIC} --accelerator A100-80G:8@2 --accelerator H100-SXM@3"
    code, out, _ = plan(f"{text} --json")
    result = from_json(out)
    assert code == 0
    assert {pool.accelerator for one in result.plans for pool in one.pools} <= {"A100-80G", "H100-SXM"}
    assert all(one.price_per_hour and one.cost_per_million_tokens for one in result.plans)
    if any(pool.accelerator == "H100-SXM" for one in result.plans for pool in one.pools):
        assert any("H100-SXM are estimated from datasheets" in warning for warning in result.warnings)


def test_gpus_without_a_rate(plan: Plan) -> None:
    code, out, _ = plan(f"{SIZES} --gpus 4 --lengths 300,101 --ttft 400 --tpot 60 --layout apart --json")
    result = from_json(out)
    assert code == 0
    assert result.asked.rate_per_s is None
    assert result.headroom == ()
    assert all(one.gpus <= 4 and one.spare is None for one in result.plans)
    assert "as much as 4 GPUs can serve" in plan_text(result)


def test_a_cluster_with_a_trace(plan: Plan, trace: Path, tmp_path: Path) -> None:
    """Everything of an InferenceCluster: what there is beside the plan, a schedule, and a patch that is applied."""
    patch, picture = tmp_path / "patch.yaml", tmp_path / "x-schedule.svg"
    code, out, _ = plan(
        f"-f {QUICKSTART} --accelerator A100-80G --gpus-per-node 1 --trace {trace} --schedule 10s --ttft 900 --tpot 60 "
        f"--patch {patch} --picture {picture} --json"
    )
    result = from_json(out)
    assert code == 0
    assert result.asked.rate_per_s == pytest.approx(60.0, rel=0.01), "the busiest window"
    rates = {case.surprise: case.rate_per_s for case in result.headroom}
    assert rates[Surprise.MEAN] == pytest.approx(15.0, rel=0.01)
    assert result.current is not None
    assert [pool.workers for pool in result.current.pools] == [2, 1]
    assert result.schedule is not None
    assert len(result.schedule.windows) == 10
    workers = [window.workers for window in result.schedule.windows]
    assert workers.count(workers[0]) == 9
    assert sum(workers[5]) > sum(workers[0]), "the busy window takes more"
    merged = yaml.safe_load(QUICKSTART.read_text())
    merged["spec"] |= yaml.safe_load(patch.read_text())["spec"]
    pools = InferenceCluster.model_validate(merged).spec.pools
    assert [(pool.name, pool.min_replicas) for pool in pools] == [("prefill", 1), ("decode", 1)]
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "Workers over the trace" in plan_text(result)


def test_the_mean_of_a_trace(plan: Plan, trace: Path) -> None:
    code, out, _ = plan(f"{SIZES} --trace {trace} --at mean --ttft 900 --tpot 60 --layout apart --json")
    result = from_json(out)
    assert code == 0
    assert result.asked.rate_per_s == pytest.approx(15.0, rel=0.01)
    assert Surprise.PEAK in {case.surprise for case in result.headroom}
    assert 0.5 < result.asked.variation < 0.9, "even gaps, of two lengths in the busiest minute"


@pytest.mark.parametrize(("rate", "code"), [(0.5, 0), (300, 1)])
def test_only_what_there_is(plan: Plan, rate: float, code: int) -> None:
    found, out, _ = plan(
        f"-f {QUICKSTART} --accelerator A100-80G --gpus-per-node 1 --rate {rate} --lengths 300,101 --ttft 900 "
        "--tpot 60 --current --json"
    )
    result = from_json(out)
    assert found == code
    assert result.plans == ()
    assert result.current is not None
    assert result.current.holds is (code == 0)
    assert "What there is:" in plan_text(result)


def test_calibration_scales_the_step_times(plan: Plan) -> None:
    text = (
        f"-f {QUICKSTART} --accelerator A100-80G --gpus-per-node 1 --rate 2 --lengths 300,101 --ttft 2000 --tpot 200 "
        "--current --json"
    )
    plain = from_json(plan(text)[1]).current
    slower = from_json(plan(f"{text} --calibrate 200,60")[1]).current
    assert plain is not None
    assert slower is not None
    assert slower.goodput_per_s.mean < 0.7 * plain.goodput_per_s.mean


@pytest.mark.parametrize("name", ["attainment.svg", "tokens.png", "chat-cost.pdf"])
def test_pictures(plan: Plan, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    code, _, errors = plan(f"{SIZES} {TRAFFIC} --layout apart --picture {path}")
    assert (code, errors) == (0, "")
    assert path.stat().st_size > 1000


def test_several_classes(plan: Plan) -> None:
    code, out, _ = plan(f"{SIZES} --rate 4 --lengths 300,101 --slo chat=400,60,3 --slo batch=5000,200,1 --json")
    result = from_json(out)
    assert code == 0
    assert [slo.name for slo in result.asked.slos] == ["chat", "batch"]


def test_no_plan_ends_with_1_and_says_why(plan: Plan) -> None:
    code, out, _ = plan(f"{SIZES} --gpus 2 --rate 900 --lengths 300,101 --ttft 400 --tpot 60")
    assert code == 1
    assert "no plan serves the rate: offer more GPUs" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SIZES} --rate -1 --lengths 300,101 --ttft 400 --tpot 60", "rate: -1.0 requests/s is not a positive number"),
        (f"{SIZES} --lengths 300,101 --ttft 400 --tpot 60", "rate: give a rate to be served, or a number of GPUs"),
        (f"{SIZES} --rate 1 --ttft 400 --tpot 60", "lengths: none are given; add --lengths"),
        (f"{SIZES} --rate 1 --lengths 300,101 --ttft 400 --tpot 5", "slo: TPOT 5 ms is under the"),
        (f"{SIZES} --rate 1 --lengths 300,101 --ttft 4 --tpot 60", "slo: TTFT 4 ms is under the"),
        (f"{SIZES} --rate 1 --lengths 300,101", "slo: give --ttft MS and --tpot MS"),
        (f"{SIZES} {TRAFFIC} --target 90", "target: 90 is no share"),
        (f"{SIZES} {TRAFFIC} --arrivals bursts:60,0.1,5", "arrivals: 'bursts:60,0.1,5' cannot be planned for"),
        (f"{SIZES} {TRAFFIC} --arrivals gamma:x", "arrivals: 'gamma:x' is no law"),
        (f"{SIZES} {TRAFFIC} --schedule 1h", "--schedule: there is no time to schedule over; add --trace FILE"),
        (f"{SIZES} {TRAFFIC} --current", "--current: no deployment is known; add -f FILE"),
        (f"{SIZES} {TRAFFIC} --calibrate 1,2", "--calibrate: it needs the deployment that showed these means"),
        (f"{SIZES} {TRAFFIC} --bandwidth 0", "bandwidth: 0 GB/s cannot be"),
        (f"{SIZES} {TRAFFIC} --processes 0", "processes: write 1 or more"),
        (f"{SIZES} {TRAFFIC} --picture cost.gif", "--picture: cost.gif ends in none of"),
        (
            f"{SIZES} {TRAFFIC} --picture plan.svg",
            "--picture: plan.svg names none of attainment, tokens, cost, schedule",
        ),
        (f"--model facebook/opt-13b {TRAFFIC}", "accelerator: none is given; add --accelerator"),
        (f"--model facebook/opt-13b --accelerator A100-80G:x {TRAFFIC}", "accelerator: 'x' of A100-80G:x is no number"),
        (f"--model facebook/opt-13b --accelerator :8 {TRAFFIC}", "accelerator: ':8' is not NAME"),
        (f"--model facebook/opt-13b --accelerator A100-80 {TRAFFIC}", "is not known; the nearest are A100-80G"),
        (f"--model facebook/opt-13b --accelerator A100-80G@-2 {TRAFFIC}", "price: -2 of A100-80G cannot be"),
        (f"--model facebook/opt-13b --accelerator A100-80G@1 --accelerator L4 {TRAFFIC}", "and L4 has none"),
        (
            f"--model facebook/opt-66b --accelerator A100-80G --gpus-per-node 1 {TRAFFIC}",
            "model: facebook/opt-66b does not fit",
        ),
        (f"{SIZES} --trace missing.csv --ttft 400 --tpot 60", "missing.csv: cannot be read"),
    ],
)
def test_bad_input_names_field_and_remedy(plan: Plan, text: str, message: str) -> None:
    code, out, errors = plan(text)
    assert code == 1
    assert out == ""
    assert message in errors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arrival_s,prompt,output\n", "the trace is empty"),
        ("arrival_s,prompt,output\n5,10,10\n1,10,10\n", "sort the trace by arrival"),
        ("arrival_s,prompt,output\n5,10,10\n5,10,10\n", "trace: all its requests come at once"),
        ("arrival_s,prompt,output,slo_class\n0,10,10,0\n5,10,10,1\n", "slo: the trace has class 1, and 1 are given"),
    ],
)
def test_bad_traces(plan: Plan, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    code, _, errors = plan(f"{SIZES} --trace {path} --ttft 400 --tpot 60")
    assert code == 1
    assert message in errors


@pytest.mark.parametrize("window", ["0s", "1x"])
def test_bad_windows(plan: Plan, trace: Path, window: str) -> None:
    code, _, errors = plan(f"{SIZES} --trace {trace} --schedule {window} --ttft 400 --tpot 60")
    assert code == 1
    assert "--schedule: " in errors


def test_a_patch_that_there_is_not(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "patch.yaml"
    code, _, errors = plan(f"{SIZES} --gpus 2 --rate 900 --lengths 300,101 --ttft 400 --tpot 60 --patch {path}")
    assert code == 1
    assert "--patch: there is none: there is no plan to apply" in errors
    assert not path.exists()


def test_the_busiest_window_slides() -> None:
    """60 arrivals around a minute's turn count as one window."""
    times = [float(10_000 * number) for number in range(12)]
    times = sorted([*times, *(59_000 + 33 * number for number in range(60))])
    played = Workload(times, [1] * len(times), [2] * len(times), [], [], 0, "times")
    found: Any = planning._busiest(played, 60_000.0)
    assert found.rate_per_s == pytest.approx(66 / 60)


def test_the_real_simulator_plans_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trial, "SCREEN_REQUESTS", 100)
    for module in (goodput, settle):
        monkeypatch.setattr(module, "MOST_REPLICATIONS", 3)
    monkeypatch.setattr(goodput, "REPLICATION_FACTOR", 1)
    code = main(
        ["plan", *shlex.split(f"-f {QUICKSTART} --accelerator L40S --gpus-per-node 1 {TRAFFIC} --rate 2 --current")]
    )
    assert code == 0
    assert "estimated from datasheets" in capsys.readouterr().out
