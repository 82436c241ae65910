"""Reads request traces and length tables: Azure CSV, Mooncake JSONL, and plain CSV, each also gzipped.

| header or form | what it is |
| --- | --- |
| `TIMESTAMP,ContextTokens,GeneratedTokens` | Azure LLM inference traces |
| JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids` | Mooncake traces |
| `arrival_s,prompt,output`, optionally `slo_class` | a trace of one's own |
| `prompt,output` | lengths alone |
| `num_prefill_tokens,num_decode_tokens` | lengths alone, as Vidur publishes them |
| JSON lines with `prompt_tokens`, `output_tokens` | lengths alone, as a request log has them |
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Final, final

from headrace_core.sim.lengths import Lengths
from headrace_core.sim.workload import Workload, WorkloadError, checked

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens behind one of Mooncake's hash ids (kvcache-ai/Mooncake, the description of its traces)."""
MOONCAKE_BIN_MS: Final = 3000
"""The bins of Mooncake's conversation trace; its times are up to BIN_SLACK_MS off."""
BIN_SLACK_MS: Final = 5

AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE: Final = ("timestamp", "input_length", "output_length")
OWN: Final = ("arrival_s", "prompt", "output")
LENGTHS: Final = (
    ("prompt", "output"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
)
"""Pairs of columns that hold prompt and output tokens."""


def read_trace(path: Path, randomness: Random) -> Workload:
    """The requests of a trace file, the first one at 0.

    Args:
        path: a file in one of the forms above that has arrivals.
        randomness: spreads Mooncake's arrivals inside their bins of 3 s; no other form draws from it.

    Raises:
        WorkloadError: the file cannot be read, has none of the forms, is empty or unsorted, or holds a bad number.
    """
    table = _read(path)
    if table.has(MOONCAKE):
        return checked(_mooncake(table, randomness))
    if table.has(AZURE):
        arrival_ms = _since_first([table.moment_ms(row, AZURE[0]) for row in range(len(table.rows))])
        return checked(_workload(table, arrival_ms, AZURE[1], AZURE[2], f"Azure trace {table.name}"))
    if table.has(OWN):
        arrival_ms = _since_first([table.real(row, "arrival_s") * 1000.0 for row in range(len(table.rows))])
        workload = _workload(table, arrival_ms, OWN[1], OWN[2], f"trace {table.name}")
        if table.has(("slo_class",)):
            workload.slo_class = table.integers("slo_class")
        return checked(workload)
    raise WorkloadError(
        f"{table.name}: no trace has the columns {', '.join(table.columns)}; give {', '.join(OWN)} "
        "(seconds and tokens), or an Azure or Mooncake trace"
    )


def read_lengths(path: Path) -> Lengths:
    """The prompt and output tokens of a length table or a trace, in the order of the file.

    Raises:
        WorkloadError: the file cannot be read, has none of the forms, is empty, or holds a bad number.
    """
    table = _read(path)
    for prompt, output in LENGTHS:
        if table.has((prompt, output)):
            prompts, outputs = table.integers(prompt), table.integers(output)
            for row in range(len(prompts)):
                if prompts[row] < 1 or outputs[row] < 1:
                    raise WorkloadError(
                        f"{table.name}: row {row + 1} has {prompts[row]} prompt and {outputs[row]} output tokens; "
                        "each needs at least 1"
                    )
            return Lengths(prompts, outputs, f"lengths of {table.name}")
    raise WorkloadError(
        f"{table.name}: no lengths among the columns {', '.join(table.columns)}; give {', '.join(LENGTHS[0])}"
    )


@final
class _Table:
    """The rows of a file, by column name."""

    __slots__ = ("columns", "name", "rows")

    def __init__(self, name: str, columns: list[str], rows: list[dict[str, object]]) -> None:
        self.name = name
        self.columns = columns
        self.rows = rows

    def has(self, names: tuple[str, ...]) -> bool:
        """Whether all of these are columns."""
        return all(name in self.columns for name in names)

    def integers(self, column: str) -> list[int]:
        """A column of whole numbers."""
        values: list[int] = []
        for row in range(len(self.rows)):
            value = self.rows[row].get(column)
            try:
                values.append(int(str(value)))
            except ValueError:
                raise self._bad(row, column, value, "a whole number") from None
        return values

    def real(self, row: int, column: str) -> float:
        """One number."""
        value = self.rows[row].get(column)
        try:
            return float(str(value))
        except ValueError:
            raise self._bad(row, column, value, "a number") from None

    def moment_ms(self, row: int, column: str) -> float:
        """One ISO time, as ms since 1970; UTC where it names no zone."""
        value = self.rows[row].get(column)
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            raise self._bad(row, column, value, "a time such as 2023-11-16 18:15:46.680") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000.0

    def hashes(self, row: int, column: str) -> tuple[int, ...]:
        """One list of whole numbers."""
        value = self.rows[row].get(column)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._bad(row, column, value, "a list of whole numbers")
        return tuple(value)

    def _bad(self, row: int, column: str, value: object, wanted: str) -> WorkloadError:
        return WorkloadError(f"{self.name}: {column} of row {row + 1} is {value!r}; give {wanted}")


def _mooncake(table: _Table, randomness: Random) -> Workload:
    arrival_ms = [table.real(row, "timestamp") for row in range(len(table.rows))]
    source = f"Mooncake trace {table.name}"
    if len(arrival_ms) > 1 and all(_bin_distance_ms(value) <= BIN_SLACK_MS for value in arrival_ms):
        arrival_ms = _spread(arrival_ms, randomness)
        source += f", arrivals spread inside their bins of {MOONCAKE_BIN_MS // 1000} s by seed"
    workload = _workload(table, _since_first(arrival_ms), MOONCAKE[1], MOONCAKE[2], source)
    if table.has(("hash_ids",)):
        workload.prefix = [table.hashes(row, "hash_ids") for row in range(len(table.rows))]
        workload.prefix_block_tokens = MOONCAKE_BLOCK_TOKENS
    return workload


def _bin_distance_ms(value_ms: float) -> float:
    return abs(value_ms - round(value_ms / MOONCAKE_BIN_MS) * MOONCAKE_BIN_MS)


def _spread(arrival_ms: list[float], randomness: Random) -> list[float]:
    """Uniform times inside each bin, in the file's order."""
    spread_ms: list[float] = []
    row = 0
    while row < len(arrival_ms):
        number = round(arrival_ms[row] / MOONCAKE_BIN_MS)
        end = row + 1
        while end < len(arrival_ms) and round(arrival_ms[end] / MOONCAKE_BIN_MS) == number:
            end += 1
        spread_ms.extend(sorted((number + randomness.random()) * MOONCAKE_BIN_MS for _ in range(end - row)))
        row = end
    return spread_ms


def _workload(table: _Table, arrival_ms: list[float], prompt: str, output: str, source: str) -> Workload:
    return Workload(arrival_ms, table.integers(prompt), table.integers(output), [], [], 0, source)


def _since_first(arrival_ms: list[float]) -> list[float]:
    """The first arrival at 0. One before it is the unsorted trace's own error, which names both times."""
    for row in range(1, len(arrival_ms)):
        if arrival_ms[row] < arrival_ms[row - 1]:
            gap_ms = arrival_ms[row - 1] - arrival_ms[row]
            raise WorkloadError(
                f"arrival: row {row + 1} arrives {gap_ms:g} ms before row {row}; sort the trace by arrival"
            )
    return [value - arrival_ms[0] for value in arrival_ms]


def _read(path: Path) -> _Table:
    """The table of a CSV or JSONL file; what it is, its first character tells."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error}); give a CSV or JSONL file, gzipped or not") from error
    if not text.strip():
        raise WorkloadError(f"{path}: the file is empty; give one with at least one request")
    table = _json_table(path.name, text) if text.lstrip()[0] == "{" else _csv_table(path.name, text)
    if not table.rows:
        raise WorkloadError(f"{path}: the trace is empty; give at least one request under its header")
    return table


def _json_table(name: str, text: str) -> _Table:
    rows: list[dict[str, object]] = []
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise WorkloadError(f"{name}: line {number + 1} is not JSON ({error}); give one object a line") from error
        if not isinstance(row, dict):
            raise WorkloadError(f"{name}: line {number + 1} is not an object; give one object a line")
        rows.append(row)
    return _Table(name, list(rows[0]), rows)


def _csv_table(name: str, text: str) -> _Table:
    reader = csv.DictReader(text.split("\n"), skipinitialspace=True)
    rows: list[dict[str, object]] = [dict(row) for row in reader]
    return _Table(name, [column.strip() for column in reader.fieldnames or ()], rows)
