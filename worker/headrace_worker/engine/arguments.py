"""Turns the engine arguments of a spec into the command line that vLLM's own parser reads."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

TRUE, FALSE = ("true", ""), "false"


def command_line(parser: argparse.ArgumentParser, arguments: Iterable[tuple[str, str]]) -> list[str]:
    """Writes `(name, value)` pairs as arguments.

    A switch is on with the value `true` or none, and off with `false`. An argument that takes several values gets the
    words of its value, split as a shell does. Names that the parser does not know are left for it to refuse.

    Raises:
        ValueError: a switch has another value.
    """
    known = {option: action for action in parser._actions for option in action.option_strings}
    words: list[str] = []
    for name, value in arguments:
        option = "--" + name.lstrip("-").replace("_", "-")
        action = known.get(option)
        if action is None or not _is_switch(action):
            takes_several = action is not None and action.nargs in ("+", "*")
            words += [option, *shlex.split(value)] if takes_several else [f"{option}={value}"]
        elif value in TRUE:
            words.append(option)
        elif value == FALSE:
            off = "--no-" + option.removeprefix("--")
            words += [off] if off in known else []
        else:
            raise ValueError(f"engine argument {name} is a switch: its value is true or false, not {value!r}")
    return words


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
