"""What users write about tables and pictures of runs: `views`, `figures` and `table.yaml`."""

from __future__ import annotations

from typing import Annotated, Any, TypeGuard

from pydantic import BeforeValidator, Field

from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas import Schema


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("must be a name or a list of names")
    return names


def _settings(value: object) -> object:
    if not is_mapping(value):
        raise ValueError("must be a mapping of settings to a value or a list of values")
    for setting in value.values():
        choices = setting if isinstance(setting, list) else [setting]
        if not choices or any(isinstance(choice, (dict, list)) for choice in choices):
            raise ValueError(f"has {shown(setting)}, which is not a value or list of values")
    return value


Names = Annotated[list[str], BeforeValidator(_names)]
Settings = Annotated[dict[str, Any], BeforeValidator(_settings)]


class View(Schema):
    """One entry of `views`."""

    title: str = ""
    where: Settings = Field(default_factory=dict)
    rows: Names | None = None
    columns: str | None = None
    values: Names | None = None
    sort: Names | None = None
    relative_to: Settings | None = None


class Panel(Schema):
    """One set of axes of a figure."""

    x: str
    y: str
    title: str = ""
    where: Settings = Field(default_factory=dict)


class Figure(Schema):
    """One entry of `figures`."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w.+-]+$")]
    panels: Annotated[list[Panel], Field(min_length=1, max_length=20)]
    group: Names | None = None
    title: str = ""
    where: Settings = Field(default_factory=dict)
    line: bool = False


class Board(Schema):
    """`table.yaml`: the leaderboard of the runs below a folder."""

    title: str = ""
    where: Settings = Field(default_factory=dict)
    distinct: bool = False
    """Whether to show only the first of several runs with one setting."""
    by: Names = Field(default_factory=list)
    """Settings, such as the capacity, that split the rows into separate rankings."""
    columns: Names | None = None
    sort: Names | None = None
    views: list[View] = Field(default_factory=list)
