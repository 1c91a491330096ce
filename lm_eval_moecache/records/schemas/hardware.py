"""The form of a hardware profile: text, and finite figures."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, create_model

from lm_eval_moecache.records.numbers import plain_number
from lm_eval_moecache.records.schemas.base import Schema

INFINITE = ("peak_flops", "memory_bytes_per_s")
"""Compute that takes no time is an idealisation of some use; a link or a memory without end would
leave nothing to measure."""


@cache
def hardware_schema(record: type[Any]) -> type[BaseModel]:
    """Return the schema of the profile's record: its fields are the file's, named once."""
    found: dict[str, Any] = {}
    for field in fields(record):
        required = field.default is MISSING and field.default_factory is MISSING
        if field.type in ("float", float):
            kind: Any = _FIGURE_OR_INFINITE if field.name in INFINITE else _FIGURE
        elif field.type in ("float | None", float | None):
            kind = _FIGURE | None
        elif field.type in ("int", int):
            kind = int
        else:
            kind = {"str": str}.get(str(field.type), dict[str, str] | str)
        found[field.name] = (kind, ... if required else field.default)
    schema: type[BaseModel] = create_model("HardwareFile", __base__=Schema, **found)
    return schema


def _figure(value: object) -> float:
    number = plain_number(value)
    if number is None:
        raise ValueError("is not a number that is finite and in plain digits")
    return float(number)


def _figure_or_infinite(value: object) -> float:
    if isinstance(value, float) and math.isinf(value):
        return value
    return _figure(value)


_FIGURE = Annotated[float, BeforeValidator(_figure)]
_FIGURE_OR_INFINITE = Annotated[float, BeforeValidator(_figure_or_infinite)]
