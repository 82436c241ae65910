"""Says beside a pydantic field what the CRD needs and JSON schema lacks: CEL rules, list keys, open objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ConfigDict, GetJsonSchemaHandler
from pydantic.config import JsonDict
from pydantic_core import CoreSchema

RULES: Final = "x-kubernetes-validations"
PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule with a static message: one made by an expression goes over the API server's cost budget."""

    expression: str
    message: str
    field: str = ""
    """Path of the field that the refusal names, relative to where the rule stands, such as `.pools`."""

    def schema(self) -> JsonDict:
        """The rule as an entry of x-kubernetes-validations."""
        entry: JsonDict = {"rule": self.expression, "message": self.message}
        return {**entry, "fieldPath": self.field} if self.field else entry


def rules(*several: Rule) -> ConfigDict:
    """Rules of a model: its `model_config`."""
    return ConfigDict(json_schema_extra={RULES: [one.schema() for one in several]})


@dataclass(frozen=True, slots=True)
class Extra:
    """Annotation that adds keys to a field's schema; a list is added to the list that is there."""

    keys: dict[str, Any]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core)
        for key, value in self.keys.items():
            schema[key] = [*schema.get(key, []), *value] if isinstance(value, list) else value
        return schema


def checked(*several: Rule) -> Extra:
    """Rules of a field."""
    return Extra({RULES: [one.schema() for one in several]})


def items_by(key: str) -> Extra:
    """A list whose items are known by one of their fields: server-side apply merges it, a key twice is refused."""
    return Extra({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})


def open_object(*parts: str) -> Extra:
    """An object of the given parts, each of which may hold anything: another schema checks it later."""
    inside = {part: {"type": "object", PRESERVE: True} for part in parts}
    return Extra({"type": "object", "properties": inside, "additionalProperties": None})
