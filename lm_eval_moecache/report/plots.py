"""Figures that are reproducible byte for byte: one style, no dates, no random ids.

Below: plots of a folder of runs, either the `figures` of its sweep file or the usual trade-offs.
Settings that vary become series and panels; nothing is averaged, and a line joins only runs of one
identity.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.numbers import listed, unknown_name_error
from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.runs.columns import (
    ACCURACY,
    Column,
    find_column,
    score_column,
    selected,
    setting,
)
from lm_eval_moecache.report.runs.run import RATES, Run, distinguishing, groups, varying
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


def fit_shares(axes: Any, ends: Sequence[float]) -> None:
    """Fit a y axis of shares to the ends of its points' bars, within 0 and 1.

    An axis of anything else is left alone.
    """
    if ends and min(ends) >= 0 and max(ends) <= 1:
        low, high = min(ends), max(ends)
        # So that a difference of one answer in a hundred does not fill the picture.
        pad = max(0.08 * (high - low), (0.05 - (high - low)) / 2)
        axes.set_ylim(max(0.0, low - pad), min(1.0, high + pad))
        for line in axes.lines:
            line.set_clip_on(False)


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
    """Write a figure as SVG, PNG or PDF, by file suffix, and close it."""
    plt = pyplot()
    for target in map(Path, paths):
        image = io.BytesIO()
        with plt.rc_context(STYLE):
            kind = target.suffix.removeprefix(".")
            figure.savefig(image, format=kind, dpi=150, metadata=_UNDATED[target.suffix])
        write_whole(target, image.getvalue())
    plt.close(figure)


# --- plots of runs ---

Z_95 = 1.96
MAX_SERIES, MAX_PANELS = 20, 6
CURVES = ("tok_per_s", "ttft_ms", "miss_rate")
_CAPACITY = "capacity"
# Where every run has a label, the labels stand for all other settings: they name what varies.
_INSTEAD_OF_ALL = "run"
_LETTERS_A_PANEL = 55
_LOG_FROM = 2.0
"""Perplexities that differ by more than this factor are drawn on a logarithmic scale."""


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
        value = self.column.read(run)
        # A metric, or the number that a setting like `8/layer` or `5%` begins with.
        kind, number, _ = sort_key(value)
        if value.raw is None or kind == 2:
            return None
        return number / self.scale, Z_95 * (value.stderr or 0.0) / self.scale


@dataclass(frozen=True, slots=True)
class Drawn:
    """One panel: its title, and its runs by series name."""

    title: str
    series: dict[str, list[Run]]

    @property
    def runs(self) -> list[Run]:
        """The runs of all series."""
        return [run for members in self.series.values() for run in members]


def axis_of(runs: Sequence[Run], shown: Sequence[Run], name: str) -> Axis:
    """Return a column as an axis: bytes in MB, perplexities relative to the lowest shown."""
    column = find_column(runs, name)
    label = column.words or column.heading.removesuffix(" (lower is better)")
    scale, log = (MEGABYTE if "[MB]" in column.words else 1.0), False
    if name == ACCURACY:
        label = "accuracy (mean of tasks)"
    elif name == "capacity_bytes":
        scale, label = MEGABYTE, "capacity of the cache [MB]"
    elif name == _CAPACITY:
        # The form in which capacities were given is their unit.
        capacities = {str(setting(run, _CAPACITY).raw) for run in shown}
        for ending, unit in (("/layer", "experts a layer"), ("%", "% of all expert bytes")):
            if all(capacity.endswith(ending) for capacity in capacities):
                label = f"capacity [{unit}]"
    if "perplexity" in column.words:
        numbers = [n for run in shown if (n := column.read(run).number)]
        if numbers and max(numbers) > 100:
            # Per word of many tokens, absolute perplexity means little: draw it relative.
            scale, log = min(numbers), max(numbers) > _LOG_FROM * min(numbers)
            label += f"\n[of the lowest, {scale:.0f}{'; log scale' if log else ''}]"
    direction = {True: "\n(more is better)", False: "\n(less is better)", None: ""}
    return Axis(column, label + direction[column.higher_is_better], scale, log)


# --- the figures that a sweep file names ---


def write_figures(runs: Sequence[Run], figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write every figure of a sweep file as `<folder>/<name>.svg` and `.png`; return the files.

    A figure has `panels` (each with columns `x` and `y`, optionally a `title` and a `where`),
    `group` (the settings that give a run its colour), and optionally `title`, `where`, and
    `line: true`, which joins a group's points in order of x.
    """
    return [
        path
        for figure in figures
        for path in save_as(draw_figure(runs, figure), folder / figure.name)
    ]


def draw_figure(runs: Sequence[Run], figure: Figure) -> Any:
    """Draw one figure of a sweep file; return it."""
    picture, places = new_figure(columns=len(figure.panels))
    with pyplot().rc_context(STYLE):
        for place, panel in zip(places, figure.panels, strict=True):
            _draw_panel(place, runs, figure, panel)
        # matplotlib cuts off titles wider than the figure.
        width = _LETTERS_A_PANEL * len(figure.panels)
        _finish(picture, places, "\n".join(wrap(plain(figure.title), width)))
    return picture


def _draw_panel(place: Any, runs: Sequence[Run], figure: Figure, panel: Panel) -> None:
    where = {**figure.where, **panel.where}
    chosen = [run for run in runs if selected(run, where)]
    x, y = (axis_of(runs, chosen, name) for name in (panel.x, panel.y))
    series: dict[str, list[Run]] = {}
    for run in chosen:
        if x.at(run) is not None and y.at(run) is not None:
            values = (setting(run, name).raw for name in figure.group or ["policy"])
            name = " ".join(str(value) for value in values if value is not None)
            series.setdefault(name, []).append(run)
    if not series:
        raise ValueError(f"figures: {figure.name!r}: no run has where={where!r} and figures.")
    if figure.line:
        joinable = {panel.x, *(RATES if panel.x in ("hardware", "bandwidth") else ())}
        for name, members in sorted(series.items()):
            if varied := [key for key in varying(members) if key not in joinable]:
                raise ValueError(
                    f"figures: {figure.name!r}: the line {name!r} would join runs that differ in "
                    f"{', '.join(varied)}. Add these to `group`, or a `where`."
                )
    title = panel.title or ("" if figure.title else f"{y.short} against {x.short}")
    contents = Drawn(title, dict(sorted(series.items())))
    _draw(place, contents, x, y, list(contents.series), is_curve=figure.line, bars=True)


# --- the usual trade-offs, for sweeps that name no figures ---


def write_plots(
    runs: Sequence[Run], folder: Path, *, task: str | None = None, group: str | None = None
) -> list[Path]:
    """Write the trade-offs that the runs have metrics for; return the files.

    `task` draws that task's score instead of the mean accuracy; `group` is the setting that gives
    a run its colour and its curve (default: the policy). Other settings that vary split these into
    further series, or panels where there are many. Raises ValueError where there are too many for
    one plot.
    """
    if group is not None:
        _check_group(runs, group)
    if task is not None and score_column(runs, task) is None:
        names = dict.fromkeys(name for run in runs for name in run.results)
        raise ValueError(f"task={task!r} has no score. Allowed: {listed(names, task)}.")
    quality = task or ACCURACY
    pairs = [(name, quality, False) for name in ("tok_per_s", "miss_rate", "capacity_bytes")]
    if len({setting(run, "capacity_bytes").raw for run in runs}) > 1:
        pairs += [("capacity_bytes", name, True) for name in (quality, *CURVES)]
    written: list[Path] = []
    for x, y, is_curve in pairs:
        axes = [axis_of(runs, runs, name) for name in (x, y)]
        complete = [run for run in runs if all(axis.at(run) is not None for axis in axes)]
        if len(complete) < 2:
            continue
        name = f"capacity_{y}" if is_curve else f"{y}_{x.replace('capacity_bytes', 'memory')}"
        figure = draw_tradeoff(complete, axes[0], axes[1], group or "policy", is_curve=is_curve)
        written += save_as(figure, folder / name.replace(":", "_").replace(",", "_"))
    if not written:
        raise ValueError("no plot: the runs have neither two figures to relate nor two capacities.")
    return written


def _check_group(runs: Sequence[Run], group: str) -> None:
    """Raise ValueError where the setting does not vary: every run would have one colour."""
    values = {setting(run, group).raw for run in runs}
    if values == {None}:
        arguments = {key for run in runs for key in (*run.model_args, *run.options)}
        raise unknown_name_error(
            "group", group, {*AXES, *arguments, "policy", "model", "experiment", "hardware"}
        )
    if len(values) == 1:
        raise ValueError(
            f"group={group!r} has no effect: all runs have {next(iter(values))!r}. What varies: "
            f"{', '.join(_varying(runs, besides=[]))}."
        )


def draw_tradeoff(runs: Sequence[Run], x: Axis, y: Axis, group: str, *, is_curve: bool) -> Any:
    """Draw curves over x, or scatter plots with each panel's Pareto front; return the figure."""
    panels = panels_of(runs, group, _CAPACITY)
    columns = min(len(panels), 3)
    figure, places = new_figure(-(-len(panels) // columns), columns)
    names = sorted({name for panel in panels for name in panel.series})
    for place in places[len(panels) :]:
        place.set_visible(False)
    places = places[: len(panels)]
    with pyplot().rc_context(STYLE):
        for place, panel in zip(places, panels, strict=True):
            if is_curve:
                _check_one_run_a_place(panel, x)
            _draw(place, panel, x, y, names, is_curve=is_curve, bars=not is_curve)
            if not is_curve:
                _ring_front(place, panel, x, y)
        # Panels are read against each other, so they share one scale.
        for get, put in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")):
            lows, highs = zip(*(getattr(place, get)() for place in places), strict=True)
            for place in places:
                getattr(place, put)(min(lows), max(highs))
        _finish(figure, places, plain(f"{y.short.capitalize()} against {x.short}"))
    return figure


def panels_of(runs: Sequence[Run], group: str, x: str) -> list[Drawn]:
    """Split runs into panels of at most 20 series; `x` is the setting on the x axis.

    Series are named by the group and every other setting that varies. Where one panel cannot hold
    them, the setting that gives the fewest panels heads them. Raises ValueError, naming the
    settings, where that is not enough.
    """
    others = _varying(runs, besides=[group, x])
    if len({_text(run, group) for run in runs}) == 1 and others:
        group, others = others[0], others[1:]
    names = [group, *others]
    all_series = _series(runs, names)
    if len(all_series) <= MAX_SERIES:
        return [Drawn("", all_series)]
    splits = []
    for head in names:
        parts: dict[str, list[Run]] = {}
        for run in runs:
            parts.setdefault(_text(run, head), []).append(run)
        series_names = [name for name in names if name != head]
        split = [
            Drawn(f"{head}: {v}", _series(members, series_names))
            for v, members in sorted(parts.items())
        ]
        if len(split) <= MAX_PANELS and all(len(p.series) <= MAX_SERIES for p in split):
            splits.append(split)
    if splits:
        return min(splits, key=len)
    raise ValueError(
        f"no plot: {len(all_series)} series ({', '.join(names)} vary) are too many for "
        f"{MAX_PANELS} panels of {MAX_SERIES}. Choose --group, or some of the runs by "
        "--where SETTING=VALUE,..., or name `figures` in the sweep's file."
    )


def _varying(runs: Sequence[Run], *, besides: Sequence[str]) -> list[str]:
    """Return the settings that distinguish the runs, without those of `besides`."""
    arguments = {key for run in runs for key in (*run.model_args, *run.options)}
    if all(run.label is not None for run in runs):
        names = [_INSTEAD_OF_ALL]
    else:
        others = sorted(arguments - {*AXES, "policy", "label"})
        names = ["experiment", "model", "policy", *AXES, *others]
    # `distinguishing` drops settings that follow from earlier ones, as an axis from its policy.
    names = list(dict.fromkeys([*names, *varying(runs)]))
    return distinguishing(
        names, lambda keys: {tuple(_text(r, n) for n in keys) for r in runs}, besides
    )


def _series(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    series: dict[str, list[Run]] = {}
    for run in runs:
        texts = [_text(run, name) for name in names]
        parts = [
            # A bare number needs its setting's name.
            text if i == 0 or text[:1].isalpha() else f"{names[i]}={text}"
            for i, text in enumerate(texts)
            if text
        ]
        series.setdefault(", ".join(parts), []).append(run)
    return dict(sorted(series.items()))


def _text(run: Run, name: str) -> str:
    raw = setting(run, name).raw
    return "" if raw is None else str(raw)


def _check_one_run_a_place(panel: Drawn, x: Axis) -> None:
    """Raise ValueError where two runs of a series share a point of x: the curve is ambiguous."""
    for label, runs in panel.series.items():
        places: dict[Any, list[str]] = {}
        for run in runs:
            places.setdefault(x.at(run), []).append(run.run_id)
        for place, twins in places.items():
            if place is not None and len(twins) > 1:
                raise ValueError(
                    f"no plot: {label!r} has several runs at {x.short} {place[0]:g}: "
                    f"{', '.join(twins)}."
                )


# --- one pair of axes ---


def _draw(
    place: Any, panel: Drawn, x: Axis, y: Axis, names: Sequence[str], *, is_curve: bool, bars: bool
) -> None:
    for name, members in panel.series.items():
        points = sorted(_points(members, x, y))
        xs, x_errors, ys, y_errors = zip(*points, strict=True)
        place.errorbar(
            xs,
            ys,
            xerr=x_errors if bars and any(x_errors) else None,
            yerr=y_errors if bars and any(y_errors) else None,
            elinewidth=0.8,
            # Two points do not make a curve.
            linestyle="-" if is_curve and len(points) > 2 else "none",
            label=plain(name),
            **look(names.index(name)),
        )
    task = y.column.name.partition(":")[0]
    is_score = y.column.decimals == 3 and y.column.higher_is_better is True
    if y.column.name == ACCURACY or (is_score and any(run.score(task) for run in panel.runs)):
        points_shown = _points(panel.runs, x, y)
        ends = [v + side * e * bars for _, _, v, e in points_shown for side in (-1, 1)]
        # A bar may pass what a share can be; its point may not.
        are_shares = all(0 <= v <= 1 for _, _, v, _ in points_shown)
        fit_shares(place, [min(max(end, 0.0), 1.0) for end in ends] if are_shares else [])
    if y.log:
        place.set_yscale("log")
    place.set_title(plain(panel.title))
    place.set_xlabel(x.label)
    place.set_ylabel(y.label)


def _points(runs: Sequence[Run], x: Axis, y: Axis) -> list[tuple[float, float, float, float]]:
    """Return (x, half of its interval, y, half of its interval) of each run that has both."""
    pairs = [(x.at(run), y.at(run)) for run in runs]
    return [(*a, *b) for a, b in pairs if a is not None and b is not None]


def _ring_front(place: Any, panel: Drawn, x: Axis, y: Axis) -> None:
    """Ring the runs that no other run of the same identity is shown to beat, nor any one as drawn.

    A test keeps a row on the front that another beats by an answer or two: a table explains that,
    but a ring around the point would not be believed.
    """
    runs, axes = panel.runs, (x.column, y.column)
    front = [runs[i] for group in groups(runs) for i in pareto_front(runs, group, axes)]
    points = {(x_value, y_value) for x_value, _, y_value, _ in _points(front, x, y)}
    signs = [1 if axis.higher_is_better else -1 for axis in axes]
    for other in {(x_value, y_value) for x_value, _, y_value, _ in _points(runs, x, y)}:
        gains = {p: [s * (o - v) for s, o, v in zip(signs, other, p, strict=True)] for p in points}
        points -= {p for p, gain in gains.items() if min(gain) >= 0 and max(gain) > 0}
    if points:
        ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "color": "0.35"}
        xs, ys = zip(*sorted(points), strict=True)
        place.plot(xs, ys, linestyle="none", label="Pareto front", **ring)


def _finish(figure: Any, places: Sequence[Any], title: str) -> None:
    """Add a title, and one legend of all series, which says what bars are."""
    series: dict[str, Any] = {}
    for place in places:
        series |= dict(zip(*place.get_legend_handles_labels()[::-1], strict=True))
    bars = any(c.has_xerr or c.has_yerr for place in places for c in place.containers)
    legend(figure, series, "bars: 95% intervals" if bars else None)
    figure.suptitle(title)


def plot_speeds(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot predicted against measured decode speeds, a colour a mechanism."""
    figure, (axes,) = new_figure()
    speeds = [1.0, *(row["measured_tok_s"] for row in rows if row["measured_tok_s"])]
    ends = [min(speeds) / 1.5, max(speeds) * 1.5]
    axes.fill_between(ends, [end / 1.5 for end in ends], [end * 1.5 for end in ends], alpha=0.12)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for index, name in enumerate(dict.fromkeys(row["mechanism"] for row in rows)):
        points = [row for row in rows if row["mechanism"] == name and row["measured_tok_s"]]
        x = [row["measured_tok_s"] for row in points]
        y = [row["predicted_tok_s"] for row in points]
        axes.plot(x, y, **{**look(index), "linestyle": "none"}, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured, tok/s", ylabel="predicted, tok/s")
    axes.legend()
    save(figure, path)
