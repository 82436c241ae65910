"""Writes what came of each request as a table: CSV, or Parquet by the ending of the file."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Final

from headrace_cli.errors import CliError
from headrace_core.sim.attainment import blame, judge
from headrace_core.sim.outcome import Outcome, Status
from headrace_core.sim.scenario import Scenario

ENDINGS: Final = (".csv", ".parquet")
_TIMES: Final = (
    "arrival_ms",
    "prefill_start_ms",
    "first_token_ms",
    "admitted_ms",
    "transferred_ms",
    "second_token_ms",
    "last_token_ms",
    "largest_gap_ms",
)
_COUNTS: Final = ("prompt_tokens", "output_tokens", "cached_tokens", "prefill_worker", "decode_worker", "preemptions")


def check_ending(path: Path) -> None:
    """Refuses a file that this cannot write, before a long run.

    Raises:
        CliError: the ending is none of ENDINGS.
    """
    if path.suffix.lower() not in ENDINGS:
        raise CliError(f"--requests: {path.name} ends in neither of {', '.join(ENDINGS)}; rename it")


def write_requests(path: Path, scenario: Scenario, outcome: Outcome) -> None:
    """Writes one row a request, in order of arrival. A time that did not happen is empty (null).

    Raises:
        CliError: the file cannot be written.
    """
    columns = request_columns(scenario, outcome)
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow as pa  # noqa: PLC0415 - takes half a second to import
            import pyarrow.parquet as pq  # noqa: PLC0415

            pq.write_table(pa.table(columns), path)
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    except OSError as error:
        raise CliError(f"--requests: {path} cannot be written ({error.strerror or error})") from error


def request_columns(scenario: Scenario, outcome: Outcome) -> dict[str, list[object]]:
    """The table by column: the outcome's, TTFT and TPOT, whether the SLO was met, and else the stage at fault."""
    verdicts = judge(scenario, outcome)
    columns: dict[str, list[object]] = {"slo_class": [scenario.slos[one].name for one in outcome.slo_class]}
    for name in _COUNTS:
        columns[name] = list(getattr(outcome, name))
    for name in _TIMES:
        columns[name] = _known(getattr(outcome, name))
    columns["largest_gap_ms"] = [
        None if math.isnan(second) else gap
        for gap, second in zip(outcome.largest_gap_ms, outcome.second_token_ms, strict=True)
    ]
    columns["ttft_ms"] = _known(verdicts.ttft_ms)
    columns["tpot_ms"] = _known(verdicts.tpot_ms)
    columns["deflected"] = list(outcome.deflected)
    columns["status"] = [Status(one).name.capitalize() for one in outcome.status]
    columns["met"] = list(verdicts.met)
    columns["missed_in"] = [
        None if met else blame(scenario, outcome, verdicts, row).value for row, met in enumerate(verdicts.met)
    ]
    return columns


def _known(values_ms: list[float]) -> list[object]:
    return [None if math.isnan(value) else value for value in values_ms]
