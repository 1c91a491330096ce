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
    columns = (
        Column("what", "What"),
        Column("paper", "Paper"),
        Column("ours", "Ours"),
        Column("from", "Ours is"),
    )
    rows = tuple(
        (
            Value(each.what),
            Value(_text(each.paper)),
            Value(SEE if each.ours is None else _shown(our_value(each.ours, runs))),
            Value("" if each.ours is None else _told(each.ours)),
        )
        for each in said
    )
    return Table(title, columns, rows)


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


def _told(ours: ReproducedValue) -> str:
    place = ", ".join(f"{key}={value}" for key, value in ours.where.items())
    told = f"{ours.metric} at {place}" if place else ours.metric
    if ours.form == "value":
        return told
    other = ", ".join(f"{key}={value}" for key, value in (ours.versus or {}).items())
    return f"{ours.form} of {told} against {other}"


def _text(paper: float | list[float] | str) -> str:
    if isinstance(paper, list):
        return f"{paper[0]:g} to {paper[1]:g}"
    return paper if isinstance(paper, str) else f"{paper:g}"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
