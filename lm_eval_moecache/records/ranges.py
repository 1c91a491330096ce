"""Ranges of numbers as annotations: of algorithms' parameters, options, and profiles' fields."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import LIMITS

_COUNTS = {
    "top_k": "the router's top_k={}",
    "num_experts": "the {} experts of a layer",
    "num_layers": "the {} MoE layers",
}


class Range:
    """What a number may be, as in `rank: Annotated[int, Range(least=1, most="top_k")] = 2`.

    A limit (`least`, `above`, `most`, `below`) is a number, or the name of a count of the model.
    None and words are not compared; of a list, every entry is. `why` says what lies beyond.
    """

    def __init__(self, why: str = "", **limits: float | str) -> None:
        self.why, self.limits = why, limits

    def check(self, key: str, given: Any, geometry: Geometry | None = None) -> None:
        """Raise ValueError, naming the key, its value and the limits, for a number outside."""
        limits, texts = [], []
        for name, limit in self.limits.items():
            text, compare = LIMITS[name]
            value = getattr(geometry, limit) if isinstance(limit, str) else limit
            limits.append((compare, value))
            texts.append(text.format(_COUNTS[limit].format(value) if limit in _COUNTS else value))
        for each in given if isinstance(given, list) else [given]:
            is_number = isinstance(each, (int, float)) and not isinstance(each, bool)
            if is_number and not all(compare(each, value) for compare, value in limits):
                raise ValueError(f"{key}={given} must be {' and '.join(texts)}{self.why}.")


def split_range(annotation: Any) -> tuple[Any, Range | None]:
    """Return an annotation without its range, and the range: its own, or of a part of a union."""
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds, found = list(get_args(annotation)) if is_union else [annotation], None
    for place, kind in enumerate(kinds):
        if get_origin(kind) is Annotated and isinstance(kind.__metadata__[0], Range):
            kinds[place], found = get_args(kind)
    return (annotation, None) if found is None else (reduce(or_, kinds), found)


ZeroOrMore = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(above=0, most=1)]
ProperShare = Annotated[float, Range(above=0, below=1)]
Decay = Annotated[float, Range(least=0, most=1)]
Whole = Annotated[int, Range(least=0)]
Count = Annotated[int, Range(least=1)]
Rank = Annotated[int, Range(least=1, most="top_k")]
Experts = Annotated[int, Range(least=1, most="num_experts")]
LayersAhead = Annotated[int, Range(least=1, most="num_layers")]
