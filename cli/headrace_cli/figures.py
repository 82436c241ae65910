"""What all pictures share: a file's name says what it shows, its ending the format; equal input gives equal files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from headrace_cli.errors import CliError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = ("svg", "png", "pdf")
_DATES: Final = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
"""Metadata that would make two equal pictures differ."""

Kind = TypeVar("Kind", bound=StrEnum)


def named_by(path: Path, kinds: type[Kind]) -> Kind:
    """The picture that a file's name asks for.

    Raises:
        CliError: the name ends in no picture, or the ending is no format.
    """
    if path.suffix[1:].lower() not in FORMATS:
        raise CliError(f"--picture: {path.name} ends in none of {', '.join('.' + one for one in FORMATS)}; rename it")
    for kind in kinds:
        if path.stem.lower().endswith(kind):
            return kind
    first = next(iter(kinds))
    raise CliError(f"--picture: {path.name} names none of {', '.join(kinds)}; call it {first}{path.suffix} or the like")


def panels(rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with so many pairs of axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second to import

    figure = Figure(figsize=(4.5 * columns + 1, 2.4 * rows + 1), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    return figure, axes


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a figure. Raises CliError when the file cannot be written."""
    import matplotlib as mpl  # noqa: PLC0415

    figure.suptitle(title, fontsize=7, wrap=True)
    try:
        with mpl.rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none"}):
            figure.savefig(path, metadata=_DATES[path.suffix[1:].lower()], dpi=150)
    except OSError as error:
        raise CliError(f"--picture: {path} cannot be written ({error.strerror or error})") from error
