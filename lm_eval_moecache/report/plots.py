"""Draws the trade-offs of a folder of runs: Pareto plots and capacity curves, as SVG and PNG.

What varies is drawn as series and panels; nothing is averaged. The same runs give the same files
to the byte, on one version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.report.columns import (
    MEGABYTE,
    METRICS,
    accuracy,
    find_score,
    metric_value,
    setting,
)
from lm_eval_moecache.report.figure import STYLE, end_at_one, look, new_figure, plain, pyplot, save
from lm_eval_moecache.report.pareto import pareto_front
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.series import Panel, check_group, check_one_run_a_place, panels_of

_CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class Axis:
    """One quantity to draw; `sign` is -1 where less is better, `is_share` where 1 is the most."""

    name: str
    label: str
    read: Callable[[Run], float | None]
    sign: int = 1
    is_share: bool = False


CURVES = ("tok_per_s", "ttft_ms", "miss_rate")


def write_plots(
    runs: Sequence[Run], folder: Path, *, task: str | None = None, group: str = "policy"
) -> list[Path]:
    """Write every plot that the runs have figures for; return the files.

    `task` draws that task's score instead of the mean accuracy; `group` is the setting that
    gives a run its colour and its curve. Settings that vary beside it make series of their own,
    or panels where these are many. Raises ValueError where they are too many for a picture.
    """
    check_group(runs, group)
    plt = pyplot()
    quality = _quality(runs, task)
    written: list[Path] = []
    memory = _memory_axis()
    with plt.rc_context(STYLE):
        for axis in (_metric_axis("tok_per_s"), _metric_axis("miss_rate"), memory):
            if _drawable(runs, axis, quality):
                figures = [_draw(runs, axis, quality, group, is_curve=False) for _ in range(2)]
                written += _save(figures, folder, f"{quality.name}_{axis.name}")
        for ordinate in (quality, *(_metric_axis(name) for name in CURVES)):
            if _num_capacities(runs) > 1 and _drawable(runs, memory, ordinate):
                figures = [_draw(runs, memory, ordinate, group, is_curve=True) for _ in range(2)]
                written += _save(figures, folder, f"capacity_{ordinate.name}")
    if not written:
        raise ValueError("no plot: the runs have neither two figures to relate nor two capacities.")
    return written


def _quality(runs: Sequence[Run], task: str | None) -> Axis:
    if task is None:
        read = lambda run: accuracy(run).number  # noqa: E731
        return Axis("accuracy", "accuracy (mean of tasks)", read, is_share=True)
    found = [score for run in runs if (score := find_score(run, task)) is not None]
    if not found:
        names = dict.fromkeys(name for run in runs for name in run.results)
        raise ValueError(f"task={task!r} has no score. Allowed: {', '.join(names)}.")
    sign = 1 if found[0].higher_is_better else -1
    name = task.replace(":", "_").replace(",", "_")
    label = f"{task} {found[0].metric.replace('_', ' ')}"
    return Axis(name, label, lambda run: _score(run, task), sign, is_share=sign > 0)


def _score(run: Run, task: str) -> float | None:
    score = find_score(run, task)
    return None if score is None else score.value


def _metric(run: Run, name: str) -> float | None:
    return metric_value(run, name).number


def _metric_axis(name: str) -> Axis:
    metric = METRICS[name]
    sign = -1 if metric.higher_is_better is False else 1
    return Axis(name, metric.words, lambda run: _metric(run, name), sign)


def _memory_axis() -> Axis:
    return Axis("memory", "capacity of the cache [MB]", _capacity_mb, -1)


def _capacity_mb(run: Run) -> float | None:
    number = setting(run, "capacity_bytes").number
    return None if number is None else number / MEGABYTE


def _num_capacities(runs: Sequence[Run]) -> int:
    return len({_capacity_mb(run) for run in runs})


def _drawable(runs: Sequence[Run], x: Axis, y: Axis) -> bool:
    return sum(x.read(run) is not None and y.read(run) is not None for run in runs) > 1


def _draw(runs: Sequence[Run], x: Axis, y: Axis, group: str, *, is_curve: bool) -> Any:
    """Curves over x, or clouds with the Pareto front of each panel."""
    known = [r for r in runs if x.read(r) is not None and y.read(r) is not None]
    panels = panels_of(known, group, _CAPACITY)
    columns = min(len(panels), 3)
    figure, places = new_figure(-(-len(panels) // columns), columns)
    names = sorted({name for panel in panels for name in panel.series})
    for place in places[len(panels) :]:
        place.set_visible(False)
    for place, panel in zip(places, panels, strict=False):
        if is_curve:
            check_one_run_a_place(panel, x.read, x.label)
        _panel(place, panel, x, y, names, is_curve=is_curve)
    _share_limits(places[: len(panels)])
    handles: dict[str, Any] = {}
    for place in places:
        handles |= dict(zip(*place.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _panel(
    place: Any, panel: Panel, x: Axis, y: Axis, names: Sequence[str], *, is_curve: bool
) -> None:
    for name, members in panel.series.items():
        points = sorted(_points(members, x, y))
        line = "-" if is_curve else "none"
        place.plot(*_columns(points), linestyle=line, label=plain(name), **look(names.index(name)))
    runs = [run for members in panel.series.values() for run in members]
    if not is_curve:
        front = pareto_front(runs, lambda run: _signed(x, run), lambda run: _signed(y, run))
        line_of = sorted({point for i in front for point in _points([runs[i]], x, y)})
        place.plot(*_columns(line_of), color="0.35", linewidth=1, zorder=0, label="Pareto front")
    if y.is_share:
        end_at_one(place, [value for _, value in _points(runs, x, y)])
    place.set_title(plain(panel.title))
    place.set_xlabel(x.label + _better(x))
    place.set_ylabel(y.label + _better(y))


def _share_limits(places: Sequence[Any]) -> None:
    """Panels are compared with each other, so they have one scale."""
    for get, put in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")):
        limits = [getattr(place, get)() for place in places]
        for place in places:
            getattr(place, put)(min(low for low, _ in limits), max(high for _, high in limits))


def _better(axis: Axis) -> str:
    return "\n(less is better)" if axis.sign < 0 else ""


def _signed(axis: Axis, run: Run) -> float | None:
    value = axis.read(run)
    return None if value is None else axis.sign * value


def _points(runs: Sequence[Run], x: Axis, y: Axis) -> list[tuple[float, float]]:
    pairs = [(x.read(run), y.read(run)) for run in runs]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _save(figures: Sequence[Any], folder: Path, name: str) -> list[Path]:
    """Write the picture in both forms; it is drawn for each, as writing closes it."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for figure, path in zip(figures, paths, strict=True):
        save(figure, path)
    return paths
