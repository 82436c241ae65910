"""Trace and length files: each published form, gzipped or not, and what a bad one is told."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from headrace_core.sim.traces import read_lengths, read_trace
from headrace_core.sim.workload import WorkloadError

DATA = Path(__file__).parents[2] / "data"


def test_an_azure_trace_counts_from_its_first_request() -> None:
    trace = read_trace(DATA / "azure_conv_300.csv", random.Random(0))
    assert len(trace) == 300
    assert (trace.prompt_tokens[:3], trace.output_tokens[:3]) == ([374, 396, 879], [44, 109, 55])
    # 18:15:46.680590, 18:15:50.995169 and 18:15:51.222467
    assert trace.arrival_ms[:3] == pytest.approx([0, 4314.579, 4541.877], abs=0.01)
    assert "azure_conv_300.csv" in trace.source


def test_a_gzipped_file_is_read_as_it_is() -> None:
    assert len(read_trace(DATA / "azure_code_300.csv.gz", random.Random(0))) == 300


def test_mooncake_bins_are_spread_by_seed_and_said_so() -> None:
    path = DATA / "mooncake_conversation_300.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    trace = read_trace(path, random.Random(5))
    assert "spread inside their bins of 3 s by seed" in trace.source
    assert [tuple(row["hash_ids"]) for row in rows] == trace.prefix
    assert [row["input_length"] for row in rows] == trace.prompt_tokens
    assert trace.prefix_block_tokens == 512
    start_ms = trace.arrival_ms[-1] - trace.arrival_ms[0]
    assert start_ms == pytest.approx(rows[-1]["timestamp"] - rows[0]["timestamp"], abs=3000)
    # The shift to the first arrival is one number; with it each request lies in its own bin.
    low = max(round(row["timestamp"] / 3000) * 3000 - ms for row, ms in zip(rows, trace.arrival_ms, strict=True))
    high = min(3000 * (1 + round(row["timestamp"] / 3000)) - ms for row, ms in zip(rows, trace.arrival_ms, strict=True))
    assert low <= high
    assert len(set(trace.arrival_ms)) == 300
    assert read_trace(path, random.Random(5)).digest() == trace.digest()
    assert read_trace(path, random.Random(6)).digest() != trace.digest()


def test_the_bin_of_a_time_that_is_a_millisecond_early(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    stamps = [0, 2999, 3000, 6001]
    path.write_text("".join(f'{{"timestamp": {at}, "input_length": 5, "output_length": 2}}\n' for at in stamps))
    for seed in range(20):
        arrival_ms = read_trace(path, random.Random(seed)).arrival_ms
        assert arrival_ms == sorted(arrival_ms)
        assert 3000 < arrival_ms[3] - arrival_ms[0] < 9000
        assert arrival_ms[2] - arrival_ms[1] < 3000


def test_mooncake_times_without_bins_stay() -> None:
    trace = read_trace(DATA / "mooncake_synthetic_100.jsonl.gz", random.Random(5))
    assert trace.arrival_ms[:4] == [0, 0, 40, 277]
    assert "spread" not in trace.source


def test_a_trace_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("\ufeffarrival_s, prompt, output, slo_class\n1.5,10,3,0\n1.75,20,4,1\n", encoding="utf-8")
    trace = read_trace(path, random.Random(0))
    assert (trace.arrival_ms, trace.prompt_tokens, trace.output_tokens, trace.slo_class) == (
        [0, 250],
        [10, 20],
        [3, 4],
        [0, 1],
    )


HEAD = "arrival_s,prompt,output\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (HEAD, "the trace is empty; give at least one request under its header"),
        (HEAD + "1,5,5\n0.5,5,5\n", "row 2 arrives 500 ms before row 1; sort the trace by arrival"),
        (HEAD + "0,5,x\n", "output of row 1 is 'x'; give a whole number"),
        (HEAD + "0,5\n", "output of row 1 is None; give a whole number"),
        (HEAD + "then,5,5\n", "arrival_s of row 1 is 'then'; give a number"),
        (HEAD + "0,5,5\n1,0,5\n", "prompt_tokens: request 1 has 0"),
        (HEAD + "0,5,5\nnan,5,5\n", "request 1 arrives at nan"),
        ("when,prompt,output\n1,5,5\n", "no trace has the columns when, prompt, output; give arrival_s, prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "TIMESTAMP of row 1 is 'noon'; give a time such as"),
        ('{"timestamp": 0}\n', "no trace has the columns timestamp"),
        ('{"timestamp": 0,\n', "line 1 is not JSON"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2}\n[1]\n', "line 2 is not an object"),
        (
            '{"timestamp": 7, "input_length": 5, "output_length": 2, "hash_ids": "none"}\n',
            "hash_ids of row 1 is 'none'; give a list of whole numbers",
        ),
    ],
)
def test_a_bad_trace_is_told_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_trace(path, random.Random(0))


@pytest.mark.parametrize("content", [b"\x1f\x8bnot gzip", b"\xff\xfe\x00", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(path, random.Random(0))


@pytest.mark.parametrize(
    ("name", "count", "pair"),
    [
        ("sharegpt_lengths_500.csv.gz", 500, (74, 918)),
        ("azure_conv_300.csv", 300, (374, 44)),
        ("mooncake_conversation_300.jsonl.gz", 300, (6758, 500)),
    ],
)
def test_lengths_come_from_tables_and_traces(name: str, count: int, pair: tuple[int, int]) -> None:
    table = read_lengths(DATA / name)
    assert len(table) == count
    assert (table.prompt_tokens[0], table.output_tokens[0]) == pair


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,output\n5,0\n", "row 1 has 5 prompt and 0 output tokens"),
        ("a,b\n5,1\n", "no lengths among the columns a, b; give prompt, output"),
        ('{"prompt_tokens": 5.5, "output_tokens": 1}\n', "prompt_tokens of row 1 is 5.5; give a whole number"),
    ],
)
def test_a_bad_length_table_is_told_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_lengths(path)


def test_a_line_separator_inside_json_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "a\u2028b", "prompt_tokens": 4, "output_tokens": 9}\n', encoding="utf-8")
    assert read_lengths(path).output_tokens == [9]
