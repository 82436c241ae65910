"""Writes and reads reports as JSON, and states the schema of that JSON.

This module and the classes it reads stay interpreted: a compiled class keeps too little of its field types.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace_core.sim.report import SCHEMA_VERSION, Report


class ReportError(ValueError):
    """A text that is no report of this version."""


def to_json(report: Report) -> str:
    """The report as JSON, its fields named as in `report`."""
    return _adapter().dump_json(report, indent=2).decode()


def from_json(text: str) -> Report:
    """The report that `to_json` wrote.

    Raises:
        ReportError: it is no JSON, has another schema version, or a field is missing or of the wrong type.
    """
    try:
        report = _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the text"
        raise ReportError(f"{field}: {first['msg']}; give a report that `headrace simulate` wrote") from error
    if report.schema_version != SCHEMA_VERSION:
        raise ReportError(
            f"schema_version: {report.schema_version} cannot be read, only {SCHEMA_VERSION}; write the report anew"
        )
    return report


def json_schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    return _adapter().json_schema(mode="serialization")


@cache
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)
