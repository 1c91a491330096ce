"""The form of a use profile: `moecache profile use`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_eval_moecache.records.schemas.base import Schema, count

Counts = Annotated[list[Annotated[int, count()]], Field(min_length=1)]


class UseFile(Schema):
    """The whole file."""

    format: Literal[1]
    kind: Literal["use"]
    model: str
    num_layers: Annotated[int, count(1, 10_000)]
    num_experts: Annotated[int, count(1, 100_000)]
    made_from: str = ""
    counts: Annotated[list[Counts], Field(min_length=1)]
