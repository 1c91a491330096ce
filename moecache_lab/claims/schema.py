"""Schema of a claims file: the papers' claims, with the runs and tests that answer them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lm_eval_moecache.records.schemas import Schema
from lm_eval_moecache.report.runs.schema import Name, Number


class Bounds(Schema):
    """The interval in which a figure must lie for its claim to hold; a missing end is open."""

    above: Number | None = None
    below: Number | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Bounds:
        if not self.given:
            raise ValueError("must have `above`, `below` or both")
        if self.given != sorted(set(self.given)):
            raise ValueError("must have `above` smaller than `below`")
        return self

    @property
    def given(self) -> list[float]:
        """The ends that are not open."""
        return [end for end in (self.above, self.below) if end is not None]

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends; an open one is infinite."""
        return (
            -math.inf if self.above is None else self.above,
            math.inf if self.below is None else self.below,
        )

    def __str__(self) -> str:
        if self.above is not None and self.below is not None:
            return f"{self.above:g} to {self.below:g}"
        return f"below {self.below:g}" if self.above is None else f"above {self.above:g}"


class Rows(Schema):
    """Paired samples in an analysis's JSON: two columns of its rows, or one alone."""

    file: Name
    new: Name
    old: Name | None = None
    unit: Name
    model: Name
    """The model and version that the analysis ran on."""


class Premise(Schema):
    """What a claim supposes of a model: the mean of a column of an analysis's JSON."""

    what: Name
    file: Name
    column: Name
    least: Number
    why: Name
    """Why less leaves nothing to ask."""


class Compared(Schema):
    """What picks a run by its settings, and with `versus` the one that it is compared with."""

    where: dict[str, Any] = Field(default_factory=dict)
    versus: dict[str, Any] | None = None
    """Settings that replace those of `where`."""

    @property
    def sides(self) -> list[dict[str, Any]]:
        """The settings of the one side, and with `versus` of the other."""
        return [self.where, *([] if self.versus is None else [{**self.where, **self.versus}])]


class Part(Compared):
    """One comparison, between runs, cells or columns of rows."""

    what: Name
    runs: str | None = None
    """Folder of the runs, relative to the claims file."""
    rows: Rows | None = None
    cells: str | None = None
    """Cells of real traces (`cells.json.gz`): each trace is a sample."""
    metric: Name = "miss_rate"
    task: str | None = None
    form: Literal["ratio", "difference", "value"] = "ratio"
    expect: Bounds
    aside: bool = False
    """Reported but not part of the verdict: another regime than the paper's, or another measure."""
    size: bool = False
    """About how large an effect is, where another part asks which way it goes."""
    regime: str = ""
    """The setting it is asked in, where the claim is asked in several."""
    gate: Annotated[float, Field(gt=0)] | None = None
    """The paper's loss: a share of the answers, or a ratio of perplexities less 1. The part is not
    testable where random experts throughout lose less."""
    premise: Premise | None = None
    """The part is not testable where it does not hold."""
    whole: bool = False
    """A figure of whole runs, for metrics without one per document: reported, never tested."""
    documents: Literal["even", "odd"] | None = None
    """Every second document only: a choice made on one half is tested on the other."""

    @model_validator(mode="after")
    def _one_source(self) -> Part:
        if sum(source is not None for source in (self.runs, self.rows, self.cells)) != 1:
            raise ValueError("a part must have one of `runs`, `rows` and `cells`")
        if self.rows is None and (self.form == "value") != (self.versus is None):
            raise ValueError("a part must have `versus`, unless its form is value")
        if self.whole and (self.runs is None or not self.aside):
            raise ValueError("a part of `whole` runs must have `runs` and be `aside`")
        return self

    @property
    def is_tested(self) -> bool:
        """Whether its samples are enough for a test: documents, or rows of an analysis."""
        return self.cells is None and not self.whole

    @property
    def counts(self) -> bool:
        """Whether it is tested and part of its claim's verdict."""
        return self.is_tested and not self.aside


class Claim(Schema):
    """One claim of a paper, with the comparisons that answer it."""

    id: Annotated[str, Field(pattern=r"^[A-Z]\d+$")]
    claim: Name
    where: Name
    """Paper and section."""
    regime: Name
    why: Name
    paper: str = ""
    """The paper's figure, in words."""
    ours: str = ""
    """Ours for it: `{0}` is the figure of the first part, `{0:inverse}` 1 over it, `{0:gain}`
    and `{0:loss}` how many percent it lies above or below 1 (a difference: above or below 0)."""
    untestable: str | None = None
    """Why it cannot be answered here, whatever the parts show."""
    parts: list[Part] = Field(default_factory=list)

    @model_validator(mode="after")
    def _answerable(self) -> Claim:
        if not self.parts and self.untestable is None:
            raise ValueError("a claim must have `parts`, or say why it is `untestable`")
        return self


class Claims(Schema):
    """A claims file. `alpha`: chance of a false verdict within one claim (Holm over its parts)."""

    title: Name
    about: Name
    method: str = ""
    """How parts are tested, in words: `{alpha}`, `{parts}` (how many are tested), `{answers}` and
    `{samples}` (fewer are *few*) and `{per_word}` (tokens) stand for their numbers."""
    sensitivity: Name | None = None
    """JSON of benchmarks/sensitivity.py, relative to the claims file: what gates compare with."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    claims: Annotated[list[Claim], Field(min_length=1)]

    @field_validator("claims")
    @classmethod
    def _once_each(cls, claims: list[Claim]) -> list[Claim]:
        names = [claim.id for claim in claims]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"has {', '.join(twice)} twice")
        return claims
