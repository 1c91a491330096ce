"""Figures that are reproducible byte for byte: one style, no dates, no random ids.

Below: plots of a folder of runs, either the `figures` of its sweep file or the usual trade-offs,
which are figures as well. Settings that vary become series; nothing is averaged, and a line joins
only runs of one identity.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.numbers import listed, unknown_name_error
from lm_eval_moecache.report.metrics import MEGABYTE, Column
from lm_eval_moecache.report.runs.columns import find_column, score_column
from lm_eval_moecache.report.runs.run import (
    ACCURACY,
    RATES,
    Run,
    distinguishing,
    groups,
    varying,
)
from lm_eval_moecache.report.tables.front import pareto_front
from lm_eval_moecache.report.tables.leaderboard import sort_key
from lm_eval_moecache.report.tables.schema import Figure, Panel

# Okabe and Ito's colour-blind-safe palette, without the yellow, which is invisible on paper.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
STYLE = {
    "svg.hashsalt": "moecache",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)!r})",
}
_UNDATED: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}
_MARKERS = "osD^vP*X<>"
_LETTERS_PER_INCH = 15
_PANELS = {"figure.constrained_layout.use": True, "font.size": 9}


def pyplot() -> Any:
    """Import pyplot with the headless Agg backend. Raises ValueError where matplotlib is absent."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib. Install it with `pip install matplotlib`, or this package with "
            "its extra 'plots'."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def new_figure(rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and the flat list of its axes, row by row."""
    plt = pyplot()
    with plt.rc_context({**STYLE, **_PANELS}):
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.5 * columns + 1.5, 2.6 * rows + 1.2), squeeze=False
        )
    return figure, list(axes.flat)


def look(index: int) -> dict[str, Any]:
    """Return a series' style: 7 colours by 10 markers, so no two of 70 series look alike."""
    color, marker = COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)]
    return {"color": color, "marker": marker, "markersize": 5}


def plain(text: object) -> str:
    """Return a label that matplotlib neither typesets as a formula nor hides from the legend."""
    label = str(text).replace("$", r"\$")
    # matplotlib leaves labels that begin with an underscore out of the legend.
    return f"\u200b{label}" if label.startswith("_") else label


def legend(figure: Any, series: Mapping[str, Any], title: str | None = None) -> None:
    """Put one legend below all panels, in as many columns as the longest name allows."""
    if not series:
        return
    letters = max(map(len, series)) + 6
    columns = max(1, min(4, int(figure.get_figwidth() * _LETTERS_PER_INCH / letters)))
    options = {"loc": "outside lower center", "fontsize": 8, "title": title}
    figure.legend(series.values(), series.keys(), ncols=columns, **options)


def save_as(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as `<stem>.svg` and `.png`; return the files."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("svg", "png")]
    save(figure, *paths)
    return paths


def save(figure: Any, *paths: str | Path) -> None:
    """Write a figure as SVG, PNG or PDF, by file suffix, and close it.

    Axes have plain numbers: no powers, no factor beside the axis.
    """
    plt = pyplot()
    for axis in (axis for place in figure.axes for axis in (place.xaxis, place.yaxis)):
        ends = sorted(map(abs, axis.get_view_interval()))
        if axis.get_scale() == "log":
            # Within a decade there may be no major tick.
            axis.set_minor_formatter(_number if ends[1] < 10 * ends[0] else "")
        if axis.get_scale() == "log" or ends[1] >= 10_000:
            axis.set_major_formatter(_number)
    for target in map(Path, paths):
        image = io.BytesIO()
        with plt.rc_context(STYLE):
            kind = target.suffix.removeprefix(".")
            figure.savefig(image, format=kind, dpi=150, metadata=_UNDATED[target.suffix])
        write_whole(target, image.getvalue())
    plt.close(figure)


def _number(value: float, _: object) -> str:
    return f"{value:,.10g}"


# --- plots of runs ---

Z_95 = 1.96
MAX_SERIES, MAX_ACROSS = 20, 2
CURVES = ("right_per_hour", "tok_per_s", "ttft_ms", "miss_rate")
_CAPACITY = "capacity"
_LETTERS_A_PANEL = 55
_LOG_FROM = 2.0
"""Perplexities that differ by more than this factor are drawn on a logarithmic scale."""
_UNITS = {
    "capacity_bytes": ("capacity of the cache [MB]", MEGABYTE),
    "link_bytes_per_s": ("link [GB/s]", 1000 * MEGABYTE),
    "memory_bytes_per_s": ("device memory [GB/s]", 1000 * MEGABYTE),
    ACCURACY: ("accuracy (mean of tasks)", 1.0),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """A column as an axis: its label, and the `scale` its values are divided by."""

    column: Column
    label: str
    scale: float = 1.0
    log: bool = False

    @property
    def short(self) -> str:
        """The label without unit and direction, for a title."""
        return self.label.partition("\n")[0].partition(" [")[0].partition(" (")[0]

    def at(self, run: Run) -> tuple[float, float] | None:
        """Return a run's value and the half-width of its 95% interval (0 without an error)."""
        value = run[self.column.name]
        # A metric, or the number that a setting like `8/layer` or `5%` begins with.
        kind, number, _ = sort_key(value)
        if value.raw is None or kind == 2:
            return None
        return number / self.scale, Z_95 * (value.stderr or 0.0) / self.scale


def axis_of(runs: Sequence[Run], shown: Sequence[Run], name: str) -> Axis:
    """Return a column as an axis: bytes in MB or GB, perplexities relative to the lowest shown."""
    column = find_column(runs, name)
    label, scale = _UNITS.get(name, (column.words or column.heading, 1.0))
    label, log = label.removesuffix(" (lower is better)"), False
    label = label.replace(".", " ").replace("_", " ") if label == name else label
    numbers = [n for run in shown if (n := run[name].number)]
    if "[MB]" in column.words:
        in_gb = max(numbers, default=0) > 10_000 * MEGABYTE
        label = label.replace("[MB]", "[GB]") if in_gb else label
        scale = 1000 * MEGABYTE if in_gb else MEGABYTE
    elif name == _CAPACITY:
        # The form in which capacities were given is their unit.
        capacities = {str(run.setting(name).raw) for run in shown}
        for ending, unit in (("/layer", "experts a layer"), ("%", "% of all expert bytes")):
            if all(capacity.endswith(ending) for capacity in capacities):
                label = f"capacity [{unit}]"
    elif "perplexity" in column.words and numbers and max(numbers) > 100:
        # Per word of many tokens, absolute perplexity means little: draw it relative.
        scale, log = min(numbers), max(numbers) > _LOG_FROM * min(numbers)
        label += f"\n[of the lowest, {scale:.0f}{'; log scale' if log else ''}]"
    direction = {True: "\n(more is better)", False: "\n(less is better)", None: ""}
    return Axis(column, label + direction[column.higher_is_better], scale, log)


def write_figures(runs: Sequence[Run], figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write every figure of a sweep file as `<folder>/<name>.svg` and `.png`; return the files.

    A figure has `panels` (each with columns `x` and `y`, optionally a `title` and a `where`),
    `group` (the settings that give a run its colour), and optionally `title`, `where`, and
    `line: true`, which joins a group's points in order of x.
    """
    drawn = ((draw_figure(runs, figure), folder / figure.name) for figure in figures)
    return [path for picture, stem in drawn for path in save_as(picture, stem)]


def write_plots(
    runs: Sequence[Run], folder: Path, *, task: str | None = None, group: str | None = None
) -> list[Path]:
    """Write the trade-offs that the runs have metrics for; return the files.

    `task` draws that task's score instead of the mean accuracy; `group` is the setting that gives
    a run its colour and its curve (default: the policy). Other settings that vary split these into
    further series. Raises ValueError where there are too many curves for one plot.
    """
    if group is not None:
        _check_group(runs, group)
    if task is not None and score_column(runs, task) is None:
        names = dict.fromkeys(name for run in runs for name in run.results)
        raise ValueError(f"task={task!r} has no score. Allowed: {listed(names, task)}.")
    quality, written = task or ACCURACY, list[Path]()
    against = ("e2el_ms", "goodput", "tok_per_s", "miss_rate", "capacity_bytes")
    pairs = [(name, quality, False) for name in against]
    if len({run.setting("capacity_bytes").raw for run in runs}) > 1:
        pairs += [("capacity_bytes", name, True) for name in (quality, *CURVES)]
    for x, y, is_curve in pairs:
        complete = [run for run in runs if None not in (run[x].raw, run[y].raw)]
        if len(complete) < 2:
            continue
        stem = f"capacity_{y}" if is_curve else f"{y}_{x.replace('capacity_bytes', 'memory')}"
        figure = Figure(
            name=re.sub(r"[^\w.+-]", "_", stem),
            panels=[Panel(x=x, y=y)],
            group=_grouping(complete, group or "policy", is_curve=is_curve),
            line=is_curve,
        )
        picture = draw_figure(complete, figure, front=not is_curve)
        written += save_as(picture, folder / figure.name)
    if not written:
        raise ValueError("no plot: the runs have neither two figures to relate nor two capacities.")
    return written


def _check_group(runs: Sequence[Run], group: str) -> None:
    """Raise ValueError where the setting does not vary: every run would have one colour."""
    values = {run.setting(group).raw for run in runs}
    if values == {None}:
        arguments = {key for run in runs for key in (*run.model_args, *run.options)}
        raise unknown_name_error(
            "group", group, {*AXES, *arguments, "policy", "model", "experiment", "hardware"}
        )
    if len(values) == 1:
        raise ValueError(
            f"group={group!r} has no effect: all runs have {next(iter(values))!r}. What varies: "
            f"{', '.join(_varying(runs, []))}."
        )


def _grouping(runs: Sequence[Run], group: str, *, is_curve: bool) -> list[str]:
    """Return the settings that name a series: the group, and every other that varies.

    Points may share the group's colour where that is too many; curves are refused then.
    """
    others = _varying(runs, [group, _CAPACITY])
    if len({run.setting(group).raw for run in runs}) == 1 and others:
        group, *others = others
    names = [group, *others]
    count = len({tuple(run.setting(name).raw for name in names) for run in runs})
    if count <= MAX_SERIES:
        return names
    if is_curve:
        raise ValueError(
            f"no plot: {count} curves ({', '.join(names)} vary) are more than {MAX_SERIES}. Choose "
            "--group, or some of the runs by --where SETTING=VALUE,..., or name `figures` in the "
            "sweep's file."
        )
    return [group]


def _varying(runs: Sequence[Run], besides: Sequence[str]) -> list[str]:
    """Return the settings that distinguish the runs, without those of `besides`."""
    # Where every run has a label, the labels stand for all other settings.
    names = ["run"]
    if any(run.label is None for run in runs):
        arguments = {key for run in runs for key in (*run.model_args, *run.options)}
        others = sorted(arguments - {*AXES, "policy", "label"})
        names = ["experiment", "model", "policy", *AXES, *others]
    # `distinguishing` drops settings that follow from earlier ones, as an axis from its policy.
    names = list(dict.fromkeys([*names, *varying(runs)]))
    return distinguishing(names, lambda name: [run.setting(name).raw for run in runs], besides)


def _series_name(run: Run, names: Sequence[str]) -> str:
    """Return the name in the legend: `on demand, eviction lru, lambda 0.5`."""
    parts = []
    for name in names:
        text = str(run.setting(name).raw or "")
        if name != "run":
            text = re.sub(r" \+ (\w+)=", r", \1 ", text).replace("_", " ")
        # A bare number needs its setting's name; a label is one.
        is_bare = name != "run" and text.replace(".", "", 1).lstrip("-").isdigit()
        parts.append(f"{name.rpartition('.')[2].replace('_', ' ')} {text}" if is_bare else text)
    return ", ".join(filter(None, parts))


# --- one picture ---


def draw_figure(runs: Sequence[Run], figure: Figure, *, front: bool = False) -> Any:
    """Draw one figure, its panels in rows of two; return it. `front` rings the Pareto front."""
    across = min(len(figure.panels), MAX_ACROSS)
    picture, places = new_figure(-(-len(figure.panels) // across), across)
    panels = [_points(runs, figure, panel) for panel in figure.panels]
    # A series looks the same in all panels.
    names = sorted({name for points, *_ in panels for name in points.series})
    titles = [panel.title for panel in figure.panels]
    with pyplot().rc_context(STYLE):
        for place in places[len(panels) :]:
            place.set_visible(False)
        for place, title, (points, x, y) in zip(places, titles, panels, strict=False):
            for name, series in points.groupby("series"):
                _draw_series(place, str(name), series, names.index(name), figure.line)
            if y.column.is_score and y.column.higher_is_better:
                _fit_scores(place, points)
            if front:
                _ring_front(place, points, x, y)
            _label(place, x, y)
            if titles.count(title) > 1:
                title = f"{title}: {y.short}" if title else ""
            place.set_title(plain(title))
        # matplotlib cuts off titles wider than the figure.
        _, x, y = panels[0]
        title = figure.title or ("" if panels[1:] else f"{y.short.capitalize()} against {x.short}")
        _finish(picture, places, "\n".join(wrap(plain(title), _LETTERS_A_PANEL * across)))
    return picture


def _points(runs: Sequence[Run], figure: Figure, panel: Panel) -> tuple[Any, Axis, Axis]:
    """Return a panel's points as a frame, a line a run that has both figures, and its axes.

    Columns: `run`, `series`, and of either axis the value and the half of its 95% interval
    (`x`, `x_half`, `y`, `y_half`).
    """
    import pandas

    where = {**figure.where, **panel.where}
    chosen = [run for run in runs if run.matches(where)]
    x, y = (axis_of(runs, chosen, name) for name in (panel.x, panel.y))
    rows = [
        (run, _series_name(run, figure.group or ["policy"]), *at, *up)
        for run in chosen
        if (at := x.at(run)) is not None and (up := y.at(run)) is not None
    ]
    if not rows:
        raise ValueError(f"figures: {figure.name!r}: no run has where={where!r} and figures.")
    points = pandas.DataFrame(rows, columns=["run", "series", "x", "x_half", "y", "y_half"])
    for name, series in points.groupby("series") if figure.line else ():
        _check_line(figure.name, str(name), series, x)
    return points, x, y


def _check_line(figure: str, name: str, points: Any, x: Axis) -> None:
    """Raise ValueError where a line would join runs that differ, or two in one place."""
    across = x.column.name
    joinable = {across, *(RATES if across in ("hardware", "bandwidth") else ())}
    if varied := [key for key in varying([*points.run]) if key not in joinable]:
        raise ValueError(
            f"figures: {figure!r}: the line {name!r} would join runs that differ in "
            f"{', '.join(varied)}. Add these to `group`, or a `where`."
        )
    twins = points[points.duplicated("x", keep=False)].sort_values("x", kind="stable")
    if len(twins) and across.startswith(_CAPACITY):
        one, other = (run.run_id for run in twins.run[:2])
        raise ValueError(
            f"no plot: {name!r} has several runs at {x.short} {twins.x.iloc[0]:g}: {one}, {other}."
        )


def _draw_series(place: Any, name: str, points: Any, index: int, line: bool) -> None:
    points = points.sort_values(["x", "x_half", "y", "y_half"])
    place.errorbar(
        points.x,
        points.y,
        xerr=points.x_half if points.x_half.any() else None,
        yerr=points.y_half if points.y_half.any() else None,
        elinewidth=0.8,
        # Two points do not make a curve.
        linestyle="-" if line and len(points) > 2 else "none",
        label=plain(name),
        **look(index),
    )


def _fit_scores(place: Any, points: Any) -> None:
    """Fit a y axis to its bars, within 0 and 1 where all points are shares."""
    if not points.y.between(0, 1).all():
        return
    # A bar may pass what a share can be; its point may not.
    low = float((points.y - points.y_half).clip(0, 1).min())
    high = float((points.y + points.y_half).clip(0, 1).max())
    # So that a difference of one answer in a hundred does not fill the picture.
    pad = max(0.08 * (high - low), (0.05 - (high - low)) / 2)
    place.set_ylim(max(0.0, low - pad), min(1.0, high + pad))
    for line in place.lines:
        line.set_clip_on(False)


def _label(place: Any, x: Axis, y: Axis) -> None:
    from matplotlib.ticker import LogLocator

    place.set_xlabel(x.label)
    place.set_ylabel(y.label)
    if y.log:
        place.set_yscale("log")
        place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _ring_front(place: Any, points: Any, x: Axis, y: Axis) -> None:
    """Ring the runs that no other run of the same identity is shown to beat, nor any one as drawn.

    A test keeps a row on the front that another beats by an answer or two: a table explains that,
    but a ring around the point would not be believed.
    """
    runs, axes = [*points.run], (x.column, y.column)
    front = sorted(i for group in groups(runs) for i in pareto_front(runs, group, axes))
    gains = [1 if axis.higher_is_better else -1 for axis in axes] * points[["x", "y"]].to_numpy()
    shown = [
        i
        for i in front
        if not ((gains >= gains[i]).all(axis=1) & (gains > gains[i]).any(axis=1)).any()
    ]
    if shown:
        ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "color": "0.35"}
        ringed = points.iloc[shown][["x", "y"]].drop_duplicates().sort_values(["x", "y"])
        place.plot(ringed.x, ringed.y, linestyle="none", label="Pareto front", **ring)


def _finish(figure: Any, places: Sequence[Any], title: str) -> None:
    """Add a title, and one legend of all series, which says what bars are."""
    series: dict[str, Any] = {}
    for place in places:
        series |= dict(zip(*place.get_legend_handles_labels()[::-1], strict=True))
    bars = any(c.has_xerr or c.has_yerr for place in places for c in place.containers)
    legend(figure, series, "bars: 95% intervals" if bars else None)
    figure.suptitle(title)
