"""Tables and plots of results/real_routing from its runs. Usage: python FILE [--out FOLDER]."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.report.mpl_style import new_figure, save

Run = dict[str, Any]
SHARES = ("5%", "10%", "25%", "50%")
DRAWN = ("lru", "lfu", "layered_lru", "least_stale", "fld forward", "hazard", "belady")


def closed(runs: Sequence[Run]) -> str:
    """Share of the gap between LRU and Belady that each eviction closes, in percent."""
    at = {(r["cell"]["trace"], r["cell"]["capacity"], r["cell"]["eviction"]): r for r in bare(runs)}
    places = [(t, s) for t in traces(runs) for s in SHARES if (t, s, "belady") in at]
    writer = MarkdownTableWriter()
    writer.headers = ["Eviction", *(f"{t} {s}" for t, s in places), "median", "us/request"]
    rows = []
    for eviction in dict.fromkeys(r["cell"]["eviction"] for r in bare(runs)):
        found = []
        for trace, share in places:
            lru, bound, own = (
                at[trace, share, e]["miss_rate"] for e in ("lru", "belady", eviction)
            )
            found.append(100 * (lru - own) / (lru - bound))
        costs = sorted(at[t, s, eviction]["us_per_request"] for t, s in places)
        cells = [f"{value:.0f}" for value in [*found, middle(found)]]
        rows.append([eviction, *cells, f"{middle(costs):.1f}"])
    writer.value_matrix = sorted(rows, key=lambda row: -float(row[-2]))
    return str(writer.dumps())


def misses(runs: Sequence[Run]) -> str:
    """Misses / collisions in percent of requests, on demand, over token cycles."""
    chosen = [r for r in bare(runs) if "cycles" in r["cell"]["capacity"]]
    return grid(chosen, lambda r: f"{r['cell']['trace']} {r['cycles']:.2f} cycles", rates)


def foreseen(runs: Sequence[Run]) -> str:
    """The same with predictors, where an expert moves in 0.02 of a layer's time."""
    chosen = [r for r in runs if "recall" in r["cell"] and r["cell"]["ratio"] == 0.02]
    return grid(chosen, told, rates)


def speeds(runs: Sequence[Run]) -> str:
    """Milliseconds a token over transfer / layer, at two cycles."""
    chosen = [r for r in runs if "recall" in r["cell"] and r["cell"]["capacity"] == "2 cycles"]
    return grid(
        chosen,
        lambda r: f"{told(r)} x{r['cell']['ratio']:g}",
        lambda r: f"{r['tpot_ms']:.2f} ({100 * r['miss_rate']:.0f}%)",
    )


def told(run: Run) -> str:
    cell = run["cell"]
    quality = f"{cell['recall']:g}/{cell['precision']:g}"
    return f"{cell['trace']} {run['cycles']:.2f} cycles {quality}"


def rates(run: Run) -> str:
    return f"{100 * run['miss_rate']:.1f} / {100 * run['collision_miss_rate']:.2f}"


def grid(runs: Iterable[Run], row: Callable[[Run], str], value: Callable[[Run], str]) -> str:
    cells: dict[str, dict[str, str]] = {}
    for run in runs:
        cells.setdefault(row(run), {})[run["cell"]["eviction"]] = value(run)
    names = list(dict.fromkeys(name for own in cells.values() for name in own))
    writer = MarkdownTableWriter()
    writer.headers = ["", *names]
    writer.value_matrix = [[at, *(own.get(n, "") for n in names)] for at, own in cells.items()]
    return str(writer.dumps())


def bare(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if "recall" not in run["cell"]]


def traces(runs: Sequence[Run]) -> list[str]:
    return sorted({run["cell"]["trace"] for run in runs})


def middle(values: Sequence[float]) -> float:
    ranked, half = sorted(values), len(values) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def draw(runs: Sequence[Run], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = traces(runs)
    for field, label in (("miss_rate", "misses"), ("collision_miss_rate", "collision misses")):
        figure, panels = new_figure(len(names))
        for axes, trace in zip(panels, names, strict=True):
            for eviction in DRAWN:
                own = [r for r in bare(runs) if r["cell"]["trace"] == trace]
                own = [r for r in own if r["cell"]["eviction"] == eviction]
                own = sorted(own, key=lambda r: r["cycles"])
                style = "--" if eviction == "belady" else "-"
                xs, ys = [r["cycles"] for r in own], [r[field] for r in own]
                axes.plot(xs, ys, style, marker=".", label=eviction)
            axes.set_title(trace)
            axes.set_xlabel("capacity [token cycles]")
            axes.set_xscale("log", base=2)
            axes.set_ylabel(f"{label} / requests, on demand")
        panels[0].legend(fontsize="small")
        save(figure, folder / f"{field}.svg")
    figure, panels = new_figure(len(names))
    for axes, trace in zip(panels, names, strict=True):
        for eviction in ("lru", "least_stale", "least_stale none", "hazard"):
            own = [r for r in runs if r["cell"]["trace"] == trace and "recall" in r["cell"]]
            own = [r for r in own if r["cell"]["eviction"] == eviction]
            own = [r for r in own if r["cell"]["capacity"] == "2 cycles"]
            own = [r for r in own if r["cell"]["precision"] == 0.63]
            own = sorted(own, key=lambda r: r["cell"]["ratio"])
            speeds = [1e3 / r["tpot_ms"] for r in own]
            axes.plot([r["cell"]["ratio"] for r in own], speeds, marker=".", label=eviction)
        axes.set_title(trace)
        axes.set_xscale("log")
        axes.set_xlabel("transfer of one expert / layer")
        axes.set_ylabel("tok/s, 2 cycles, recall 0.95")
    panels[0].legend(fontsize="small")
    save(figure, folder / "speed.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/real_routing"))
    out = parser.parse_args().out
    runs = load(out)
    (out / "table.md").write_text(render(runs))
    draw(runs, out / "plots")


def load(folder: Path) -> list[Run]:
    found: list[Run] = json.loads(gzip.decompress((folder / "cells.json.gz").read_bytes()))
    return found


def render(runs: Sequence[Run]) -> str:
    parts = [
        ("Closed of the gap between LRU and Belady, percent, on demand", closed(runs)),
        ("On demand: misses / collisions, percent of requests", misses(runs)),
        ("With predictors (recall/precision), transfer / layer 0.02: the same", foreseen(runs)),
        ("ms a token (misses) at 2 cycles over transfer / layer", speeds(runs)),
    ]
    return "\n".join(f"## {title}\n\n{table}" for title, table in parts)


if __name__ == "__main__":
    main()
