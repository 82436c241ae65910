"""Which bearer tokens are accepted, and when the file is read anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_worker.tokens import Tokens

HEADERS = {
    "first line": (b"Bearer one", True),
    "second line": (b"Bearer two", True),
    "scheme in other letters": (b"bearer one", True),
    "neither": (b"Bearer three", False),
    "a beginning": (b"Bearer on", False),
    "empty": (b"Bearer ", False),
    "no scheme": (b"one", False),
    "another scheme": (b"Basic one", False),
    "none": (None, False),
}


@pytest.mark.parametrize(("given", "accepted"), HEADERS.values(), ids=HEADERS.keys())
def test_any_line_opens(tmp_path: Path, given: bytes | None, accepted: bool) -> None:
    file = tmp_path / "token"
    file.write_text("one\n\n  two  \n")
    assert Tokens(str(file)).accepts(given) is accepted


def test_a_new_token_counts_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old1\n")
    tokens = Tokens(str(file))
    assert tokens.accepts(b"Bearer old1")
    new = tmp_path / "new"
    new.write_text("new1\n")  # of the same length: the size alone tells nothing
    new.replace(file)
    assert tokens.accepts(b"Bearer new1")
    assert not tokens.accepts(b"Bearer old1")


def test_a_rewrite_in_place_counts(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old1\n")
    tokens = Tokens(str(file))
    assert tokens.accepts(b"Bearer old1")
    file.write_text("new1\n")
    os.utime(file, ns=(1, 1))
    assert tokens.accepts(b"Bearer new1")


def test_while_the_file_is_swapped_the_last_tokens_hold(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    tokens = Tokens(str(file))
    assert tokens.accepts(b"Bearer one")
    file.unlink()
    assert tokens.accepts(b"Bearer one")
    assert not tokens.accepts(b"Bearer two")


def test_a_file_that_never_was_opens_for_nobody(tmp_path: Path) -> None:
    assert not Tokens(str(tmp_path / "absent")).accepts(b"Bearer ")


def test_without_a_file_everybody_may() -> None:
    assert Tokens("").accepts(None)
