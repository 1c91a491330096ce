"""The form of a search space: for each axis its algorithms, for each parameter its range."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from lm_eval_moecache.records.numbers import plain_number
from lm_eval_moecache.records.schemas.base import Schema

SIZES = ("top_k", "num_experts")
"""What of the model may stand for a number."""
MOST_CHOICES = 1000


def _values(value: object) -> object:
    if isinstance(value, list) and 0 < len(value) <= MOST_CHOICES and all(map(_is_plain, value)):
        return value
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        ends = [value["low"], value["high"]]
        numbers = [
            end for end in ends if not isinstance(end, str) and plain_number(end) is not None
        ]
        names = [end for end in ends if end in SIZES]
        log = value.get("log", False)
        fits = len(numbers) + len(names) == 2 and (len(numbers) < 2 or numbers[0] <= numbers[1])
        if fits and isinstance(log, bool) and not (log and numbers[:1] and numbers[0] <= 0):
            return value
    raise ValueError(
        "must be a list of choices, or `low` and `high` (and `log: true`, above 0) as numbers or "
        f"{' or '.join(SIZES)}, low not above high"
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, bool)) or plain_number(value) is not None


def _algorithms(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise ValueError("must map algorithms to their parameters")
    return {name: {} if given is None else given for name, given in value.items()}


Values = Annotated[Any, BeforeValidator(_values)]
Algorithms = Annotated[dict[str, dict[str, Values]], BeforeValidator(_algorithms)]


class SpaceFile(Schema):
    """`space.yaml`."""

    routing: Algorithms
    prefetch: Algorithms
    eviction: Algorithms
    miss: Algorithms
