"""The form of a claims file: what papers say, and which runs answer it by which test."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lm_eval_moecache.records.schemas.base import Schema, number

Number = Annotated[float, number()]
Name = Annotated[str, Field(min_length=1)]


class Bounds(Schema):
    """Where a figure has to lie for the claim to hold; both ends open where not given."""

    above: Number | None = None
    below: Number | None = None

    @model_validator(mode="after")
    def _some(self) -> Bounds:
        if self.above is None and self.below is None:
            raise ValueError("must have `above`, `below` or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError("must have `above` smaller than `below`")
        return self


class Rows(Schema):
    """Paired samples in an analysis' JSON: two columns of its rows (or one and nothing)."""

    file: Name
    new: Name
    old: Name | None = None
    unit: Name


class Part(Schema):
    """One comparison. `where` picks one run of `runs`, `versus` replaces settings for the other."""

    what: Name
    runs: str | None = None
    """Folder of the runs, from the claims file's own."""
    rows: Rows | None = None
    cells: str | None = None
    """Cells of real traces (`cells.json.gz`): each trace is a sample."""
    metric: Name = "miss_rate"
    task: str | None = None
    where: dict[str, Any] = Field(default_factory=dict)
    versus: dict[str, Any] | None = None
    form: Literal["ratio", "difference", "value"] = "ratio"
    expect: Bounds
    aside: bool = False
    """Told, but no part of the verdict: another regime than the paper's, or another measure."""

    @model_validator(mode="after")
    def _one_source(self) -> Part:
        if sum(source is not None for source in (self.runs, self.rows, self.cells)) != 1:
            raise ValueError("a part must have one of `runs`, `rows` and `cells`")
        if self.rows is None and (self.form == "value") != (self.versus is None):
            raise ValueError("a part must have `versus`, unless its form is value")
        return self


class Claim(Schema):
    """One claim of a paper, with the comparisons that answer it."""

    id: Annotated[str, Field(pattern=r"^[A-Z]\d+$")]
    claim: Name
    where: Name
    """Paper and section."""
    regime: Name
    why: Name
    untestable: str | None = None
    """Why it cannot be answered here whatever the parts say."""
    parts: list[Part] = Field(default_factory=list)

    @model_validator(mode="after")
    def _answerable(self) -> Claim:
        if not self.parts and self.untestable is None:
            raise ValueError("a claim must have `parts`, or say why it is `untestable`")
        return self


class Claims(Schema):
    """The file. `alpha`: chance of a false verdict within one claim (Holm over its parts)."""

    title: Name
    about: Name
    alpha: Annotated[float, number(above=0, below=1)] = 0.05
    claims: Annotated[list[Claim], Field(min_length=1)]

    @field_validator("claims")
    @classmethod
    def _once_each(cls, claims: list[Claim]) -> list[Claim]:
        names = [claim.id for claim in claims]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"has {', '.join(twice)} twice")
        return claims
