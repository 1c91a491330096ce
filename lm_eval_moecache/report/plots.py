"""Draws the trade-offs of a folder of runs: Pareto plots and capacity curves, as SVG and PNG.

The same runs give the same files to the byte, on one version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.report.columns import METRICS, accuracy, find_score, metric_value, setting
from lm_eval_moecache.report.figure import STYLE, pyplot, save
from lm_eval_moecache.report.pareto import pareto_front
from lm_eval_moecache.report.results import Run

_MARKERS = "osD^vP*X<>"
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Axis:
    """One quantity to draw; `sign` is -1 where less is better."""

    name: str
    label: str
    read: Callable[[Run], float | None]
    sign: int = 1


ABSCISSAS = (
    Axis("tok_per_s", "output tokens per second", lambda run: _metric(run, "tok_per_s")),
    Axis("miss_rate", "miss rate", lambda run: _metric(run, "miss_rate"), -1),
    Axis("memory", "cache capacity, MB", lambda run: _capacity_mb(run), -1),
)
CURVES = ("tok_per_s", "ttft_ms", "miss_rate")


def write_plots(
    runs: Sequence[Run], folder: Path, *, task: str | None = None, group: str = "policy"
) -> list[Path]:
    """Write every plot that the runs have figures for; return the files.

    `task` draws that task's score instead of the mean accuracy; `group` is the setting that
    gives a run its colour and its curve.
    """
    plt = pyplot()
    quality = _quality(runs, task)
    written: list[Path] = []
    with plt.rc_context(STYLE):
        for axis in ABSCISSAS:
            if _drawable(runs, axis, quality):
                figure = _tradeoff(plt, runs, axis, quality, group)
                written += _save(figure, folder, f"{quality.name}_{axis.name}")
        for ordinate in (quality, *(_metric_axis(name) for name in CURVES)):
            if _num_capacities(runs) > 1 and _drawable(runs, ABSCISSAS[2], ordinate):
                figure = _curves(plt, runs, ordinate, group)
                written += _save(figure, folder, f"capacity_{ordinate.name}")
    if not written:
        raise ValueError("no plot: the runs have neither two figures to relate nor two capacities.")
    return written


def _quality(runs: Sequence[Run], task: str | None) -> Axis:
    if task is None:
        return Axis("accuracy", "accuracy (mean of tasks)", lambda run: accuracy(run).number)
    found = [score for run in runs if (score := find_score(run, task)) is not None]
    if not found:
        names = dict.fromkeys(name for run in runs for name in run.results)
        raise ValueError(f"task={task!r} has no score. Allowed: {', '.join(names)}.")
    sign = 1 if found[0].higher_is_better else -1
    name = task.replace(":", "_").replace(",", "_")
    return Axis(name, f"{task} {found[0].metric}", lambda run: _score(run, task), sign)


def _score(run: Run, task: str) -> float | None:
    score = find_score(run, task)
    return None if score is None else score.value


def _metric(run: Run, name: str) -> float | None:
    return metric_value(run, name).number


def _metric_axis(name: str) -> Axis:
    heading, _, higher = METRICS[name]
    return Axis(name, heading, lambda run: _metric(run, name), -1 if higher is False else 1)


def _capacity_mb(run: Run) -> float | None:
    number = setting(run, "capacity_bytes").number
    return None if number is None else number / _MEGABYTE


def _num_capacities(runs: Sequence[Run]) -> int:
    return len({_capacity_mb(run) for run in runs})


def _drawable(runs: Sequence[Run], x: Axis, y: Axis) -> bool:
    return sum(x.read(run) is not None and y.read(run) is not None for run in runs) > 1


def _groups(runs: Sequence[Run], group: str) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(setting(run, group).raw), []).append(run)
    return dict(sorted(groups.items()))


def _tradeoff(plt: Any, runs: Sequence[Run], x: Axis, y: Axis, group: str) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for index, (name, members) in enumerate(_groups(runs, group).items()):
        points = _points(members, x, y)
        axes.plot(*_columns(points), linestyle="none", label=name, **_look(index))
    known = [run for run in runs if x.read(run) is not None and y.read(run) is not None]
    front = pareto_front(known, lambda run: _signed(x, run), lambda run: _signed(y, run))
    line = sorted({point for i in front for point in _points([known[i]], x, y)})
    axes.plot(*_columns(line), color="0.35", linewidth=1, zorder=0, label="Pareto front")
    axes.set_xlabel(x.label + (" (less is better)" if x.sign < 0 else ""))
    axes.set_ylabel(y.label)
    _legend(axes)
    return figure


def _curves(plt: Any, runs: Sequence[Run], y: Axis, group: str) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    x = ABSCISSAS[2]
    for index, (name, members) in enumerate(_groups(runs, group).items()):
        # Several runs of one group at one capacity (another setting varies too): their mean.
        at: dict[float, list[float]] = {}
        for place, value in _points(members, x, y):
            at.setdefault(place, []).append(value)
        means = [(place, sum(values) / len(values)) for place, values in sorted(at.items())]
        axes.plot(*_columns(means), label=name, **_look(index))
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    _legend(axes)
    return figure


def _signed(axis: Axis, run: Run) -> float | None:
    value = axis.read(run)
    return None if value is None else axis.sign * value


def _points(runs: Sequence[Run], x: Axis, y: Axis) -> list[tuple[float, float]]:
    pairs = [(x.read(run), y.read(run)) for run in runs]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _look(index: int) -> dict[str, Any]:
    """Ten colours times ten markers, so that twenty policies stay apart."""
    return {
        "color": f"C{index % 10}",
        "marker": _MARKERS[(index // 10 + index) % len(_MARKERS)],
        "markersize": 6,
    }


def _legend(axes: Any) -> None:
    handles, _ = axes.get_legend_handles_labels()
    # Beside the axes once it would cover the points.
    if len(handles) > 6:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    else:
        axes.legend()


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path in paths:
        save(figure, path)
    return paths
