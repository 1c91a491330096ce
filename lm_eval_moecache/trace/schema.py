"""Schemas of a trace's metadata and of use counts, imported only where one is read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_eval_moecache.records.geometry import MOST_DRAFTED
from lm_eval_moecache.records.schemas import Count, Schema

# Largest size of one expert, or of a layer's dense weights.
MOST_BYTES = 2**53
MOST_LAYERS, MOST_EXPERTS = 10_000, 32_767
"""Experts are int16 in a trace."""
Sizes = list[Annotated[int, Field(ge=1, le=MOST_BYTES)]]


class ModelSizes(Schema):
    """The sizes of a model; files of other makers may omit fields with defaults."""

    model: str
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    num_experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    top_k: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    expert_bytes: Sizes
    dense_bytes: list[Annotated[int, Field(ge=0, le=MOST_BYTES)]]
    precision: str
    element_bytes: Annotated[float, Field(gt=0, le=16)] | None = None
    levels: Annotated[list[Sizes], Field(min_length=1)] | None = None
    compute_bytes: Sizes = Field(default_factory=list)
    hidden_size: Annotated[int, Field(ge=0, le=2**20)] = 0


class DraftSizes(ModelSizes):
    """The draft of a drafted run, and how many ranks of its predictions are kept."""

    level: Annotated[int, Field(ge=0, le=99)]
    nbytes: Annotated[int, Field(ge=0, le=MOST_BYTES)]
    tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTED)]
    targets: list[Annotated[int, Field(ge=-1, le=MOST_LAYERS)]]
    ranked: Annotated[int, Field(ge=0, le=MOST_EXPERTS)]


class TraceHeader(ModelSizes):
    """The metadata key `moecache` of a trace."""

    version: Literal[1]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    predicted_depth: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    predicted_by: str = ""
    proposals: list[str] = Field(default_factory=list)
    draft: DraftSizes | None = None
    digest: str | None = None
    """Of the metadata, in traces written before 29 November 2026; not read."""


Counts = Annotated[list[Count], Field(min_length=1)]


class UseFile(Schema):
    """A use profile, as `moecache profile use` writes it."""

    format: Literal[1]
    kind: Literal["use"]
    model: str
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_experts: Annotated[int, Field(ge=1, le=100_000)]
    made_from: str = ""
    counts: Annotated[list[Counts], Field(min_length=1)]
