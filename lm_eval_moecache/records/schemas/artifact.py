"""The form of an artifact's metadata, and of what each kind of artifact was made from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lm_eval_moecache.records.numbers import plain_number
from lm_eval_moecache.records.schemas.base import OpenSchema, Schema, count, number


def _alpha(value: object) -> object:
    listed = value if isinstance(value, list) else [value]
    numbers = [None if isinstance(n, str) else plain_number(n) for n in listed]
    if not listed or not all(n is not None and 0 < n <= 1 for n in numbers):
        raise ValueError("must be above 0 and at most 1: one number, or one for each MoE layer")
    return value


class ArtifactHeader(Schema):
    """The JSON of the metadata key `moecache`."""

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
    """What the lists of a buddy artifact rest on, beside its data."""

    alpha: Annotated[Any, BeforeValidator(_alpha)]
    k_max: Annotated[int, count(1, 100_000)]
    smoothing: Annotated[float, number(least=0)]
