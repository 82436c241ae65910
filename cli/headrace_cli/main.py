"""The command line `headrace` (and `kubectl headrace`): each command is a module that adds itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace_cli import flip, flips, plan, simulate, status, tiny_model
from headrace_cli.errors import CliError

COMMANDS = (
    flip.add_command,
    flips.add_command,
    plan.add_command,
    simulate.add_command,
    status.add_command,
    tiny_model.add_command,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (see errors)."""
    parser = argparse.ArgumentParser(prog="headrace", description="Works with Headrace clusters and their workers.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except CliError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # the shell's code for an interrupt
    return code
