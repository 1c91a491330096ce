"""Schemas of files that users write: compositions, and profiles of hardware and of runtimes."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, create_model

from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.numbers import plain_number
from lm_eval_moecache.records.ranges import split_range
from lm_eval_moecache.records.schemas import Schema, check

_INFINITE = ("peak_flops", "memory_bytes_per_s")
"""Fields that may be infinite: compute that takes no time is a useful idealisation, but an infinite
link or memory would leave nothing to measure."""

_LIMITS = {"least": "ge", "above": "gt", "most": "le", "below": "lt"}
"""Limits of a range, as pydantic calls them."""
Text = Annotated[str, Field(min_length=1)]


# --- compositions: `policies/NAME.yaml` ---


def _algorithm(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict) or ("name" in value) == ("class_path" in value):
        raise ValueError(
            "must be an algorithm's name, or a mapping with `name` (or `class_path`) and its "
            "parameters"
        )
    path = value.get("name", value.get("class_path"))
    if not all(isinstance(key, str) for key in (*value, path)):
        raise ValueError("must have text for its name and for the names of its parameters")
    return value


Algorithm = Annotated[Any, BeforeValidator(_algorithm)]


class PolicyFile(Schema):
    """A composition: one algorithm per axis, by name or with its parameters."""

    name: str | None = None
    source: str = ""
    phases: str = "all"
    cache: Literal["model", "layer"] = "model"
    """`layer`: one cache per layer, among which any capacity is divided equally."""
    placement: Literal["none", "use"] = "none"
    """`use`: starts with the most used experts, by a use profile (`warm=`)."""
    routing: Algorithm
    prefetch: Algorithm
    eviction: Algorithm
    miss: Algorithm


# --- profiles of hardware and of runtimes ---


def _figure(value: object, info: ValidationInfo) -> float:
    if value == math.inf and info.field_name in _INFINITE:
        return math.inf
    figure = plain_number(value)
    if figure is None:
        raise ValueError("is not a number that is finite and in plain digits")
    return float(figure)


Record = TypeVar("Record")


@cache
def _profile_schema(record: Any) -> type[BaseModel]:
    """Return a profile's schema, made from the fields of its record and their ranges."""
    hints = get_type_hints(record, include_extras=True)
    kinds: dict[Any, Any] = {tuple[str, ...]: Annotated[list[str], AfterValidator(tuple)]}
    schema_fields: dict[str, Any] = {}
    for field in fields(record):
        kind, allowed = split_range(hints[field.name])
        given = {} if allowed is None else allowed.limits
        limits: dict[str, Any] = {_LIMITS[name]: limit for name, limit in given.items()}
        figure = Annotated[float, Field(allow_inf_nan=True, **limits), BeforeValidator(_figure)]
        kinds |= {float: figure, float | None: figure | None, int: Annotated[int, Field(**limits)]}
        kind = Text if field.name == "name" else kinds.get(kind, kind)
        schema_fields[field.name] = (kind, ... if field.default is MISSING else field.default)
    return create_model(f"{record.__name__}File", __base__=Schema, **schema_fields)


def read_profile(record: type[Record], path: Path, key: str) -> Record:
    """Read a profile's YAML, which `key` names in errors. Raises ValueError naming the field."""
    what, hashable = f"{key}={str(path)!r}", cast(Any, record)
    return record(**dict(check(_profile_schema(hashable), read_yaml(path, what), what)))
