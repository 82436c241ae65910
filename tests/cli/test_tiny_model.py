"""The tiny model: the same files on each run, and answers that no lost KV could imitate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from headrace_cli import tiny_model
from headrace_cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "new" / "tiny"
    assert main(["tiny-model", str(directory)]) == 0
    return directory


def test_the_same_files_come_out_of_each_run(model: Path, tmp_path: Path) -> None:
    tiny_model.make_tiny_model(tmp_path)
    first = {file.name: file.read_bytes() for file in model.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= first.keys()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == first


def test_a_character_is_a_token_and_comes_back(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "a mill's wheel\n turns: ünder 水"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_it_has_a_chat_template(model: Path) -> None:
    templates = [(model / "chat_template.jinja"), (model / "tokenizer_config.json")]
    assert any(file.exists() and "assistant: " in file.read_text() for file in templates)


def test_its_size_and_context(model: Path) -> None:
    with safe_open(model / "model.safetensors", "np") as weights:
        names = list(weights.keys())
        parameters = sum(weights.get_tensor(name).size for name in names)
    assert 2.4e6 < parameters < 2.6e6
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] == 4096


def test_only_printable_bytes_can_be_answered(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with safe_open(model / "model.safetensors", "np") as weights:
        rows = weights.get_tensor("lm_head.weight")
    possible = {tokenizer.id_to_token(token) for token in range(len(rows)) if rows[token].any()}
    assert possible == {chr(code) for code in range(0x21, 0x7F)}
