"""Writes and reads a versioned tree of frozen dataclasses as JSON, and states its schema.

What it reads stays interpreted: a compiled class keeps too little of its field types.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

Document = TypeVar("Document")


class JsonForm(Generic[Document]):
    """The JSON of one class that has a field `schema_version`."""

    def __init__(self, kind: type[Document], version: int, made_by: str, error: type[ValueError]) -> None:
        self._kind = kind
        self._version = version
        self._made_by = made_by
        """The command that writes it, for the remedy in an error."""
        self._error = error

    def write(self, document: Document) -> str:
        """The document as JSON, its fields named as in the class."""
        return self._adapter.dump_json(document, indent=2).decode()

    def read(self, text: str) -> Document:
        """The document that `write` wrote.

        Raises:
            ValueError: it is no JSON, has another schema version, or a field is missing or of the wrong type; of the
                class that this form was made with.
        """
        try:
            document = self._adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the text"
            raise self._error(f"{field}: {first['msg']}; give what `{self._made_by}` wrote") from error
        version = getattr(document, "schema_version", None)
        if version != self._version:
            raise self._error(f"schema_version: {version} cannot be read, only {self._version}; make it anew")
        return document

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        return self._adapter.json_schema(mode="serialization")

    @cached_property
    def _adapter(self) -> TypeAdapter[Document]:
        return TypeAdapter(self._kind)
