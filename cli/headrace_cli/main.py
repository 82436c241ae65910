"""The command line `headrace` (and `kubectl headrace`): each command is a module that adds itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace_cli import tiny_model

COMMANDS = (tiny_model.add_command,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="headrace", description="Works with Headrace clusters and their workers.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(subparsers)
    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code
