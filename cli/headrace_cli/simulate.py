"""`headrace simulate`: plays traffic on a simulated cluster and reports latencies, SLO attainment, use and cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_cli.answers import print_answer
from headrace_cli.errors import CliError
from headrace_cli.flags import (
    add_deployment_arguments,
    add_model_arguments,
    add_rule_arguments,
    add_slo_arguments,
    add_traffic_arguments,
)

if TYPE_CHECKING:
    from headrace_cli.deployments import Run
    from headrace_cli.pictures import Picture
    from headrace_core.sim.cluster import Progress
    from headrace_core.sim.outcome import Outcome
    from headrace_core.sim.report import Report

BAR_AFTER_S: Final = 1.0
"""Runs that are done sooner show no progress bar."""


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `simulate` to the command line."""
    command = subparsers.add_parser(
        "simulate",
        help="simulate a cluster under given traffic",
        description="Play traffic on a simulated cluster: the same policies that the workers run, on measured or "
        "estimated step times. Needs no cluster and no GPU.",
        epilog="Examples: headrace simulate --model Qwen/Qwen3-8B --accelerator H100 --prefill 1 --decode 2 --rate 8 "
        "--lengths 512,128 --ttft 500 --tpot 50. Exit code: 0 simulated, whatever the attainment; 1 not.",
    )
    add_model_arguments(command)
    add_deployment_arguments(command)
    add_traffic_arguments(command)
    add_slo_arguments(command)
    add_rule_arguments(command)
    group = command.add_argument_group("run and output")
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    group.add_argument(
        "--warmup", type=float, metavar="SHARE", help="of the requests, left out at the start (default 0.1)"
    )
    group.add_argument("--json", action="store_true", help="print the report as JSON")
    group.add_argument(
        "--schema", action="store_true", help="print the JSON schema of the report, and simulate nothing"
    )
    group.add_argument("--explain", action="store_true", help="say why (with --json: on standard error)")
    group.add_argument(
        "--requests", type=Path, metavar="FILE", help="write a row a request to FILE.csv or FILE.parquet"
    )
    group.add_argument(
        "--picture",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="draw latency, timeline or attainment, by the file's name; .svg, .png or .pdf; may be repeated",
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # What simulates takes most of a second to import: only this command pays.
    from headrace_cli import deployments, inputs, pictures, request_table  # noqa: PLC0415
    from headrace_cli.figures import named_by  # noqa: PLC0415
    from headrace_core.sim import report_json  # noqa: PLC0415

    if arguments.schema:
        print(json.dumps(report_json.json_schema(), indent=2))
        return 0
    wanted = [(path, named_by(path, pictures.Picture)) for path in arguments.picture]
    if arguments.requests is not None:
        request_table.check_ending(arguments.requests)
    with inputs.user_errors():
        if arguments.calibrate:
            print("headrace: calibrating: about 50 short simulations", file=sys.stderr)
        run = deployments.run_of(arguments)
        outcome, report = _simulated(arguments, run, "simulating")
        for path, picture in wanted:
            _draw(arguments, run, (outcome, report), path, picture)
    if arguments.requests is not None:
        request_table.write_requests(arguments.requests, run.scenario, outcome)
    _print(arguments, report)
    return 0


def _simulated(arguments: argparse.Namespace, run: Run, title: str) -> tuple[Outcome, Report]:
    from headrace_core.sim.cluster import simulate  # noqa: PLC0415
    from headrace_core.sim.reporting import WARMUP_SHARE, make_report  # noqa: PLC0415

    warmup_share = WARMUP_SHARE if arguments.warmup is None else arguments.warmup
    with _progress(len(run.workload), title) as progress:
        outcome = simulate(run.scenario, run.workload, progress)
    return outcome, make_report(run.scenario, run.workload, outcome, run.profiles, warmup_share)


def _draw(
    arguments: argparse.Namespace, run: Run, result: tuple[Outcome, Report], path: Path, picture: Picture
) -> None:
    from headrace_cli import pictures  # noqa: PLC0415

    outcome, report = result
    if picture is pictures.Picture.LATENCY:
        pictures.draw_latency(path, run.scenario, outcome, report)
    elif picture is pictures.Picture.TIMELINE:
        pictures.draw_timeline(path, outcome, report)
    else:
        from headrace_core.sim.workload import scale_rate  # noqa: PLC0415

        rate_per_s = run.workload.rate_per_s()
        if math.isinf(rate_per_s):
            raise CliError("--picture: all requests come at once, so there is no rate to draw attainment against")
        points = []
        for factor in pictures.RATE_FACTORS:
            faster = dataclasses.replace(run, workload=scale_rate(run.workload, factor))
            at_factor = report if factor == 1 else _simulated(arguments, faster, f"at {factor * rate_per_s:.3g}/s")[1]
            points.append(pictures.RatePoint(factor * rate_per_s, at_factor))
        pictures.draw_attainment(path, points, pictures.RatePoint(rate_per_s, report))


def _print(arguments: argparse.Namespace, report: Report) -> None:
    from headrace_cli.report_text import explanation, report_text  # noqa: PLC0415
    from headrace_core.sim.report_json import to_json  # noqa: PLC0415

    print_answer(arguments, report, text=report_text, json=to_json, explanation=explanation)


@contextmanager
def _progress(total: int, title: str) -> Iterator[Progress]:
    """A bar on standard error, if that is a terminal and the run is long."""
    from tqdm import tqdm  # noqa: PLC0415

    with tqdm(total=total, desc=title, unit=" requests", delay=BAR_AFTER_S, leave=False, disable=None) as bar:

        def progress(ended: int) -> None:
            bar.update(ended - bar.n)

        yield progress
