"""Draws the `figures` of a sweep file: any column against any other, one line or cloud a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import MEGABYTE, Column, Value, setting
from lm_eval_moecache.report.figure import STYLE, end_at_one, look, new_figure, plain, pyplot, save
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.tables import ACCURACY, Reader, reader, sort_key
from lm_eval_moecache.report.views import selected

_FIELDS = ("title", "name", "panels", "group", "where", "line")
Point = tuple[float, float, float, float]
"""x, half of its interval, y, half of its interval."""
Z_95 = 1.96
_PANEL = ("x", "y", "title", "where")


def write_figures(
    runs: Sequence[Run], figures: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write every figure as `<folder>/<name>.svg` and `.png`; return the files.

    A figure has `name`, `panels` (each with `x` and `y`, names of columns, and perhaps a `title`
    and a `where` of its own), `group` (the setting that gives a run its colour), and perhaps
    `title`, `where`, and `line: true`, which joins a group's points in order of x.
    """
    written: list[Path] = []
    for figure in figures:
        for key in figure:
            if key not in _FIELDS:
                raise unknown("figures: field", key, _FIELDS)
        if not isinstance(figure.get("name"), str) or not figure.get("panels"):
            raise ValueError(f"figures: {dict(figure)!r} needs a `name` and `panels`.")
        drawn = _draw(runs, figure)
        for suffix in ("svg", "png"):
            written.append(folder / f"{figure['name']}.{suffix}")
            save(drawn[suffix], written[-1])
    return written


def _draw(runs: Sequence[Run], figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picture twice: writing closes it."""
    found: dict[str, Any] = {}
    for suffix in ("svg", "png"):
        panels = figure["panels"]
        picture, axes = new_figure(columns=len(panels))
        with pyplot().rc_context(STYLE):
            for place, panel in zip(axes, panels, strict=True):
                _panel(place, runs, figure, panel)
            handles, labels = axes[0].get_legend_handles_labels()
            if labels:
                bars = any(c.has_xerr or c.has_yerr for place in axes for c in place.containers)
                title = "bars: 95% intervals" if bars else None
                picture.legend(handles, labels, loc="outside lower center", ncols=4, title=title)
            # One line of a picture this wide holds about so many letters; more would be cut off.
            picture.suptitle("\n".join(wrap(plain(figure.get("title", "")), 55 * len(panels))))
        found[suffix] = picture
    return found


def _panel(
    axes: Any, runs: Sequence[Run], figure: Mapping[str, Any], panel: Mapping[str, Any]
) -> None:
    for key in panel:
        if key not in _PANEL:
            raise unknown("figures: panel", key, _PANEL)
    x, y = (reader(runs, str(panel[key])) for key in ("x", "y"))
    where = {**figure.get("where", {}), **panel.get("where", {})}
    names = figure.get("group", "policy")
    groups: dict[str, list[Point]] = {}
    chosen = [run for run in runs if selected(run, where)]
    for run in chosen:
        across, up = _scaled(x, run), _scaled(y, run)
        if across is not None and up is not None:
            groups.setdefault(_name(run, names), []).append((*across, *up))
    if not groups:
        raise ValueError(f"figures: {figure['name']!r}: no run has where={where!r} and figures.")
    for index, (name, points) in enumerate(sorted(groups.items())):
        ordered = sorted(points)
        across, wide, up, high = zip(*ordered, strict=True)
        axes.errorbar(
            across,
            up,
            xerr=wide if any(wide) else None,
            yerr=high if any(high) else None,
            elinewidth=0.8,
            linestyle="-" if figure.get("line") else "none",
            label=plain(name),
            **look(index),
        )
    heights = [(b, h) for points in groups.values() for _, _, b, h in points]
    values = [end for b, h in heights for end in (max(b - h, min(b, 0.0)), b)]
    if y.column.name == ACCURACY or y.column.name in {t for run in runs for t in run.results}:
        end_at_one(axes, values)
    axes.set_xlabel(_label(x.column, chosen))
    axes.set_ylabel(_label(y.column, chosen))
    axes.set_title(plain(panel.get("title", "")))


def _scaled(axis: Reader, run: Run) -> tuple[float, float] | None:
    """Return a figure and half of its 95% interval, 0 where no error was kept."""
    value, scale = axis.read(run), _scale(axis.column)
    number = _number(value)
    return None if number is None else (number / scale, Z_95 * (value.stderr or 0.0) / scale)


def _name(run: Run, names: Any) -> str:
    listed = [names] if isinstance(names, str) else names
    values = (setting(run, name).raw for name in listed)
    return " ".join(str(value) for value in values if value is not None)


def _scale(column: Column) -> float:
    """Bytes are drawn in MB, as the words of their metrics say."""
    return MEGABYTE if "[MB]" in column.words else 1.0


def _number(value: Value) -> float | None:
    """A figure, or the number that a setting like `8/layer` or `5%` begins with."""
    if value.raw is None:
        return None
    kind, number, _ = sort_key(value)
    return number if kind < 2 else None


def _label(column: Column, runs: Sequence[Run]) -> str:
    """Words and unit; a capacity's unit is told by how it was given."""
    better = {True: "\n(more is better)", False: "\n(less is better)", None: ""}
    text = column.words or column.heading.removesuffix(" (lower is better)")
    if column.name == "capacity":
        given = {str(setting(run, "capacity").raw) for run in runs}
        for ending, unit in (("%", "% of all expert bytes"), ("/layer", "experts a layer")):
            if all(each.endswith(ending) for each in given):
                text = f"capacity [{unit}]"
    return text + better[column.higher_is_better]
