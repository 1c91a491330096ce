"""The form of `sweep.yaml`, and of what a cell gives to the evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lm_eval_moecache.records.numbers import plain_number, read_count
from lm_eval_moecache.records.schemas.base import Schema, check, count
from lm_eval_moecache.records.schemas.report import Figure, Names, View

MOST_FEWSHOT = 1000
_MOST_JOBS = 1024


def _limit(value: object) -> object:
    found = plain_number(value)
    if isinstance(value, str) or found is None or found <= 0 or (found > 1 and found % 1):
        raise ValueError("must be a whole number of documents above 0, or a share below 1")
    return value if found < 1 else read_count("limit", found)


def _gen_kwargs(value: object) -> object:
    is_mapping = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    is_text = isinstance(value, str) and all("=" in item for item in value.split(","))
    if not is_mapping and not is_text:
        raise ValueError("must be a mapping of generation arguments, or text like 'temperature=0'")
    return value


def _mappings(value: object) -> object:
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, (list, tuple)) or not listed:
        raise ValueError("must be a mapping or a list of mappings")
    for item in listed:
        if not isinstance(item, dict) or not all(isinstance(key, str) for key in item):
            raise ValueError("must be a mapping of names to values, or a list of such")
    return list(listed)


def read_jobs(value: object) -> int:
    """Return what `--jobs` asks for."""
    return read_count("--jobs", value, least=1, most=_MOST_JOBS)


def check_limit(limit: object, what: str) -> None:
    """Raise ValueError where `--limit` is given and no number of documents."""
    if limit is not None:
        check(Options, {"limit": limit}, what)


def _one_empty() -> list[dict[str, Any]]:
    return [{}]


Mappings = Annotated[list[dict[str, Any]], BeforeValidator(_mappings)]
Limit = Annotated[Any, BeforeValidator(_limit)]


class Options(Schema):
    """What of a cell goes to lm-eval's `simple_evaluate`."""

    limit: Limit = None
    num_fewshot: Annotated[int, count(0, MOST_FEWSHOT)] | None = None
    gen_kwargs: Annotated[Any, BeforeValidator(_gen_kwargs)] = None
    apply_chat_template: bool | str | None = None
    system_instruction: str | None = None


class SweepSchema(Schema):
    """The file; a field without a value counts as not given."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    title: str = ""
    model: str = "moecache"
    tasks: Names = Field(default_factory=list)
    traces: Names = Field(default_factory=list)
    limit: Limit = None
    num_fewshot: Annotated[int, count(0, MOST_FEWSHOT)] | None = None
    include_path: Names = Field(default_factory=list)
    base: dict[str, Any] = Field(default_factory=dict)
    grid: Mappings = Field(default_factory=_one_empty)
    runs: Mappings = Field(default_factory=_one_empty)
    exclude: Mappings = Field(default_factory=list)
    bounds: list[Literal["belady", "oracle"]] = Field(default_factory=list)
    executor: Literal["local", "ray", "submitit"] = "local"
    executor_options: dict[str, Any] = Field(default_factory=dict)
    jobs: Annotated[int, count(1, _MOST_JOBS)] = 1
    views: list[View] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
