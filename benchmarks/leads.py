"""Derives per document what a claim says of a lead or a slope, for `moecache claims` to test.

Usage: python benchmarks/leads.py [--out results]. Reads the runs of the folders named below and
writes `lead_OVER.json` (the share of its time that a policy saves over another, at each value of an
axis) and `slope_WHAT.json` (what each further step costs up to a point of an axis, and beyond it),
each with its Markdown. Whether a lead narrows, or a curve bends, is a difference of two columns of
one document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grid import RESULTS

from lm_eval_moecache.report.columns import selected
from lm_eval_moecache.report.render import rows_as_markdown
from lm_eval_moecache.report.results import Run, load_runs

METRIC = "tpot_ms"
TASK = "tiny_gsm8k"
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lead:
    """What `new` saves of the time of `old`, at each value of an axis."""

    folder: str
    axis: str
    values: tuple[Any, ...]
    new: Mapping[str, Any]
    old: Mapping[str, Any]

    def rows(self, root: Path) -> Rows:
        runs = load_runs(root / self.folder)
        columns = {
            str(value): (
                _times(runs, {**self.new, self.axis: value}),
                _times(runs, {**self.old, self.axis: value}),
            )
            for value in self.values
        }
        documents = list(next(iter(columns.values()))[0])
        return [
            {
                "document": int(document),
                **{
                    f"at {at}": 1 - new[document] / old[document]
                    for at, (new, old) in columns.items()
                },
            }
            for document in documents
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """What a step of an axis costs on average, from its first value to a point and from there."""

    folder: str
    axis: str
    points: tuple[int, int, int]
    where: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, root: Path) -> Rows:
        runs = load_runs(root / self.folder)
        first, middle, last = self.points
        at = {value: _times(runs, {**self.where, self.axis: value}) for value in self.points}
        return [
            {
                "document": int(document),
                "up_to": (at[middle][document] / at[first][document] - 1) / (middle - first),
                "beyond": (at[last][document] / at[middle][document] - 1) / (last - middle),
            }
            for document in at[first]
        ]


def _drafted(old: str) -> Lead:
    return Lead(
        folder="sp_moe/figure_13",
        axis="draft_tokens",
        values=(1, 2, 4, 8),
        new={"policy": "sp_moe"},
        old={"policy": old},
    )


def _committed(old: str) -> Lead:
    return Lead(
        folder="commitmoe/figure_5",
        axis="bandwidth",
        values=("32GB/s", "16GB/s", "5GB/s"),
        new={"policy": "commitmoe_deepseek"},
        old={"policy": old},
    )


def _by_depth(emulate: str) -> Slope:
    where = {"policy": "mixtral_offloading", "emulate": emulate, "capacity": "6/layer"}
    return Slope(folder="sp_moe/figure_3", axis="prefetch.depth", points=(1, 3, 5), where=where)


FOUND: Mapping[str, Lead | Slope] = {
    "lead_adapmoe": _drafted("adapmoe"),
    "lead_lru": _drafted("on_demand"),
    "lead_on_demand": _committed("on_demand"),
    "lead_prefetch": _committed("commitmoe_prefetch"),
    "slope_large": _by_depth("Mixtral-8x7B"),
    "slope_small": _by_depth("DeepSeek-V2-Lite"),
}
"""Name of the file -> what it tells; the file lies beside its runs."""


def _times(runs: list[Run], where: Mapping[str, Any]) -> Mapping[str, float]:
    [run] = [run for run in runs if selected(run, where)]
    times: Mapping[str, float] = run.speed[TASK][METRIC]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of results")
    root = parser.parse_args().out
    for name, found in FOUND.items():
        rows = found.rows(root)
        path = root / found.folder / f"{name}.json"
        path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
        path.with_suffix(".md").write_text(rows_as_markdown(rows))


if __name__ == "__main__":
    main()
