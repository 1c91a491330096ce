"""Schemas of all files that are read, written by users or by this package, checked by pydantic.

A schema fixes the fields and their types; whether a value makes sense (an algorithm has that
parameter, a device that bandwidth) is checked by the module that uses it. Imported only where a
file is read, because importing pydantic takes a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lm_eval_moecache.records.numbers import MOST_COUNT, shown, unknown_name_error

Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
# pydantic's error types, in words.
_WORDS = {
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "none_required": "must be left out",
    "greater_than": "must be above {gt:.10g}",
    "greater_than_equal": "must be {ge:.10g} or more",
    "less_than": "must be below {lt:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
    "finite_number": "must be a finite number",
}


class Schema(BaseModel):
    """A mapping with known fields only; values are checked, never converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _names_known(cls, data: object) -> object:
        for key in data if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                message = str(unknown_name_error("field", key, cls.model_fields))
                raise PydanticCustomError("unknown_field", "{said}", {"said": message})
        return data


class OpenSchema(BaseModel):
    """A mapping of foreign origin, of which only these fields are read."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


Kind = TypeVar("Kind", bound=BaseModel)


def check(schema: type[Kind], data: object, what: str) -> Kind:
    """Return the data as an instance of the schema.

    Raises ValueError that begins with `what` (the file) and names the field, its value, what is
    allowed, and for an unknown field the nearest match.
    """
    if not isinstance(data, Mapping):
        fields = ", ".join(schema.model_fields)
        raise ValueError(f"{what} must hold a mapping with {fields}; it holds {shown(data)}.")
    checked: Kind = check_as(schema, data, what)
    return checked


def check_as(kind: Any, data: object, what: str) -> Any:
    """As `check`, for any type (a list of schemas), or of bytes: JSON too long to parse first."""
    adapter = TypeAdapter(kind)
    try:
        if isinstance(data, bytes):
            return adapter.validate_json(data, strict=True)
        return adapter.validate_python(data)
    except ValidationError as error:
        raise _schema_error(error, what) from None


def _schema_error(error: ValidationError, what: str) -> ValueError:
    """Return our error for the most informative of pydantic's."""
    errors = error.errors(include_url=False)
    missing = [e for e in errors if e["type"] == "missing"]
    # A misspelt field is also a missing one; its name says more.
    first = next((e for e in errors if e["type"] == "unknown_field"), errors[0])
    path = _path_of(first["loc"])
    if first["type"] == "missing":
        return ValueError(f"{what} lacks {', '.join(repr(_path_of(e['loc'])) for e in missing)}.")
    if first["type"] == "unknown_field":
        return ValueError(f"{what}: {path}{': ' if path else ''}{first['msg']}")
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return unknown_name_error(f"{what}: {path}", first["input"], allowed)
    rule = _WORDS.get(first["type"], str(first["msg"]).lower()).format(**first.get("ctx", {}))
    if first["type"] == "value_error":
        rule = str(first["ctx"]["error"])
    return ValueError(f"{what}: {path}={shown(first['input'])} {rule}.")


def _path_of(path: tuple[int | str, ...]) -> str:
    """Return pydantic's path with its fields and indices only, without the names of union types."""
    kinds = ("str", "int", "float", "bool", "none")
    return ".".join(
        str(part)
        for part in path
        if isinstance(part, int) or not (part in kinds or "[" in part or part[:1].isupper())
    )
