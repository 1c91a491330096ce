"""The form of the JSON in a trace file's metadata."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_eval_moecache.records.schemas.base import Schema, count, number

# Of one expert, or of what is read on the way to a layer's experts.
MOST_BYTES = 2**53
MOST_LAYERS, MOST_EXPERTS = 10_000, 32_767
"""Experts are int16 in the file."""
Sizes = list[count(1, MOST_BYTES)]  # type: ignore[misc]


class TraceHeader(Schema):
    """The metadata key `moecache`; a file of another maker may leave out what has a default."""

    version: Literal[1]
    model: str
    num_layers: count(1, MOST_LAYERS)  # type: ignore[valid-type]
    num_experts: count(1, MOST_EXPERTS)  # type: ignore[valid-type]
    top_k: count(1, MOST_EXPERTS)  # type: ignore[valid-type]
    expert_bytes: Sizes
    dense_bytes: list[count(0, MOST_BYTES)]  # type: ignore[misc]
    precision: str
    seed: count(0, 2**63 - 1)  # type: ignore[valid-type]
    element_bytes: number(above=0, most=16) | None = None  # type: ignore[valid-type]
    levels: Annotated[list[Sizes], Field(min_length=1)] | None = None
    compute_bytes: Sizes = Field(default_factory=list)
    predicted_depth: count(0, MOST_LAYERS) = 0  # type: ignore[valid-type]
    predicted_by: str = ""
