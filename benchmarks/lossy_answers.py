"""Prints the table and draws the plot of results/lossy_answers on real routing.

Usage: python benchmarks/lossy_answers.py, less than a minute on one core, after
`moecache sweep results/lossy_answers/routing/sweep.yaml`.

The plot: loads saved are the bytes not moved, relative to loading everything with the same cache;
weight lost is the routing weight of dropped or replaced experts over the decoded tokens.

The table: misses avoided and weight lost by drop_cold, with its authors' figures. BigMoeOnEdge
(docs/expert-dropping.md) recorded the residency of its engine while it loaded everything and
counted the decode misses below F / top-k; `static` does the same in the cache of a replay that
loads everything. `replayed` drops them, so the cache never loads them. The recorded residencies are
those of 4000 MiB (80.3 and 81.9% hits in their curves).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from grid import RESULTS, setting_of, shipped_trace, text_table

from lm_eval_moecache.algorithms.miss.base import weight_shares
from lm_eval_moecache.algorithms.miss.drops import DropCold
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import total
from lm_eval_moecache.report.plots import legend, look, new_figure, save
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.trace.trace import Trace

FOLDER = RESULTS / "lossy_answers"
SHIPPED = {("drop_cold", "0.75"): "BigMoeOnEdge's app"}
"""Settings that an engine enables by default; all others are off unless requested."""
FIXED = ("miss.rescue", "routing.k_min")
"""Parameters that are the same in all runs of a rule."""
THEIRS = {
    ("qwen3-30b-a3b", 1.0): "66.3% / 9.5%",
    ("qwen3-30b-a3b", 0.75): "36.8% / 4.4%",
    ("gemma-4-26b-a4b", 1.0): "67.4% / 8.2%",
}
"""Trace and factor -> misses avoided and weight lost."""
Row = dict[str, Any]


class Shadow(DropCold):
    """Counts the experts that drop_cold would drop, but loads them."""

    def __init__(self, geometry: Geometry, *, seed: int = 0, factor: float = 1.0) -> None:
        super().__init__(geometry, seed=seed, factor=factor)
        self.missed = self.cold = 0
        self.lost = 0.0

    def choose(self, event: Event) -> None:
        shares = weight_shares(event.experts, event.weights)
        is_cold = event.is_missing & (shares < self.factor / self.geometry.top_k)
        self.missed += int(event.is_missing.sum())
        self.cold += int(is_cold.sum())
        self.lost += float(shares[is_cold].sum())


def dropped(trace: Trace, miss: str, factor: float) -> list[str]:
    """Return misses avoided / weight lost, and the miss rate, all while decoding."""
    chosen = {"miss": miss, "miss.factor": factor, "eviction": "tail_lru", "phases": "decode"}
    engine = replay(trace, setting_of(trace.geometry, "4000MiB", chosen), cache_reset="never")
    passes, rule = total(p for p in engine.ledger.passes if p.phase == DECODE), engine.rules.miss
    if isinstance(rule, Shadow):
        tokens = passes.token_requests / trace.geometry.top_k
        avoided, lost = rule.cold / rule.missed, rule.lost / tokens
    else:
        avoided, lost = passes.avoided / passes.misses, passes.lost_weight / passes.weighed_tokens
    return [f"{avoided:.1%} / {lost:.1%}", f"{passes.misses / passes.requests:.1%}"]


def rows() -> list[Row]:
    points = []
    for run in load_runs(FOLDER / "routing"):
        keys, totals = run.model_args, run.moecache["totals"]
        axis = next(axis for axis in ("miss", "routing", "eviction") if axis in keys)
        swept = [k for k in keys if k.startswith(f"{axis}.") and k not in FIXED]
        row = {"place": (Path(keys["trace"]).stem, keys["capacity"]), "rule": keys[axis]}
        row["setting"] = str(keys[swept[0]]) if swept else ""
        points.append({**row, "bytes": totals["bytes_moved"], "lost": totals["lost_weight_share"]})
    base = {row["place"]: row["bytes"] for row in points if row["rule"] == "lru"}
    lossy = [row for row in points if row["rule"] != "lru"]
    return [{**row, "saved": 1 - row["bytes"] / base[row["place"]]} for row in lossy]


def draw(found: list[Row], file: Path) -> None:
    """One panel per trace and capacity: a curve per rule, rings for settings on by default."""
    places = sorted({row["place"] for row in found})
    figure, panels = new_figure(len(places) // 2, 2)
    names = sorted({row["rule"] for row in found})
    series = {}
    for axes, (trace, capacity) in zip(panels, places, strict=True):
        for index, name in enumerate(names):
            matching = [r for r in found if (r["place"], r["rule"]) == ((trace, capacity), name)]
            points = sorted((100 * r["saved"], 100 * r["lost"], r["setting"]) for r in matching)
            (series[name],) = axes.plot(
                [x for x, _, _ in points], [y for _, y, _ in points], **look(index)
            )
            for x, y, setting in points:
                if maker := SHIPPED.get((name, setting)):
                    ring = {"markersize": 13, "fillstyle": "none", "color": "black"}
                    (ringed,) = axes.plot([x], [y], "o", **ring)
                    series[f"{name}={setting}, on by default in {maker}"] = ringed
        axes.set(title=f"{trace}, {capacity} of all experts", xlim=(-5, 85), ylim=(0, 60))
        axes.set(xlabel="loads saved [%]", ylabel="routing weight lost [%]")
    legend(figure, series)
    save(figure, file)


def main() -> None:
    draw(rows(), FOLDER / "plots" / "price.svg")
    table = []
    for name, factor in product(("qwen3-30b-a3b", "gemma-4-26b-a4b"), (1.0, 0.75)):
        trace = shipped_trace(name)
        static = dropped(trace, f"{__name__}.Shadow", factor)
        replayed = dropped(trace, "drop_cold", factor)
        claim = THEIRS.get((name, factor), "-")
        table.append([name, f"{factor:g}", claim, static[0], replayed[0], static[1], replayed[1]])
    headers = ["trace", "F", "reported", "static", "replayed", "misses, static", "replayed"]
    print(text_table(headers, table))


if __name__ == "__main__":
    main()
