"""Schemas of artifacts' metadata."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lm_eval_moecache.records.schemas import OpenSchema, Schema

Share = Annotated[float, Field(gt=0, le=1)]


class ArtifactHeader(Schema):
    """The JSON of an artifact's metadata key `moecache`."""

    format: Literal[2]
    kind: str
    model: str
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_experts: Annotated[int, Field(ge=1, le=100_000)]
    top_k: Annotated[int, Field(ge=1, le=100_000)]
    router_digest: Annotated[str, Field(pattern="^[0-9a-f]*$")]
    made_from: dict[str, Any]
    versions: dict[str, str]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MadeBuddies(OpenSchema):
    """The settings that a buddy artifact's lists were made with, besides its data."""

    alpha: Share | Annotated[list[Share], Field(min_length=1)]
    """Coverage of the lists, for all layers or for each."""
    k_max: Annotated[int, Field(ge=1, le=100_000)]
    smoothing: Annotated[float, Field(ge=0)]
