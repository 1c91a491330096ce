"""Schemas of files that users write: compositions, hardware profiles, evaluation options, views of
runs, search spaces and sweeps."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, create_model

from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.numbers import plain_number, read_count, shown
from lm_eval_moecache.records.ranges import types_of
from lm_eval_moecache.records.schemas import Schema, check, count, number

MOST_JOBS = 1024
MOST_CHOICES = 1000
SIZES = ("top_k", "num_experts")
"""Sizes of the model that may stand for numbers in a search space."""
_MOST_FEWSHOT = 1000
_INFINITE = ("peak_flops", "memory_bytes_per_s")
"""Fields that may be infinite: compute that takes no time is a useful idealisation, but an infinite
link or memory would leave nothing to measure."""

Executor = Literal["local", "ray", "submitit"]
EXECUTORS: tuple[str, ...] = get_args(Executor)
Text = Annotated[str, Field(min_length=1)]


# --- compositions: `policies/NAME.yaml` ---


def _algorithm(value: object) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or ("name" in value) == ("class_path" in value):
        raise ValueError(
            "must be an algorithm's name, or a mapping with `name` (or `class_path`) and its "
            "parameters"
        )
    path = value.get("name", value.get("class_path"))
    if not all(isinstance(key, str) for key in (*value, path)):
        raise ValueError("must have text for its name and for the names of its parameters")
    return value


Algorithm = Annotated[Any, BeforeValidator(_algorithm)]


class PolicyFile(Schema):
    """A composition: one algorithm per axis, by name or with its parameters."""

    name: str | None = None
    source: str = ""
    phases: str = "all"
    cache: Literal["model", "layer"] = "model"
    """`layer`: one cache per layer, among which any capacity is divided equally."""
    placement: Literal["none", "use"] = "none"
    """`use`: starts with the most used experts, by a use profile (`warm=`)."""
    routing: Algorithm
    prefetch: Algorithm
    eviction: Algorithm
    miss: Algorithm


# --- profiles of hardware and of runtimes ---


def _figure(value: object, info: ValidationInfo) -> float:
    if value == math.inf and info.field_name in _INFINITE:
        return math.inf
    figure = plain_number(value)
    if figure is None:
        raise ValueError("is not a number that is finite and in plain digits")
    return float(figure)


Record = TypeVar("Record")


@cache
def _profile_schema(record: Any) -> type[BaseModel]:
    """Return a profile's schema, made from the fields of its record, which checks their ranges."""
    figure = Annotated[float, BeforeValidator(_figure)]
    texts = Annotated[list[str], AfterValidator(tuple)]
    kinds = {float: figure, float | None: figure | None, tuple[str, ...]: texts}
    schema_fields: dict[str, Any] = {}
    for field in fields(record):
        kind = types_of(record)[field.name][0]
        kind = Text if field.name == "name" else kinds.get(kind, kind)
        schema_fields[field.name] = (kind, ... if field.default is MISSING else field.default)
    return create_model(f"{record.__name__}File", __base__=Schema, **schema_fields)


def read_profile(record: type[Record], path: Path, key: str) -> Record:
    """Read a profile's YAML, which `key` names in errors. Raises ValueError naming the field."""
    what, hashable = f"{key}={str(path)!r}", cast(Any, record)
    return record(**dict(check(_profile_schema(hashable), read_yaml(path, what), what)))


# --- views of a folder's runs: `views`, `figures` and `table.yaml` ---


def _is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("must be a name or a list of names")
    return names


def _settings(value: object) -> object:
    if not _is_mapping(value):
        raise ValueError("must be a mapping of settings to a value or a list of values")
    for setting in value.values():
        choices = setting if isinstance(setting, list) else [setting]
        if not choices or any(isinstance(choice, (dict, list)) for choice in choices):
            raise ValueError(f"has {shown(setting)}, which is not a value or list of values")
    return value


Names = Annotated[list[str], BeforeValidator(_names)]
Settings = Annotated[dict[str, Any], BeforeValidator(_settings)]


class Pick(Schema):
    """Choice among runs that share a place in a view: the best within a budget."""

    best: str
    score: str
    loss: Annotated[float, number(least=0)]
    relative_to: Settings


class View(Schema):
    """One entry of `views`."""

    title: str = ""
    where: Settings = Field(default_factory=dict)
    rows: Names | None = None
    columns: str | None = None
    values: Names | None = None
    sort: Names | None = None
    relative_to: Settings | None = None
    pick: Pick | None = None


class Panel(Schema):
    """One set of axes of a figure."""

    x: str
    y: str
    title: str = ""
    where: Settings = Field(default_factory=dict)


class Figure(Schema):
    """One entry of `figures`."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w.+-]+$")]
    panels: Annotated[list[Panel], Field(min_length=1, max_length=20)]
    group: Names | None = None
    title: str = ""
    where: Settings = Field(default_factory=dict)
    line: bool = False


class Board(Schema):
    """`table.yaml`: the leaderboard of the runs below a folder."""

    title: str = ""
    where: Settings = Field(default_factory=dict)
    distinct: bool = False
    """Whether to show only the first of several runs with one setting."""
    by: Names = Field(default_factory=list)
    """Settings, such as the capacity, that split the rows into separate rankings."""
    columns: Names | None = None
    sort: Names | None = None
    views: list[View] = Field(default_factory=list)


# --- sweeps, and the evaluation options of their cells ---


def _limit(value: object) -> object:
    limit = plain_number(value)
    if isinstance(value, str) or limit is None or limit <= 0 or (limit > 1 and limit % 1):
        raise ValueError("must be a whole number of documents above 0, or a share below 1")
    return value if limit < 1 else read_count("limit", limit)


def _gen_kwargs(value: object) -> object:
    is_text = isinstance(value, str) and all("=" in item for item in value.split(","))
    if not is_text and not _is_mapping(value):
        raise ValueError("must be a mapping of generation arguments, or text like 'temperature=0'")
    return value


def _mappings(value: object) -> object:
    mappings = [value] if isinstance(value, dict) else value
    if not isinstance(mappings, list) or not mappings:
        raise ValueError("must be a mapping or a list of mappings")
    if not all(map(_is_mapping, mappings)):
        raise ValueError("must be a mapping of names to values, or a list of such")
    return mappings


Mappings = Annotated[list[dict[str, Any]], BeforeValidator(_mappings)]
Limit = Annotated[Any, BeforeValidator(_limit)]
Fewshot = Annotated[int, count(0, _MOST_FEWSHOT)]


class Options(Schema):
    """The options of a cell that go to lm-eval's `simple_evaluate`."""

    limit: Limit = None
    num_fewshot: Fewshot | None = None
    gen_kwargs: Annotated[Any, BeforeValidator(_gen_kwargs)] = None
    apply_chat_template: bool | str | None = None
    system_instruction: str | None = None


def read_jobs(value: object) -> int:
    """Return the number of jobs that `--jobs` gives."""
    return read_count("--jobs", value, least=1, most=MOST_JOBS)


def check_limit(limit: object, what: str) -> None:
    """Raise ValueError if `--limit` is given but is not a number or share of documents."""
    if limit is not None:
        check(Options, {"limit": limit}, what)


# --- search spaces: `space.yaml` ---


def _values(value: object) -> object:
    choices = value if isinstance(value, list) else []
    plain = (isinstance(n, (str, bool)) or plain_number(n) is not None for n in choices)
    if 0 < len(choices) <= MOST_CHOICES and all(plain):
        return value
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        ends, log = [value["low"], value["high"]], value.get("log", False)
        numbers = [n for n in ends if not isinstance(n, str) and plain_number(n) is not None]
        num_ends = len(numbers) + sum(end in SIZES for end in ends)
        is_range = num_ends == 2 and numbers == sorted(numbers)
        if is_range and isinstance(log, bool) and not (log and min(numbers, default=1) <= 0):
            return value
    raise ValueError(
        "must be a list of choices, or `low` and `high` (and `log: true`, above 0) as numbers or "
        f"{' or '.join(SIZES)}, low not above high"
    )


def _algorithms(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise ValueError("must map algorithms to their parameters")
    return {name: {} if parameters is None else parameters for name, parameters in value.items()}


Values = Annotated[Any, BeforeValidator(_values)]
Algorithms = Annotated[dict[str, dict[str, Values]], BeforeValidator(_algorithms)]


class SpaceFile(Schema):
    """A search space: the algorithms of each axis, and the range of each parameter."""

    routing: Algorithms
    prefetch: Algorithms
    eviction: Algorithms
    miss: Algorithms


# --- a grid or list of runs: `sweep.yaml` ---


class SweepFields(Schema):
    """The fields of `sweep.yaml`.

    Each mapping of `runs` (by default one empty run) is crossed with every combination of each
    `grid`, on top of `base`. Keys are model arguments, or `model`, `label`, `tasks` and the
    evaluation's `OPTIONS`. Cells with all items of an `exclude` entry are left out. `bounds`
    (belady, oracle) adds a replay that knows the future next to each lossless cell.

    `traces` (files, or patterns like `traces/*.parquet`) replaces `tasks`: every cell is replayed
    on each of them, without a model. `eviction: belady` is then a value like any other.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    title: str = ""
    model: str = "moecache"
    tasks: Names = Field(default_factory=list)
    traces: Names = Field(default_factory=list)
    limit: Limit = None
    num_fewshot: Fewshot | None = None
    include_path: Names = Field(default_factory=list)
    base: dict[str, Any] = Field(default_factory=dict)
    grid: Mappings = Field(default_factory=lambda: [dict[str, Any]()])
    runs: Mappings = Field(default_factory=lambda: [dict[str, Any]()])
    exclude: Mappings = Field(default_factory=list)
    bounds: list[Literal["belady", "oracle"]] = Field(default_factory=list)
    executor: Executor = "local"
    executor_options: dict[str, Any] = Field(default_factory=dict)
    jobs: Annotated[int, count(1, MOST_JOBS)] = 1
    views: list[View] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)


Sweep = TypeVar("Sweep", bound=SweepFields)


def sweep_fields(path: Path, kind: type[Sweep]) -> Sweep:
    """Read a sweep file, named after its folder by default. Raises ValueError naming the field."""
    what = f"sweep file {path.name}"
    data = read_yaml(path, what)
    if not isinstance(data, dict):
        raise ValueError(f"{what} must hold a mapping with `tasks` and `grid`.")
    settings = {key: value for key, value in data.items() if value is not None}
    return check(kind, {"name": path.resolve().parent.name, **settings}, what)
