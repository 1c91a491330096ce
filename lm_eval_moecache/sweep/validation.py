"""Checks every cell before the first run starts: settings, capacities and task names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.harness.errors import as_arguments_error
from lm_eval_moecache.harness.evaluation_options import check_generation
from lm_eval_moecache.harness.plugin import SPECULATIVE
from lm_eval_moecache.harness.preflight import Bare, check_arguments
from lm_eval_moecache.model.checkpoint import skeleton
from lm_eval_moecache.report.columns import (
    ACCURACY,
    PARETO,
    SETTINGS,
    is_setting,
    metric_column,
    unknown_column,
)
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import KEYS
from lm_eval_moecache.report.tables import expanded, split_order
from lm_eval_moecache.sweep.evaluation import check_task_names
from lm_eval_moecache.sweep.identity import ResolvedCell, plan
from lm_eval_moecache.sweep.replaying import check_trace_cell
from lm_eval_moecache.sweep.spec import REPLAY, Cell, SweepFile


def check_cells(cells: Sequence[Cell]) -> list[ResolvedCell]:
    """Return the cells with their identities, each configuration once.

    Raises one ValueError that lists every cell that cannot run, with its reason.
    """
    planned: dict[str, ResolvedCell] = {}
    problems: dict[str, list[str]] = {}
    built: dict[str, Any] = {}

    def bare(pretrained: Any, theirs: Mapping[str, Any]) -> Any:
        """Build each model without weights once: that takes longer than all other checks."""
        key = json.dumps([pretrained, theirs], sort_keys=True, default=repr)
        if key not in built:
            built[key] = skeleton(pretrained, theirs)
        return built[key]

    for cell in cells:
        try:
            found = check_cell(cell, bare)
        except (ValueError, OSError) as error:
            shown = ",".join(f"{key}={value}" for key, value in cell.model_args.items())
            problems.setdefault(str(error), []).append(shown or "(defaults)")
            continue
        planned.setdefault(found.configuration_hash, found)
    if problems:
        lines = [f"{error}\n    in: {'; '.join(where)}" for error, where in problems.items()]
        raise ValueError(
            f"{sum(map(len, problems.values()))} of {len(cells)} runs cannot start.\n  "
            + "\n  ".join(lines)
        )
    return list(planned.values())


def check_report(sweep: SweepFile, cells: Sequence[Cell]) -> None:
    """Check what the sweep's tables and figures name, so that no run is made for a misspelt one.

    Raises ValueError naming view or figure and the column or setting.
    """
    given = {key for cell in cells for key in (*cell.model_args, *cell.options)}
    tasks = tuple(dict.fromkeys(task for cell in cells for task in cell.tasks))

    def check(place: str, names: Sequence[str], *, setting: bool) -> None:
        for name in names:
            if is_setting(name, given) or (not setting and _is_figure(name, tasks, sweep)):
                continue
            figures = () if setting else (ACCURACY, PARETO, *METRICS, *tasks)
            allowed = [*SETTINGS, *sorted(given), *KEYS, *figures]
            raise ValueError(f"{place}: {unknown_column(name, list(dict.fromkeys(allowed)))}")

    for view in sweep.views:
        place = f"views: {view.title!r}"
        across = [] if view.columns is None else [view.columns]
        check(f"{place}: rows or columns", [*(view.rows or ()), *across], setting=True)
        check(f"{place}: where", [*view.where, *(view.relative_to or ())], setting=True)
        sort = [split_order(name)[0] for name in view.sort or ()]
        check(f"{place}: values or sort", [*expanded(view.values or ()), *sort], setting=False)
        if view.pick is not None:
            check(f"{place}: pick", [view.pick.best, view.pick.score], setting=False)
            check(f"{place}: pick: relative_to", list(view.pick.relative_to), setting=True)
    for figure in sweep.figures:
        place = f"figures: {figure.name!r}"
        check(f"{place}: group or where", [*(figure.group or ()), *figure.where], setting=True)
        for panel in figure.panels:
            check(f"{place}: x or y", [panel.x, panel.y], setting=False)
            check(f"{place}: where", list(panel.where), setting=True)


def _is_figure(name: str, tasks: Sequence[str], sweep: SweepFile) -> bool:
    """Whether a column is a metric, or the score of a task (a group's tasks are lm-eval's)."""
    if name in (ACCURACY, PARETO) or metric_column(name) is not None:
        return True
    task = name.partition(":")[0]
    if task in tasks or sweep.traces:
        return task in tasks
    try:
        check_task_names([task], tuple(sweep.include_path))
    except ValueError:
        return False
    return True


def check_cell(cell: Cell, bare: Bare = skeleton) -> ResolvedCell:
    """Return the cell with its identity, or raise ValueError or OSError saying what is wrong."""
    if cell.model == REPLAY:
        return check_trace_cell(cell)
    check_task_names(cell.tasks, cell.include_path)
    speculative = cell.model == SPECULATIVE
    generation = cell.options.get("gen_kwargs")
    if isinstance(generation, Mapping):
        check_generation(generation, speculative)
    with as_arguments_error(cell.pretrained):
        found = check_arguments(cell.pretrained, cell.arguments, bare, speculative=speculative)
    return plan(cell, *found)
