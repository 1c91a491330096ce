"""Reads `sweep.yaml` (the fields of `SweepFile`) and expands it into cells."""

from __future__ import annotations

import glob
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from lm_eval_moecache.harness.plugin import MODELS
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import is_file, read_yaml
from lm_eval_moecache.records.schemas.base import Schema, check, count
from lm_eval_moecache.records.schemas.inputs import (
    MOST_JOBS,
    Fewshot,
    Figure,
    Limit,
    Mappings,
    Names,
    Options,
    View,
)

Executor = Literal["local", "ray", "submitit"]
EXECUTORS: tuple[str, ...] = get_args(Executor)
# What a cell gives to lm-eval's `simple_evaluate`; every other key of a cell is a model argument.
OPTIONS = tuple(Options.model_fields)
_RUN_KEYS = ("model", "label", "tasks", *OPTIONS)
MOST_CELLS = 20_000
REPLAY = "replay"
"""The model of a cell that replays a trace which was there before the sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run: a model with its arguments, on some tasks. Plain data, so that it can be sent."""

    model: str
    model_args: Mapping[str, Any]
    tasks: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    include_path: tuple[str, ...] = ()
    label: str | None = None

    @property
    def pretrained(self) -> str:
        """What is run: the model, or the trace's file."""
        if self.model == REPLAY:
            return str(self.model_args["trace"])
        return str(self.model_args.get("pretrained", "tiny"))

    @property
    def arguments(self) -> dict[str, Any]:
        what = "trace" if self.model == REPLAY else "pretrained"
        return {key: value for key, value in self.model_args.items() if key != what}


class SweepFile(Schema):
    """The fields of `sweep.yaml`.

    Each mapping of `runs` (one empty run where there is none) is crossed with every combination
    of each `grid`, over `base`. Keys are model arguments, or `model`, `label`, `tasks` and the
    evaluation's `OPTIONS`. A cell that has all items of an `exclude` entry is left out. `bounds`
    (belady, oracle) adds a replay that knows the future wherever a lossless cell stands.

    `traces` (files, or patterns like `traces/*.parquet`) takes the place of `tasks`: every cell is
    replayed on each of them, and no model runs. Then `eviction: belady` is a value like any other.
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

    def cells(self) -> list[Cell]:
        """Expand to cells, in the order written, the last key of a grid varying fastest."""
        chosen = [
            given
            for given in self._combinations()
            if not any(all(given.get(k) == v for k, v in entry.items()) for entry in self.exclude)
        ]
        found = [self._replay_cell(file, given) for file in self.trace_files for given in chosen]
        if not self.traces:
            found = [self._cell(given) for given in chosen]
        if not found:
            raise ValueError(f"sweep {self.name!r} has no runs: `grid`, `runs` or `exclude`.")
        return found

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            for grid in map(_axes, self.grid):
                for values in itertools.product(*grid.values()):
                    yield {**self.base, **run, **dict(zip(grid, values, strict=True))}

    @property
    def trace_files(self) -> list[str]:
        """The files that the names and patterns of `traces` stand for, in order, each once."""
        found = [file for name in self.traces for file in sorted(glob.glob(name)) or [name]]
        return list(dict.fromkeys(found))

    def _cell(self, given: dict[str, Any]) -> Cell:
        whole = {"limit": self.limit, "num_fewshot": self.num_fewshot, **given}
        model = str(given.get("model", self.model))
        if model not in MODELS:
            raise unknown("model", model, MODELS)
        tasks = _names("tasks", given.get("tasks", self.tasks))
        if not tasks:
            raise ValueError(f"sweep {self.name!r} names no tasks: a list of lm-eval task names.")
        # Checked here: lm-eval would say so after the model has been loaded.
        options = {k: whole[k] for k in OPTIONS if whole.get(k) is not None}
        checked = check(Options, options, "evaluation options")
        return Cell(
            model=model,
            model_args={k: v for k, v in given.items() if k not in _RUN_KEYS},
            tasks=tasks,
            options=checked.model_dump(exclude_unset=True),
            include_path=tuple(self.include_path),
            label=_label(given),
        )

    def _replay_cell(self, trace: str, given: dict[str, Any]) -> Cell:
        for key in ("model", "tasks", *OPTIONS):
            if key in given:
                raise ValueError(
                    f"sweep {self.name!r}: {key}={given[key]!r} has no meaning in a sweep over "
                    "`traces`, where no model runs. Allowed: label, and what `moecache replay` "
                    "takes."
                )
        args = {"trace": trace, **{k: v for k, v in given.items() if k != "label"}}
        return Cell(model=REPLAY, model_args=args, label=_label(given))


def _label(given: Mapping[str, Any]) -> str | None:
    return None if given.get("label") is None else str(given["label"])


def read_sweep(path: Path) -> SweepFile:
    """Read and check a sweep file. Raises ValueError naming the field, FileNotFoundError."""
    if not is_file(path):
        raise FileNotFoundError(f"sweep file {str(path)!r}: there is no such file.")
    what = f"sweep file {path.name}"
    data = read_yaml(path, what)
    if not isinstance(data, dict):
        raise ValueError(f"{what} must hold a mapping with `tasks` and `grid`.")
    given = {key: value for key, value in data.items() if value is not None}
    sweep = check(SweepFile, {"name": path.resolve().parent.name, **given}, what)
    for key in ("model", "tasks", "limit", "num_fewshot", "include_path"):
        if sweep.traces and given.get(key):
            raise ValueError(
                f"sweep {sweep.name!r}: {key}={given[key]!r} beside `traces`, where no model runs. "
                "Allowed: one of `tasks` and `traces`."
            )
    grids = map(_axes, sweep.grid)
    per_run = sum(math.prod(len(values) for values in grid.values()) for grid in grids)
    total = per_run * len(sweep.runs) * max(1, len(sweep.trace_files))
    if total > MOST_CELLS:  # before they are expanded
        raise ValueError(
            f"sweep {sweep.name!r}: `grid` and `runs` make {total} cells, more than the "
            f"{MOST_CELLS} of one sweep. Make several sweeps of it."
        )
    known = {key for part in (*sweep.grid, *sweep.runs, sweep.base) for key in part}
    for key in (key for entry in sweep.exclude for key in entry):
        if key not in known:
            raise unknown("exclude: the key", key, known)
    return sweep


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key}={value!r} must be a name or a list of names.")
    return tuple(names)


def _axes(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A single value counts as a list of one; an empty list would silently drop every cell."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
    for key, values in axes.items():
        if not values:
            raise ValueError(f"grid: {key}=[] leaves no combination. Allowed: one value or more.")
    return axes
