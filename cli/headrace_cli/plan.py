"""`headrace plan`: says how many workers of which shape a traffic and its SLOs take, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_cli.answers import print_answer
from headrace_cli.errors import CliError
from headrace_cli.flags import (
    add_model_arguments,
    add_rule_arguments,
    add_slo_arguments,
    add_traffic_arguments,
)

if TYPE_CHECKING:
    from headrace_cli.planning import Planning
    from headrace_core.planner.result import PlanResult


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the command line."""
    command = subparsers.add_parser(
        "plan",
        help="find how many workers of which shape a traffic takes",
        description="Search accelerators, tensor and pipeline degrees and numbers of workers for a traffic and its "
        "SLOs, by simulation. Disaggregated plans stand beside colocated ones. Needs no cluster and no GPU.",
        epilog="Examples: headrace plan --model Qwen/Qwen3-8B --accelerator H100-SXM@2.5 --accelerator L40S@1.1 --rate "
        "20 --lengths sharegpt --ttft 500 --tpot 50; headrace plan -f chat.yaml --trace t.csv --ttft 500 --tpot 50. "
        "Exit code: 0 a plan serves what was asked for, 1 none does, or the input is wrong.",
    )
    add_model_arguments(command)
    _add_search_arguments(command)
    add_traffic_arguments(command)
    add_slo_arguments(command)
    command.add_argument(
        "--target", type=float, default=0.9, metavar="SHARE", help="of requests within their SLO (default 0.9)"
    )
    add_rule_arguments(command)
    _add_output_arguments(command)
    command.set_defaults(run=_run)


def _add_search_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("what may be deployed")
    group.add_argument(
        "--accelerator",
        action="append",
        default=[],
        metavar="NAME[:COUNT][@PRICE]",
        help="may be repeated; COUNT GPUs are there, PRICE is of one GPU and hour",
    )
    group.add_argument("--gpus", type=int, metavar="N", help="in all; without --rate and --trace: serve all they can")
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    group.add_argument(
        "--nodes-per-worker", type=int, default=1, metavar="N", help="nodes that a worker may span (default 1)"
    )
    group.add_argument("--bandwidth", type=float, metavar="GB/S", help="of a GPU's link between nodes (default: a NIC)")
    group.add_argument(
        "--layout",
        choices=("apart", "paired", "both"),
        default="both",
        help="apart: KV over the network (DistServe's Algorithm 1); paired: within nodes (Algorithm 2); default both",
    )
    group.add_argument(
        "--estimates", action="store_true", help="let estimated shapes compete with measured ones of an accelerator"
    )
    group.add_argument(
        "--current", action="store_true", help="with -f: look at its pools as they are, and search nothing"
    )
    group.add_argument(
        "--calibrate",
        metavar="TTFT,TPOT",
        help="with -f: means in ms that its pools show under this traffic; step times are scaled to them",
    )
    group.add_argument(
        "--at", choices=("peak", "mean"), default="peak", help="with --trace: the rate to plan for (default peak)"
    )
    group.add_argument("--schedule", metavar="TIME", help="with --trace: workers for each window, such as 15m or 1h")


def _add_output_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("run and output")
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("--schema", action="store_true", help="print the JSON schema of the result, and plan nothing")
    group.add_argument("--explain", action="store_true", help="say why (with --json: on standard error)")
    group.add_argument(
        "--patch", type=Path, metavar="FILE", help="write the merge patch for `kubectl patch inferencecluster` to FILE"
    )
    group.add_argument(
        "--picture",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="draw attainment, tokens, cost or schedule, by the file's name; .svg, .png or .pdf; may be repeated",
    )
    group.add_argument("--processes", type=int, metavar="N", help="to use (default: one a core)")
    command.set_defaults(seed=0)


def _run(arguments: argparse.Namespace) -> int:
    # What simulates takes most of a second to import: only this command pays.
    from headrace_cli import inputs, plan_pictures, planning  # noqa: PLC0415
    from headrace_cli.figures import named_by  # noqa: PLC0415
    from headrace_core.planner import result as results  # noqa: PLC0415

    if arguments.schema:
        print(json.dumps(results.json_schema(), indent=2))
        return 0
    wanted = [(path, named_by(path, plan_pictures.PlanPicture)) for path in arguments.picture]
    with inputs.user_errors():
        result = _answer(arguments, planning.planning_of(arguments), curves=plan_pictures.needs_curves(wanted))
    for path, picture in wanted:
        plan_pictures.draw(path, picture, result)
    if arguments.patch is not None:
        _write_patch(arguments.patch, result)
    _print(arguments, result)
    found = result.current is not None and result.current.holds if arguments.current else bool(result.plans)
    return 0 if found else 1


def _answer(arguments: argparse.Namespace, planning: Planning, *, curves: bool) -> PlanResult:
    from dataclasses import replace  # noqa: PLC0415

    from headrace_core.planner.answer import answer  # noqa: PLC0415
    from headrace_core.planner.runner import Processes  # noqa: PLC0415
    from headrace_core.sim.cluster import simulate  # noqa: PLC0415

    if arguments.processes is not None and arguments.processes < 1:
        raise CliError("processes: write 1 or more")
    with (
        _progress() as (done, announce),
        Processes(planning.question.traffic, simulate, processes=arguments.processes, progress=done) as runner,
    ):
        return answer(planning.question, planning.space, runner, replace(planning.extras, curves=curves), announce)


def _write_patch(path: Path, result: PlanResult) -> None:
    import yaml  # noqa: PLC0415

    if result.patch is None:
        raise CliError(f"--patch: there is none: {result.patch_note}")
    try:
        path.write_text(yaml.safe_dump(result.patch, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise CliError(f"--patch: {path} cannot be written ({error.strerror})") from error


def _print(arguments: argparse.Namespace, result: PlanResult) -> None:
    from headrace_cli.plan_text import explanation, plan_text  # noqa: PLC0415
    from headrace_core.planner.result import to_json  # noqa: PLC0415

    print_answer(arguments, result, text=plan_text, json=to_json, explanation=explanation)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A line on standard error, if that is a terminal: simulations done, and what is being looked at."""
    from tqdm import tqdm  # noqa: PLC0415

    with tqdm(desc="planning", unit=" simulations", leave=False, disable=None) as bar:

        def done(trials: int) -> None:
            bar.update(trials - bar.n)

        yield done, bar.set_description_str
