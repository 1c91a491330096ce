"""Schemas of files that this package writes and reads: artifacts, use profiles, traces."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lm_eval_moecache.records.schemas import OpenSchema, Schema, count, number

# Largest size of one expert, or of a layer's dense weights.
MOST_BYTES = 2**53
MOST_LAYERS, MOST_EXPERTS = 10_000, 32_767
"""Experts are int16 in a trace."""

Sizes = list[Annotated[int, count(1, MOST_BYTES)]]
Counts = Annotated[list[Annotated[int, count()]], Field(min_length=1)]
Share = Annotated[float, number(above=0, most=1)]


class ArtifactHeader(Schema):
    """The JSON of an artifact's metadata key `moecache`."""

    format: Literal[2]
    kind: str
    model: str
    num_layers: Annotated[int, count(1, 10_000)]
    num_experts: Annotated[int, count(1, 100_000)]
    top_k: Annotated[int, count(1, 100_000)]
    router_digest: Annotated[str, Field(pattern="^[0-9a-f]*$")]
    made_from: dict[str, Any]
    versions: dict[str, str]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MadeBuddies(OpenSchema):
    """The settings that a buddy artifact's lists were made with, besides its data."""

    alpha: Share | Annotated[list[Share], Field(min_length=1)]
    """Coverage of the lists, for all layers or for each."""
    k_max: Annotated[int, count(1, 100_000)]
    smoothing: Annotated[float, number(least=0)]
