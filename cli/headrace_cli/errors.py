"""The command line's exceptions, and the exit codes they lead to.

    CliError            1: the message is all the user gets, and says what to do
    ├── NotFoundError   1: no such object
    ├── ForbiddenError  1: the API server does not let this user
    └── WaitTimeout     3: the end was not seen in time; what was asked for goes on

2 is argparse's own: the command line itself is wrong.
"""

from __future__ import annotations


class CliError(Exception):
    """Base of all: the command cannot do what was asked."""

    exit_code = 1


class NotFoundError(CliError):
    """No such object, or its kind is not installed."""


class ForbiddenError(CliError):
    """The API server does not let this user do it."""


class WaitTimeout(CliError):
    """The end was not seen in time."""

    exit_code = 3
