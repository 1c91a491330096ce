"""The picture of results/lossy_answers from its runs. Usage: python FILE.

The runs: `moecache sweep results/lossy_answers/routing/sweep.yaml`. Loads saved are bytes that did
not move, against loading everything with the same cache; weight lost is the routing weight of what
was dropped or replaced, over the decoded tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from grid import RESULTS

from lm_eval_moecache.report.mpl_style import look, new_figure, save
from lm_eval_moecache.report.results import load_runs

FOLDER = RESULTS / "lossy_answers"
SHIPPED = {("drop_cold", "0.75"): "BigMoeOnEdge's app"}
"""Settings that an engine ships switched on; all others are off unless asked for."""
FIXED = ("miss.rescue", "routing.k_min")
"""Parameters that are the same in all runs of a rule."""
Row = dict[str, Any]


def rows() -> list[Row]:
    found = []
    for run in load_runs(FOLDER / "routing"):
        given, totals = run.model_args, run.moecache["totals"]
        axis = "miss" if "miss" in given else "routing" if "routing" in given else "eviction"
        swept = [k for k in given if k.startswith(f"{axis}.") and k not in FIXED]
        found.append(
            {
                "trace": Path(given["trace"]).stem,
                "capacity": given["capacity"],
                "rule": "fetch" if axis == "eviction" else given[axis],
                "setting": str(given[swept[0]]) if swept else "",
                "bytes": totals["bytes_moved"],
                "lost": totals["lost_weight_share"],
            }
        )
    base = {(r["trace"], r["capacity"]): r for r in found if r["rule"] == "fetch"}
    for row in found:
        at = base[row["trace"], row["capacity"]]
        row["saved"] = 1 - row["bytes"] / at["bytes"]
    return [row for row in found if row["rule"] != "fetch"]


def draw(found: list[Row], file: Path) -> None:
    """One panel a trace and capacity: a curve for each rule, a ring for what ships switched on."""
    places = sorted({(r["trace"], r["capacity"]) for r in found})
    figure, panels = new_figure(len(places) // 2, 2)
    names = sorted({row["rule"] for row in found})
    for axes, (trace, capacity) in zip(panels, places, strict=True):
        here = [r for r in found if (r["trace"], r["capacity"]) == (trace, capacity)]
        for index, name in enumerate(names):
            own = sorted((r["saved"], r["lost"], r["setting"]) for r in here if r["rule"] == name)
            xs, ys = [100 * p[0] for p in own], [100 * p[1] for p in own]
            axes.plot(xs, ys, **look(index), label=name)
            on = [p for p in own if (name, p[2]) in SHIPPED]
            axes.plot(
                [100 * p[0] for p in on],
                [100 * p[1] for p in on],
                "o",
                markersize=13,
                fillstyle="none",
                color="black",
            )
        axes.set(title=f"{trace}, {capacity} of all experts", xlim=(-5, 100), ylim=(0, 60))
        axes.set(xlabel="loads saved [%]", ylabel="routing weight lost [%]")
    panels[0].legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    save(figure, file)


def main() -> int:
    draw(rows(), FOLDER / "plots" / "price.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
