"""The forms of what analyses, searches and replays of traces leave for tables and claims."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas.base import OpenSchema, number

Figure = Annotated[float, number()]
Plain = str | bool | int | float | None


class RowsFile(OpenSchema):
    """The JSON of `moecache analyze`: rows of one shape."""

    rows: Annotated[list[dict[str, Plain]], Field(min_length=1)]

    @field_validator("rows")
    @classmethod
    def _one_shape(cls, rows: list[dict[str, Plain]]) -> list[dict[str, Plain]]:
        for row in rows:
            if list(row) != list(rows[0]):
                raise ValueError(f"has a row with {shown(list(row))}, not {shown(list(rows[0]))}")
        return rows


class Found(OpenSchema):
    """One policy that a search has measured."""

    name: str
    policy: dict[str, Any]
    accuracy: Figure
    stderr: Figure | None
    speed: Figure
    measured_by: str
    within_budget: bool

    @field_validator("policy")
    @classmethod
    def _axes(cls, policy: dict[str, Any]) -> dict[str, Any]:
        for axis in ("routing", "prefetch", "eviction", "miss"):
            if not isinstance(policy.get(axis), dict):
                raise ValueError(f"lacks {axis!r}, a mapping with the algorithm's name")
        return policy


class Confirmation(OpenSchema):
    """What the best of a search does on documents that it has not seen."""

    documents: dict[str, int]
    points_lost: Figure
    accuracy: Figure
    reference_accuracy: Figure
    within_budget: bool
    speed: Figure
    reference_speed: Figure


class Question(OpenSchema):
    """What a search was asked."""

    metric: str


class FrontFile(OpenSchema):
    """The JSON of `moecache tune`."""

    question: Question
    verdict: str
    best: Found | None
    front: list[Found]
    shipped: list[Found]
    left_out: dict[str, str]
    confirmation: Confirmation | None = None


class TraceCell(OpenSchema):
    """One cell of `cells.json.gz`: its setting, and beside it its metrics."""

    cell: dict[str, Plain]
