"""Remakes results/published_losses: the forecasts of every row without its model, and the plots.

Usage: python benchmarks/published_losses.py

Reads rows.csv, and writes table.md, the plots, judged.csv: how far off the forecasts are, and
here.csv: what the shipped model and the carved one lose under each rule here, from the pairs of
`benchmarks/lost_points.py`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grid import RESULTS

from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.report.plots import look, new_figure, save
from moecache_lab.published_losses import judge, losses_text
from moecache_plan.losses import ALGORITHMS, CHOICE, GENERATE, Loss, rules_of, shipped

FOLDER = RESULTS / "published_losses"
GENERATED = {"tiny_gsm8k", "tiny_bbh"}
COLUMNS = "model rule class task kind capacity changed documents right points".split()
JUDGED = "rule kind rows covered median_error no_loss_error".split()


def class_of(rule: str) -> str:
    """Return the class of a rule as `lost_points` names it: `on_demand + miss=drop h=6`."""
    replaced = re.findall(r"\b(?:routing|miss)=(\w+)", rule)
    return ALGORITHMS[replaced[-1]] if replaced else rules_of(rule.split()[0])[0]


def own_losses() -> list[dict[str, Any]]:
    pairs = json.loads((RESULTS / "lost_points/pairs.json").read_text())["answers"]
    rows = [
        {
            **{name: pair[name] for name in ("model", "rule", "task", "capacity", "documents")},
            "class": class_of(pair["rule"]),
            "kind": GENERATE if pair["task"] in GENERATED else CHOICE,
            "changed": round(1 - pair["fidelity"], 3) + 0.0,
            "right": round(pair["right"], 4),
            "points": round(pair["points"], 2) + 0.0,
        }
        for pair in pairs
    ]
    return sorted(rows, key=lambda row: [str(row[name]) for name in COLUMNS])


def family(row: Loss) -> str:
    """Return the first word of the model's name."""
    return re.split(r"[-.\d]", row.model)[0]


def picture(rows: Iterable[Loss], ours: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points to plot: published rows whose source says the share, and our own."""
    of = {"experts": "experts removed or merged", "executed": "executed experts changed"}
    kinds = {GENERATE: "generation", CHOICE: "choice"}
    points = [
        {
            "panel": f"{of[row.share_of]}: {kinds[row.kind]}",
            "family": family(row),
            "x": row.share,
            "y": row.points,
        }
        for row in rows
        if row.is_share and row.share is not None
    ]
    points += [
        {
            "panel": f"{of['executed']}: {kinds[row['kind']]}",
            "family": f"{row['model']} (ours)",
            "x": row["changed"],
            "y": row["points"],
        }
        for row in ours
    ]
    return sorted(points, key=lambda point: point["panel"], reverse=True)


def by_rule(rows: Iterable[Loss], ours: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points to plot by rule and kind of task, published ones and our own."""
    points = [
        {"panel": f"{row.rule}, {row.kind}", "family": family(row), "y": row.points}
        for row in rows
        if row.is_share
    ]
    return points + [
        {
            "panel": f"{row['class']}, {row['kind']}",
            "family": f"{row['model']} (ours)",
            "y": row["points"],
        }
        for row in ours
    ]


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def plot_losses(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot points lost against the share changed: a panel per `panel`, a look per `family`.

    A point has `x`, the share, and `y`, the points lost.
    """
    panels = list(dict.fromkeys(point["panel"] for point in points))
    families = list(dict.fromkeys(point["family"] for point in points))
    figure, all_axes = new_figure(-(-len(panels) // 2), 2)
    for axes, panel in zip(all_axes, panels, strict=False):
        axes.axhline(0, color="black", linewidth=0.8)
        for index, family in enumerate(families):
            shown = [p for p in points if (p["panel"], p["family"]) == (panel, family)]
            style = {**look(index), "linestyle": "none", "alpha": 0.6}
            axes.plot([p["x"] for p in shown], [p["y"] for p in shown], **style, label=family)
        axes.set(title=panel, xlabel="share changed", ylabel="points lost", xlim=(0, 1))
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper")
    save(figure, path)


def plot_rules(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot points lost, `y`, a strip per `panel` and a look per `family`, ours in black on top."""
    panels = sorted({point["panel"] for point in points}, reverse=True)
    families = list(dict.fromkeys(point["family"] for point in points))
    figure, (axes,) = new_figure()
    figure.set_size_inches(8, 1.2 + 0.3 * len(panels))
    axes.axvline(0, color="black", linewidth=0.8)
    for index, family in enumerate(families):
        shown = [point for point in points if point["family"] == family]
        ours = "(ours)" in family
        style = {**look(index), "linestyle": "none", "alpha": 0.9 if ours else 0.5}
        if ours:
            style |= {"color": "black", "markersize": 4}
        # Ours lie below a strip's published ones.
        heights = [panels.index(point["panel"]) - 0.2 * ours for point in shown]
        axes.plot([point["y"] for point in shown], heights, **style, label=family)
    axes.set(xlabel="points lost", yticks=range(len(panels)), yticklabels=panels)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    save(figure, path)


def main() -> None:
    rows, ours = shipped(), own_losses()
    write_whole(FOLDER / "here.csv", as_csv(ours))
    found: Mapping[str, Any] = judge(rows)
    write_whole(FOLDER / "judged.csv", as_csv(found["rules"], JUDGED))
    text = losses_text(found)
    write_whole(FOLDER / "table.md", f"# Forecasts of published losses\n\n{text}")
    (FOLDER / "plots").mkdir(exist_ok=True)
    plot_losses(picture(rows, ours), FOLDER / "plots/lost.svg")
    plot_rules(by_rule(rows, ours), FOLDER / "plots/by_rule.svg")
    print(text, end="")


if __name__ == "__main__":
    main()
