"""Reads `sweep.yaml` and expands it into cells. The form of the file is in `SweepFile`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache.harness.plugin import MODELS
from lm_eval_moecache.records.errors import unknown

EXECUTORS = ("local", "ray", "submitit")
# What a cell gives to lm-eval's `simple_evaluate`; every other key of a cell is a model argument.
OPTIONS = ("limit", "num_fewshot", "gen_kwargs", "apply_chat_template", "system_instruction")
_RUN_KEYS = ("model", "label", "tasks", *OPTIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run: a model with its arguments, on some tasks. Plain data, so that it can be sent."""

    model: str
    model_args: Mapping[str, Any]
    tasks: tuple[str, ...]
    options: Mapping[str, Any]
    include_path: tuple[str, ...]
    label: str | None = None

    @property
    def pretrained(self) -> str:
        return str(self.model_args.get("pretrained", "tiny"))

    @property
    def arguments(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_args.items() if key != "pretrained"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFile:
    """The fields of `sweep.yaml`.

    Each mapping of `runs` (one empty run where there is none) is crossed with every combination
    of each `grid`, over `base`. Keys are model arguments, or `model`, `label`, `tasks` and the
    evaluation's `OPTIONS`. A cell that has all items of an `exclude` entry is left out.
    """

    name: str
    title: str = ""
    model: str = "moecache"
    tasks: tuple[str, ...] = ()
    limit: float | None = None
    num_fewshot: int | None = None
    include_path: tuple[str, ...] = ()
    base: Mapping[str, Any]
    grid: tuple[Mapping[str, Any], ...] = ({},)
    runs: tuple[Mapping[str, Any], ...] = ({},)
    exclude: tuple[Mapping[str, Any], ...] = ()
    executor: str = "local"
    executor_options: Mapping[str, Any]
    jobs: int = 1
    views: tuple[Mapping[str, Any], ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()

    def cells(self) -> list[Cell]:
        """Expand to cells, in the order written, the last key of a grid varying fastest."""
        found = [self._cell(given) for given in self._combinations() if not self._excluded(given)]
        if not found:
            raise ValueError(f"sweep {self.name!r} has no runs: `grid`, `runs` or `exclude`.")
        return found

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            for grid in self.grid:
                for values in itertools.product(*grid.values()):
                    yield {**self.base, **run, **dict(zip(grid, values, strict=True))}

    def _excluded(self, given: Mapping[str, Any]) -> bool:
        return any(all(given.get(k) == v for k, v in entry.items()) for entry in self.exclude)

    def _cell(self, given: dict[str, Any]) -> Cell:
        whole = {"limit": self.limit, "num_fewshot": self.num_fewshot, **given}
        model = str(given.get("model", self.model))
        if model not in MODELS:
            raise unknown("model", model, MODELS)
        tasks = _names("tasks", given.get("tasks", self.tasks))
        if not tasks:
            raise ValueError(f"sweep {self.name!r} names no tasks: a list of lm-eval task names.")
        label = given.get("label")
        return Cell(
            model=model,
            model_args={k: v for k, v in given.items() if k not in _RUN_KEYS},
            tasks=tasks,
            options={k: whole[k] for k in OPTIONS if whole.get(k) is not None},
            include_path=self.include_path,
            label=None if label is None else str(label),
        )


def read_sweep(path: Path) -> SweepFile:
    """Read and check a sweep file. Raises ValueError naming the field, FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"sweep file {str(path)!r}: there is no such file.")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"sweep file {path.name} is not readable YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"sweep file {path.name} must hold a mapping with `tasks` and `grid`.")
    known = tuple(SweepFile.__dataclass_fields__)
    for key in data:
        if key not in known:
            raise unknown(f"sweep file {path.name}: field", key, known)
    fields = {key: value for key, value in data.items() if value is not None}
    fields.setdefault("name", path.resolve().parent.name)
    for key in ("name", "title", "model"):
        fields[key] = str(fields.get(key, SweepFile.__dataclass_fields__[key].default))
    for key in ("base", "executor_options"):
        fields[key] = _mapping(key, fields.get(key, {}))
    for key in ("runs", "exclude", "views", "figures"):
        if key in fields:
            fields[key] = _mappings(key, fields[key])
    if "grid" in fields:
        fields["grid"] = tuple(_axes(grid) for grid in _mappings("grid", fields["grid"]))
    for key in ("tasks", "include_path"):
        fields[key] = _names(key, fields.get(key, ()))
    _check_values(fields)
    return SweepFile(**fields)


def _check_values(fields: Mapping[str, Any]) -> None:
    executor = fields.get("executor", "local")
    if executor not in EXECUTORS:
        raise unknown("executor", executor, EXECUTORS)
    jobs = fields.get("jobs", 1)
    if not isinstance(jobs, int) or jobs < 1:
        raise ValueError(f"jobs={jobs!r} must be a whole number above 0.")


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key}={value!r} must be a name or a list of names.")
    return tuple(names)


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key}={value!r} must be a mapping of names to values.")
    return value


def _mappings(key: str, value: Any) -> tuple[dict[str, Any], ...]:
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{key}={value!r} must be a mapping or a list of mappings.")
    return tuple(_mapping(key, item) for item in listed)


def _axes(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A single value counts as a list of one; an empty list would silently drop every cell."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
    for key, values in axes.items():
        if not values:
            raise ValueError(f"grid: {key}=[] leaves no combination. Allowed: one value or more.")
    return axes
