"""The form of what a folder says of its own report: `views`, `figures` and `table.yaml`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas.base import Schema, number


def _names(value: object) -> object:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise ValueError("must be a name or a list of names")
    return listed


def _settings(value: object) -> object:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of settings to a value or a list of values")
    for wanted in value.values():
        listed = wanted if isinstance(wanted, list) else [wanted]
        if not listed or any(isinstance(each, (dict, list)) for each in listed):
            raise ValueError(f"has {shown(wanted)}, which is no value or list of values")
    return value


Names = Annotated[list[str], BeforeValidator(_names)]
Settings = Annotated[dict[str, Any], BeforeValidator(_settings)]


class Pick(Schema):
    """Of several runs in one place the best within a budget."""

    best: str
    score: str
    loss: Annotated[float, number(least=0)]
    relative_to: Settings


class View(Schema):
    """One entry of `views`."""

    title: str = ""
    where: Settings = Field(default_factory=dict)
    rows: Names | None = None
    columns: str | None = None
    values: Names | None = None
    sort: Names | None = None
    relative_to: Settings | None = None
    pick: Pick | None = None


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
    """`table.yaml`: the leaderboard over what lies below a folder."""

    title: str = ""
    where: Settings = Field(default_factory=dict)
    distinct: bool = False
    """Show of several runs with one setting the first."""
    columns: Names | None = None
    sort: Names | None = None
    views: list[View] = Field(default_factory=list)
