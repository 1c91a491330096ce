"""Derives leads and slopes per document, for `moecache_lab.claims` to test.

Usage: python benchmarks/leads.py [--out results]. Reads the runs of the folders named below and
writes `lead_OVER.json` (the share of time that a policy saves over another, at each value of an
axis) and `slope_WHAT.json` (the cost of each further step up to a point of an axis, and beyond it),
each with its Markdown. A lead that narrows, or a curve that bends, is a difference between two
columns of one document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grid import RESULTS, arguments

from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.tables.text import rows_as_markdown

Where = Mapping[str, Any]
Columns = Mapping[str, tuple[Where, Where, int]]
"""Name -> the run, the run it is compared with, and how many steps further that run is."""


def lead(policy: str, old: str, axis: str, *values: Any) -> Columns:
    """The share of an old policy's time that a policy saves; the old one is one step further."""
    return {
        f"at {value}": ({"policy": policy, axis: value}, {"policy": old, axis: value}, 1)
        for value in values
    }


def slope(emulate: str) -> Columns:
    """The average cost of a layer of depth, from one to three layers and from three to five."""
    base = {"policy": "mixtral_offloading", "capacity": "6/layer", "emulate": emulate}
    one, three, five = ({**base, "prefetch.depth": depth} for depth in (1, 3, 5))
    return {"up_to": (three, one, -2), "beyond": (five, three, -2)}


def rows_of(runs: list[Run], columns: Columns) -> list[dict[str, Any]]:
    """Return one row per document: the share of its time per token saved for each step."""

    def times(where: Where) -> Mapping[str, float]:
        [run] = [run for run in runs if run.matches(where)]
        tpot_ms: Mapping[str, float] = run.speed["tiny_gsm8k"]["tpot_ms"]
        return tpot_ms

    rows: dict[str, dict[str, Any]] = {}
    for name, (where, baseline, steps) in columns.items():
        base = times(baseline)
        for document, time in times(where).items():
            row = rows.setdefault(document, {"document": int(document)})
            row[name] = (1 - time / base[document]) / steps
    return list(rows.values())


DRAFTED = "draft_tokens", 1, 2, 4, 8
LINKS = "bandwidth", "32GB/s", "16GB/s", "5GB/s"
FOUND: Mapping[str, Columns] = {
    "sp_moe/figure_13/lead_adapmoe": lead("sp_moe", "adapmoe", *DRAFTED),
    "sp_moe/figure_13/lead_lru": lead("sp_moe", "on_demand", *DRAFTED),
    "commitmoe/figure_5/lead_on_demand": lead("commitmoe_deepseek", "on_demand", *LINKS),
    "commitmoe/figure_5/lead_prefetch": lead("commitmoe_deepseek", "commitmoe_prefetch", *LINKS),
    "sp_moe/figure_3/slope_large": slope("Mixtral-8x7B"),
    "sp_moe/figure_3/slope_small": slope("DeepSeek-V2-Lite"),
}
"""By file, written next to its runs."""


def main() -> None:
    root = arguments(__doc__, out=RESULTS).out
    for name, columns in FOUND.items():
        path: Path = root / f"{name}.json"
        rows = rows_of(load_runs(path.parent), columns)
        path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
        path.with_suffix(".md").write_text(rows_as_markdown(rows))


if __name__ == "__main__":
    main()
