"""The JSON form of a report."""

from __future__ import annotations

from typing import Final

from headrace_core.sim.json_form import JsonForm
from headrace_core.sim.report import SCHEMA_VERSION, Report


class ReportError(ValueError):
    """A text that is no report of this version."""


REPORTS: Final = JsonForm(Report, SCHEMA_VERSION, "headrace simulate", ReportError)
to_json = REPORTS.write
from_json = REPORTS.read
json_schema = REPORTS.schema
