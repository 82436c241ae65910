"""What the parts of the custom resources are built from: their base, common types, conditions, metadata."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from headrace_core.api.schema import items_by

MAX_NAME_LENGTH: Final = 40
"""Of a cluster or a pool: what the operator makes of it, with a suffix and a hash, is a label of 63 characters."""
NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS label that starts with a letter, as the name of a Service must."""

LabelName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME_LENGTH)]
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Text = Annotated[str, StringConstraints(max_length=1024)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Sequence = Annotated[int, Field(ge=0, le=2**53)]
Generation = Annotated[int, Field(ge=-1, le=2**53)]


class Model(BaseModel):
    """Base of all parts: immutable, camelCase in YAML, and a field that is not declared is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    def manifest(self) -> dict[str, Any]:
        """The part as it stands in a manifest: camelCase, JSON types, nothing that is unset (None)."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ConditionStatus(StrEnum):
    """Status of a condition. Unknown is a status of its own, never False."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Model):
    """One aspect of an object's state, in the shape of metav1.Condition."""

    type: Annotated[str, StringConstraints(max_length=316)]
    """Name of the aspect."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)]
    """Why, as a word for programs."""
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    """Why, for people."""
    last_transition_time: AwareDatetime
    """When the status last changed."""
    observed_generation: Sequence | None = None
    """Generation of the object that the condition is about."""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16), items_by("type")]


class Metadata(BaseModel):
    """The part of an object's metadata that Headrace reads."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
