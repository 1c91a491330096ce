"""What `choose` says of a lossy rule: published losses, ours, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lm_eval_moecache.records.command import aligned, wrapped
from moecache_plan.losses import CHOICE

_CHANCE = 25.0


def lines(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the page's lines on what a lossy rule costs."""
    return [line for each in reports for line in _lines(each)]


def _lines(told: Mapping[str, Any]) -> list[str]:
    of = ", ".join(filter(None, (told["task"], told["amount"])))
    head = f"What {told['lossy']} may cost ({told['rule']}: {told['words']}) on {of}. "
    forecast = told["forecast"]
    if forecast is None:
        names = " and ".join(each["model"] for each in told["nearest"]) or "no model"
        head += f"No forecast: published on {names} only, and three models are needed."
    else:
        head += (
            f"In {forecast['rows']} published rows of {forecast['models']} models "
            f"(same kind: {forecast['of']}) a score of {100 * told['score']:.1f} loses "
            f"{_points(forecast['points'])} points in the median, and in eight of ten "
            f"{_points(forecast['least'])} to {_points(forecast['most'])} (below 0: a gain)."
        )
        if told["kind"] == CHOICE and 100 * told["score"] - forecast["most"] < _CHANCE:
            head += f" The far end is below the {_CHANCE:g} that guessing among four gives."
    cells = [["nearest models", "rows", "n", "points lost", "median", "measured on"]]
    for each in told["nearest"]:
        ends = f"{_points(each['least_points'])} to {_points(each['most_points'])}"
        cells.append(
            [
                *(each["model"], str(each["rows"]), _documents(each["settings"])),
                *(ends, _points(each["median_points"])),
                ", ".join(each["of"]) or f"any {told['kind']} task",
            ]
        )
    for (model, task, capacity), rows in _grouped(told["here"]).items():
        points = sorted(row["points"] for row in rows)
        fewest = min(row["documents"] for row in rows)
        cells.append(
            [
                *(f"{model} (ours)", str(len(rows)), f"{fewest}+"),
                f"{_points(points[0])} to {_points(points[-1])}",
                *(_points(median(points)), f"{task}, cache {capacity}"),
            ]
        )
    worth = "n: documents of a score. Take the range, not the median. "
    if judged := told["judged"]:
        worth += (
            f"Of {judged['rows']} such rows, each forecast without its model, "
            f"{100 * judged['covered']:.0f}% fall in the range; the median is off by "
            f"{judged['median_error']:.1f} points, a forecast of no loss by "
            f"{judged['no_loss_error']:.1f}. "
        )
    elif forecast is not None:
        worth += "It was never tested on a fourth model. "
    worth += (
        f"Repeated settings of one source differ by {told['noise_points']:g} points (rms). Measure "
        "yours: `moecache eval`. Sources and settings: --json; results/published_losses."
    )
    return [*wrapped(head), "", *aligned(cells, "<>>><<"), "", *wrapped(worth), ""]


def _documents(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return of how many documents published scores are, as far as their sources say."""
    counts = sorted({each["n"] for each in settings if each["n"] is not None})
    return " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "?"


def _points(number: float) -> str:
    number = round(number, 1) + 0.0  # no -0.0
    return f"{number:.1f}" if abs(number) < 9.95 else f"{number:.0f}"


def _grouped(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["task"], row["capacity"]), []).append(row)
    return groups
