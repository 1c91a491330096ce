"""The form of a composition: an algorithm on each axis, by name or with its parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lm_eval_moecache.records.schemas.base import Schema


def _algorithm(value: object) -> object:
    named = isinstance(value, dict) and ("name" in value) != ("class_path" in value)
    if not isinstance(value, str) and not named:
        raise ValueError(
            "must be an algorithm's name, or a mapping with `name` (or `class_path`) and its "
            "parameters"
        )
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        path = value.get("name", value.get("class_path"))
        if wrong or not isinstance(path, str):
            raise ValueError("must have text for its name and for the names of its parameters")
    return value


Algorithm = Annotated[Any, BeforeValidator(_algorithm)]


class PolicyFile(Schema):
    """`policies/NAME.yaml`."""

    name: str | None = None
    source: str = ""
    phases: str = "all"
    cache: Literal["model", "layer"] = "model"
    """`layer`: one cache for each layer, among which any capacity is divided equally."""
    placement: Literal["none", "use"] = "none"
    """`use`: starts from the most used experts, by a profile (`warm=`)."""
    routing: Algorithm
    prefetch: Algorithm
    eviction: Algorithm
    miss: Algorithm
