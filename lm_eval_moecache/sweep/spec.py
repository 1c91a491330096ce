"""Reads `sweep.yaml` (the fields of `SweepFile`) and expands it into cells."""

from __future__ import annotations

import glob
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lm_eval_moecache.harness.evaluation_options import Fewshot, Limit, Options
from lm_eval_moecache.harness.plugin import MODELS
from lm_eval_moecache.records.files import check_include_path, is_file, read_yaml
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.records.schemas import Schema, check
from lm_eval_moecache.report.tables.schema import Figure, Names, View, is_mapping
from lm_eval_moecache.sweep.pool import MOST_JOBS

Executor = Literal["local", "ray", "submitit"]
EXECUTOR_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ray": ("address", "namespace", "num_cpus", "num_gpus", "object_store_memory", "log_to_driver"),
    "submitit": (
        *("cluster", "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node"),
        *("tasks_per_node", "stderr_to_stdout", "slurm_account", "slurm_array_parallelism"),
        *("slurm_constraint", "slurm_exclude", "slurm_exclusive", "slurm_gres", "slurm_job_name"),
        *("slurm_gpus_per_node", "slurm_gpus_per_task", "slurm_mem", "slurm_mem_per_cpu"),
        *("slurm_mem_per_gpu", "slurm_nodelist", "slurm_nodes", "slurm_num_gpus"),
        *("slurm_partition", "slurm_qos", "slurm_time"),
    ),
}
"""Executor -> the options of `executor_options`: none that names a command or a file to run."""
MOST_CELLS = 20_000
REPLAY = "replay"
"""`Cell.model` of cells that replay a trace from before the sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run: a model with its arguments, on some tasks. Plain data, to be sent to workers."""

    model: str
    model_args: Mapping[str, Any]
    tasks: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    include_path: tuple[str, ...] = ()
    label: str | None = None

    @property
    def pretrained(self) -> str:
        """The model that is run, or the trace file that is replayed."""
        if self.model == REPLAY:
            return str(self.model_args["trace"])
        return str(self.model_args.get("pretrained", "tiny"))

    @property
    def arguments(self) -> dict[str, Any]:
        """The model arguments without `pretrained` (or `trace`)."""
        subject = "trace" if self.model == REPLAY else "pretrained"
        return {key: value for key, value in self.model_args.items() if key != subject}


def _mappings(value: object) -> object:
    mappings = [value] if isinstance(value, dict) else value
    if not isinstance(mappings, list) or not mappings:
        raise ValueError("must be a mapping or a list of mappings")
    if not all(map(is_mapping, mappings)):
        raise ValueError("must be a mapping of names to values, or a list of such")
    return mappings


class RunSettings(Options):
    """Those settings of a cell that are no arguments of its model."""

    model: str
    label: Annotated[str | None, BeforeValidator(str)] = None
    tasks: Names


Mappings = Annotated[list[dict[str, Any]], BeforeValidator(_mappings)]


class SweepFile(Schema):
    """The fields of `sweep.yaml`, and the cells they expand to.

    Each mapping of `runs` (by default one empty run) is crossed with every combination of each
    `grid`, on top of `base`. Keys are model arguments, or `model`, `label`, `tasks` and the
    evaluation's `Options`. `bounds` (belady, oracle) adds a replay that knows the future next to
    each lossless cell.

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
    bounds: list[Literal["belady", "oracle"]] = Field(default_factory=list)
    executor: Executor = "local"
    executor_options: dict[str, Any] = Field(default_factory=dict)
    jobs: Annotated[int, Field(ge=1, le=MOST_JOBS)] = 1
    views: list[View] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Return the cells in the order written; the last key of a grid varies fastest."""
        combinations = [*self._combinations()]
        if not self.traces:
            return [self._cell(settings) for settings in combinations]
        pairs = itertools.product(self.trace_files, combinations)
        return [self._replay_cell(file, settings) for file, settings in pairs]

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            for grid in map(_axes, self.grid):
                for values in itertools.product(*grid.values()):
                    yield {**self.base, **run, **dict(zip(grid, values, strict=True))}

    @property
    def trace_files(self) -> list[str]:
        """The files that match the names and patterns of `traces`, in order, without duplicates."""
        files = [file for name in self.traces for file in sorted(glob.glob(name)) or [name]]
        return list(dict.fromkeys(files))

    def _cell(self, settings: dict[str, Any]) -> Cell:
        values = {key: getattr(self, key) for key in ("model", "tasks", "limit", "num_fewshot")}
        own = {k: v for k, v in (values | settings).items() if k in RunSettings.model_fields}
        # Checked here: lm-eval would raise only after loading the model.
        run = check(RunSettings, {k: v for k, v in own.items() if v is not None}, "a cell")
        if run.model not in MODELS:
            raise unknown_name_error("model", run.model, MODELS)
        if not run.tasks:
            raise ValueError(f"sweep {self.name!r} names no tasks: a list of lm-eval task names.")
        return Cell(
            model=run.model,
            model_args={k: v for k, v in settings.items() if k not in RunSettings.model_fields},
            tasks=tuple(run.tasks),
            options=run.model_dump(exclude_unset=True, include={*Options.model_fields}),
            include_path=tuple(self.include_path),
            label=run.label,
        )

    def _replay_cell(self, trace: str, settings: dict[str, Any]) -> Cell:
        for key in RunSettings.model_fields:
            if key in settings and key != "label":
                raise ValueError(
                    f"sweep {self.name!r}: {key}={settings[key]!r} has no meaning in a sweep over "
                    "`traces`, where no model runs. Allowed: label, and what `moecache replay` "
                    "takes."
                )
        args, label = {"trace": trace, **settings}, settings.get("label")
        args.pop("label", None)
        return Cell(model=REPLAY, model_args=args, label=None if label is None else str(label))


def sweep_fields(path: Path) -> SweepFile:
    """Read a sweep file, named after its folder by default. Raises ValueError naming the field."""
    what = f"sweep file {path.name}"
    data = read_yaml(path, what)
    if not isinstance(data, dict):
        raise ValueError(f"{what} must hold a mapping with `tasks` and `grid`.")
    settings = {key: value for key, value in data.items() if value is not None}
    return check(SweepFile, {"name": path.resolve().parent.name, **settings}, what)


def read_sweep(path: Path) -> SweepFile:
    """Read and check a sweep file. Raises FileNotFoundError, or ValueError naming the field."""
    if not is_file(path):
        raise FileNotFoundError(f"sweep file {str(path)!r}: there is no such file.")
    sweep = sweep_fields(path)
    for key in ("model", "tasks", "limit", "num_fewshot", "include_path"):
        value = getattr(sweep, key)
        if sweep.traces and key in sweep.model_fields_set and value:
            raise ValueError(
                f"sweep {sweep.name!r}: {key}={value!r} together with `traces`, where no "
                "model runs. Allowed: one of `tasks` and `traces`."
            )
    check_include_path(sweep.include_path)
    allowed = EXECUTOR_OPTIONS[sweep.executor] or ("none with executor=local",)
    for name in sweep.executor_options:
        if name not in allowed:
            raise unknown_name_error("executor_options", name, allowed)
    for key in (key for grid in sweep.grid for key in grid):
        if values := [run[key] for run in sweep.runs if key in run]:
            raise ValueError(
                f"sweep {sweep.name!r}: {key} is in `runs` ({key}={shown(values[0])}) and in "
                "`grid`, which would replace it. Allowed: a key in one of the two."
            )
    grids = map(_axes, sweep.grid)
    per_run = sum(math.prod(len(values) for values in grid.values()) for grid in grids)
    total = per_run * len(sweep.runs) * max(1, len(sweep.trace_files))
    if total > MOST_CELLS:  # before expanding them
        raise ValueError(
            f"sweep {sweep.name!r}: `grid` and `runs` make {total} cells, more than the "
            f"{MOST_CELLS} of one sweep. Make several sweeps of it."
        )
    return sweep


def _axes(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return key -> list of values; a single value is a list of one.

    Raises ValueError for an empty list, which would silently drop every cell.
    """
    axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
    for key, values in axes.items():
        if not values:
            raise ValueError(f"grid: {key}=[] leaves no combination. Allowed: one value or more.")
    return axes
