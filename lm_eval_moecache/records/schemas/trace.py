"""The form of the JSON in a trace file's metadata."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_eval_moecache.records.draft import MOST_DRAFTED
from lm_eval_moecache.records.schemas.base import Schema, count, number

# Of one expert, or of what is read on the way to a layer's experts.
MOST_BYTES = 2**53
MOST_LAYERS, MOST_EXPERTS = 10_000, 32_767
"""Experts are int16 in the file."""
Sizes = list[Annotated[int, count(1, MOST_BYTES)]]


class ModelSizes(Schema):
    """The sizes of a model; a file of another maker may leave out what has a default."""

    model: str
    num_layers: Annotated[int, count(1, MOST_LAYERS)]
    num_experts: Annotated[int, count(1, MOST_EXPERTS)]
    top_k: Annotated[int, count(1, MOST_EXPERTS)]
    expert_bytes: Sizes
    dense_bytes: list[Annotated[int, count(0, MOST_BYTES)]]
    precision: str
    element_bytes: Annotated[float, number(above=0, most=16)] | None = None
    levels: Annotated[list[Sizes], Field(min_length=1)] | None = None
    compute_bytes: Sizes = Field(default_factory=list)
    hidden_size: Annotated[int, count(0, 2**20)] = 0


class DraftSizes(ModelSizes):
    """The draft of a drafted run, and how much is kept of what it foretells."""

    level: Annotated[int, count(0, 99)]
    nbytes: Annotated[int, count(0, MOST_BYTES)]
    tokens: Annotated[int, count(1, MOST_DRAFTED)]
    targets: list[Annotated[int, count(-1, MOST_LAYERS)]]
    ranked: Annotated[int, count(0, MOST_EXPERTS)]


class TraceHeader(ModelSizes):
    """The metadata key `moecache`."""

    version: Literal[1]
    seed: Annotated[int, count(0, 2**63 - 1)]
    predicted_depth: Annotated[int, count(0, MOST_LAYERS)] = 0
    predicted_by: str = ""
    proposals: list[str] = Field(default_factory=list)
    draft: DraftSizes | None = None
    digest: str | None = None
