"""The form of every file that is read, checked by pydantic: what users write, and what
this package writes.

A schema says which fields there are and of what kind; what a value means (whether an algorithm has
that parameter, a device that bandwidth) is for the module that uses it. Imported where a file is
read, as pydantic takes a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lm_eval_moecache.records.numbers import MOST_COUNT, read_count, read_number, shown, unknown

# pydantic's names of what does not fit, in words.
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
}


class Schema(BaseModel):
    """A mapping whose fields are all known; values are taken as they are, never converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _names_known(cls, data: object) -> object:
        for key in data if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                said = str(unknown("field", key, cls.model_fields))
                raise PydanticCustomError("unknown_field", "{said}", {"said": said})
        return data


class OpenSchema(BaseModel):
    """A mapping of somebody else, of which these fields are ours to read."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


Kind = TypeVar("Kind", bound=BaseModel)


def number(**bounds: float) -> BeforeValidator:
    """For `Annotated[float, ...]`: a finite number within these bounds of `read_number`."""
    return _bounded(read_number, (int, float), bounds)


def count(least: int = 0, most: int = MOST_COUNT) -> BeforeValidator:
    """For `Annotated[int, ...]`: a whole number within these bounds."""
    return _bounded(read_count, int, {"least": least, "most": most})


def _bounded(read: Callable[..., Any], kinds: Any, bounds: dict[str, Any]) -> BeforeValidator:
    def check(value: object) -> Any:
        try:
            # A file has numbers of its own: text that looks like one was quoted by mistake.
            return read("", value if isinstance(value, kinds) else None, **bounds)
        except ValueError as error:
            # The key is told by whoever knows the path.
            raise ValueError("must be" + str(error).rpartition(" must be")[2].rstrip(".")) from None

    return BeforeValidator(check)


def check(schema: type[Kind], data: object, what: str) -> Kind:
    """Return the data as the schema's record.

    Raises ValueError that begins with `what` (the file), and names the field, its value, what is
    allowed, and the nearest match of an unknown field.
    """
    if not isinstance(data, Mapping):
        fields = ", ".join(schema.model_fields)
        raise ValueError(f"{what} must hold a mapping with {fields}; it holds {shown(data)}.")
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise told(error, what) from None


def check_as(kind: Any, data: object, what: str) -> Any:
    """As `check`, for a type that is no schema of its own (a list of schemas)."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise told(error, what) from None


def check_json(kind: Any, text: bytes, what: str) -> Any:
    """As `check_as`, for JSON that is too long to be parsed by anything slower."""
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise told(error, what) from None


def told(error: ValidationError, what: str) -> ValueError:
    """Build our error from the first of pydantic's."""
    errors = error.errors(include_url=False)
    missing = [e for e in errors if e["type"] == "missing"]
    # A field that is misspelt is also one that lacks: its name says more.
    first = next((e for e in errors if e["type"] == "unknown_field"), errors[0])
    path = _path_of(first["loc"])
    if first["type"] == "missing":
        return ValueError(f"{what} lacks {', '.join(repr(_path_of(e['loc'])) for e in missing)}.")
    if first["type"] == "unknown_field":
        return ValueError(f"{what}: {path}{': ' if path else ''}{first['msg']}")
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return unknown(f"{what}: {path}", first["input"], allowed)
    rule = _WORDS.get(first["type"], str(first["msg"]).lower())
    if first["type"] == "value_error":
        rule = str(first["ctx"]["error"])
    return ValueError(f"{what}: {path}={shown(first['input'])} {rule}.")


def _path_of(path: tuple[int | str, ...]) -> str:
    """Return the steps of pydantic's path that are fields, and do not name a kind of a union."""
    kinds = ("str", "int", "float", "bool", "none")
    return ".".join(
        str(part)
        for part in path
        if isinstance(part, int) or not (part in kinds or "[" in part or part[:1].isupper())
    )
