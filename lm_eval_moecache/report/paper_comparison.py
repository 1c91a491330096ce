"""A paper's numbers beside ours, from the runs that remake its table or figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.records.schemas.inputs import PaperValue, ReproducedValue
from lm_eval_moecache.report.columns import Column, Value, figure_column, selected
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.tables import Table

SEE = "see the table and the picture"


def comparison_table(title: str, said: Sequence[PaperValue], runs: Sequence[Run]) -> Table:
    """Return what the paper says, what we have, and where that is read from."""
    heads = {"what": "What", "paper": "Paper", "ours": "Ours", "from": "Ours is"}
    rows = []
    for each in said:
        paper, ours, source = each.paper, SEE, ""
        if isinstance(paper, list):
            paper = f"{paper[0]:g} to {paper[1]:g}"
        if each.ours is not None:
            value, source = our_value(each.ours, runs), _source(each.ours)
            ours = "none" if value is None else f"{value:.4g}"
        texts = (each.what, paper if isinstance(paper, str) else f"{paper:g}", ours, source)
        rows.append(tuple(map(Value, texts)))
    return Table(title, tuple(Column(*pair) for pair in heads.items()), tuple(rows))


def _source(ours: ReproducedValue) -> str:
    place, other = (
        ", ".join(f"{key}={value}" for key, value in (where or {}).items())
        for where in (ours.where, ours.versus)
    )
    told = f"{ours.metric} at {place}" if place else ours.metric
    return told if ours.form == "value" else f"{ours.form} of {told} against {other}"


def our_value(ours: ReproducedValue, runs: Sequence[Run]) -> float | None:
    """Return our figure, or None where a run is missing or has none.

    Raises ValueError where the settings pick several runs: the recipe is at fault.
    """
    own = _value(ours.metric, ours.where, runs)
    if ours.form == "value":
        return own
    other = _value(ours.metric, {**ours.where, **(ours.versus or {})}, runs)
    if own is None or other is None:
        return None
    if ours.form == "difference":
        return own - other
    if not other:
        return None
    return own / other if ours.form == "ratio" else 1 - own / other


def _value(metric: str, where: Mapping[str, Any], runs: Sequence[Run]) -> float | None:
    found = [run for run in runs if selected(run, where)]
    if len(found) > 1:
        names = ", ".join(run.run_id for run in found[:3])
        raise ValueError(f"said: where={dict(where)!r} picks {len(found)} runs: {names} ...")
    column = figure_column(found, metric)
    return column.read(found[0]).number if found and column is not None else None
