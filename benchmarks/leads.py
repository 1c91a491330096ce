"""Derives per document what a claim says of a lead or a slope, for `moecache claims` to test.

Usage: python benchmarks/leads.py [--out results]. Reads the runs of the folders named below and
writes `lead_OVER.json` (the share of its time that a policy saves over another, at each value of an
axis) and `slope_WHAT.json` (what each further step costs up to a point of an axis, and beyond it),
each with its Markdown. Whether a lead narrows, or a curve bends, is a difference of two columns of
one document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grid import RESULTS, arguments

from lm_eval_moecache.report.results import Run, load_runs, selected
from lm_eval_moecache.report.tables import rows_as_markdown

Rows = list[dict[str, Any]]
Found = tuple[str, Callable[[list[Run]], Rows]]
"""A folder of results, and what is told of the runs there."""
DRAFTED = "sp_moe/figure_13", "draft_tokens", (1, 2, 4, 8), "sp_moe"
COMMITTED = "commitmoe/figure_5", "bandwidth", ("32GB/s", "16GB/s", "5GB/s"), "commitmoe_deepseek"
DEPTH = {"policy": "mixtral_offloading", "capacity": "6/layer"}


def lead(runs: list[Run], axis: str, values: tuple[Any, ...], policy: str, old: str) -> Rows:
    """Return what a policy saves of the time of an older one, at each value of an axis."""

    def times(name: str) -> list[Mapping[str, float]]:
        return [_times(runs, {"policy": name, axis: value}) for value in values]

    rows: dict[str, dict[str, Any]] = {}
    for value, new, base in zip(values, times(policy), times(old), strict=True):
        for document in new:
            row = rows.setdefault(document, {"document": int(document)})
            row[f"at {value}"] = 1 - new[document] / base[document]
    return list(rows.values())


def slope(runs: list[Run], emulate: str) -> Rows:
    """Return what a layer of depth costs on average, from one to three and from there to five."""
    where = DEPTH | {"emulate": emulate}
    one, three, five = (_times(runs, {**where, "prefetch.depth": depth}) for depth in (1, 3, 5))
    return [
        {
            "document": int(document),
            "up_to": (three[document] / one[document] - 1) / 2,
            "beyond": (five[document] / three[document] - 1) / 2,
        }
        for document in one
    ]


def _times(runs: list[Run], where: Mapping[str, Any]) -> Mapping[str, float]:
    [run] = [run for run in runs if selected(run, where)]
    times: Mapping[str, float] = run.speed["tiny_gsm8k"]["tpot_ms"]
    return times


def _lead(of: tuple[str, str, tuple[Any, ...], str], old: str) -> Found:
    folder, axis, values, policy = of
    return folder, partial(lead, axis=axis, values=values, policy=policy, old=old)


FOUND: Mapping[str, Found] = {
    "lead_adapmoe": _lead(DRAFTED, "adapmoe"),
    "lead_lru": _lead(DRAFTED, "on_demand"),
    "lead_on_demand": _lead(COMMITTED, "on_demand"),
    "lead_prefetch": _lead(COMMITTED, "commitmoe_prefetch"),
    "slope_large": ("sp_moe/figure_3", partial(slope, emulate="Mixtral-8x7B")),
    "slope_small": ("sp_moe/figure_3", partial(slope, emulate="DeepSeek-V2-Lite")),
}
"""By the file's name."""


def main() -> None:
    root = arguments(__doc__, out=RESULTS).out
    for name, (folder, rows_of) in FOUND.items():
        rows = rows_of(load_runs(root / folder))
        path: Path = root / folder / f"{name}.json"
        path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
        path.with_suffix(".md").write_text(rows_as_markdown(rows))


if __name__ == "__main__":
    main()
