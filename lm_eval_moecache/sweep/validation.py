"""Checks every cell before the first run starts: settings, capacities and task names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.harness.caller import check_generation
from lm_eval_moecache.harness.plugin import MODELS
from lm_eval_moecache.harness.preflight import Bare
from lm_eval_moecache.harness.refusal import refusing
from lm_eval_moecache.model.checkpoint import skeleton
from lm_eval_moecache.sweep.evaluation import check_task_names
from lm_eval_moecache.sweep.identity import Planned, plan
from lm_eval_moecache.sweep.on_traces import check_trace_cell
from lm_eval_moecache.sweep.spec import REPLAY, Cell


def check_cells(cells: Sequence[Cell]) -> list[Planned]:
    """Return the cells with their identities, each configuration once.

    Raises one ValueError that lists every cell that cannot run, with its reason.
    """
    planned: dict[str, Planned] = {}
    problems: dict[str, list[str]] = {}
    bare = _Skeletons()
    for cell in cells:
        try:
            found = check_cell(cell, bare)
        except (ValueError, OSError) as error:
            problems.setdefault(str(error), []).append(_shown(cell))
            continue
        planned.setdefault(found.configuration_hash, found)
    if problems:
        lines = [f"{error}\n    in: {'; '.join(where)}" for error, where in problems.items()]
        raise ValueError(
            f"{sum(map(len, problems.values()))} of {len(cells)} runs cannot start.\n  "
            + "\n  ".join(lines)
        )
    return list(planned.values())


class _Skeletons:
    """Builds each model without weights once: that takes longer than all other checks of a cell."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __call__(self, pretrained: Any, theirs: Mapping[str, Any]) -> Any:
        key = json.dumps([pretrained, theirs], sort_keys=True, default=repr)
        if key not in self._built:
            self._built[key] = skeleton(pretrained, theirs)
        return self._built[key]


def check_cell(cell: Cell, bare: Bare = skeleton) -> Planned:
    """Return the cell with its identity, or raise ValueError or OSError saying what is wrong."""
    if cell.model == REPLAY:
        return check_trace_cell(cell)
    check_task_names(cell.tasks, cell.include_path)
    module, model_class = model_parts(cell.model)
    generation = cell.options.get("gen_kwargs")
    if isinstance(generation, Mapping):
        check_generation(generation, model_class.is_speculative)
    with refusing(cell.pretrained):
        config, host_arguments = module.check_arguments(cell.pretrained, cell.arguments, bare=bare)
    return plan(cell, config, host_arguments)


def model_parts(model: str) -> tuple[Any, Any]:
    """Return the module of a harness model, which checks its arguments, and the model's class."""
    module_name, _, class_name = MODELS[model].partition(":")
    module = importlib.import_module(module_name)
    return module, getattr(module, class_name)


def _shown(cell: Cell) -> str:
    return ",".join(f"{key}={value}" for key, value in cell.model_args.items()) or "(defaults)"
