"""The form of a recipe: one table or figure of a paper, and what the paper says in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lm_eval_moecache.records.schemas.base import Schema

Number = int | float


class ReproducedValue(Schema):
    """How our figure beside the paper's is had: a metric of the one run that has these settings."""

    metric: Annotated[str, Field(min_length=1)]
    where: dict[str, Any] = Field(default_factory=dict)
    versus: dict[str, Any] | None = None
    """The run that `form` compares with: these settings in place of those of `where`."""
    form: Literal["value", "ratio", "reduction", "difference"] = "value"


class PaperValue(Schema):
    """One number of the paper: a value, a range from and to, or words."""

    what: Annotated[str, Field(min_length=1)]
    paper: Number | Annotated[list[Number], Field(min_length=2, max_length=2)] | str
    ours: ReproducedValue | None = None
    """None where the picture or the table has to be looked at."""


class Analysis(Schema):
    """A call of `moecache analyze`, for figures that no grid of runs makes."""

    analysis: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] = Field(default_factory=dict)


class Recipe(Schema):
    """The file. Either `sweep` (fields of a sweep file) or `analyze`."""

    paper: Annotated[str, Field(min_length=1)]
    where: Annotated[str, Field(min_length=1)]
    """Which table or figure, in which section."""
    title: Annotated[str, Field(min_length=1)]
    claims: list[str] = Field(default_factory=list)
    notes: str = ""
    like: str | None = None
    """Another recipe, PAPER/FIGURE, whose `sweep` this one changes: its fields replace those."""
    sweep: dict[str, Any] = Field(default_factory=dict)
    analyze: Analysis | None = None
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Model arguments that only the shipped model needs: a link scaled to its experts."""
    real: dict[str, Any] = Field(default_factory=dict)
    """Model arguments that stand in their place for any other model."""
    real_tasks: dict[str, str] = Field(default_factory=dict)
    """Offline task -> the benchmark that it stands for here, beyond the usual ones."""
    said: list[PaperValue] = Field(default_factory=list)
