"""Every eviction on every shipped trace, on demand, by cycles: results/evictions.

Usage: python benchmarks/evictions.py [--out results/evictions]. About five minutes on one core.
Writes `cells.json.gz`, `costs.json.gz` (cells already there are kept), `table.md` and the plot.

A capacity of one cycle is the number of experts one token needs in all layers (layers x top-k).
Every expert takes one slot, whatever its layer's bytes, as in caches of equal slots. Every event
therefore fits, and Belady's rule attains the lower bound; gaps are measured from LRU to it.
Intervals are bootstrapped over blocks of sixteen passes of a trace, with the same draws for all
rules. Microseconds are the CPU time of the whole replay per request at two cycles, the lesser of
two replays on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import grid
from grid import Run
from pandas import DataFrame, Series

from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.ledger import total
from lm_eval_moecache.report.plots import legend, look, new_figure, save
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

CYCLES = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)
LEAST_GAP = 0.02
"""Of requests: if LRU and Belady differ by less, a share of the gap means nothing."""
BLOCK = 16
"""Passes in a row: the units that intervals draw."""
ENOUGH = 2
"""Cycles from which LRU is a fair baseline: it keeps the experts of the last two tokens."""
DRAWN = ("hazard", "lfru", "lfu", "w_tinylfu", "arc", "s3_fifo")
LRU, BELADY = "lru", "belady"
PLACE = ["trace", "cycles", "eviction"]


def evictions(trace: Trace) -> list[str]:
    """Return the rules whose inputs the trace has: no logits, and weights only if recorded."""
    has_none = trace.columns.weights is None

    def is_blind(rule: Any) -> bool:
        return rule.uses_logits or rule.pairs_with or (rule.uses_weights and has_none)

    names = algorithm_names("eviction")
    return [name for name in names if not is_blind(find_algorithm("eviction", name))]


def cells(capacities: Sequence[float] = CYCLES) -> Iterator[tuple[Run, tuple[Trace, Future]]]:
    for name, trace in grid.shipped_traces().items():
        geometry = trace.geometry
        # As if all experts were equally large.
        sizes = ((geometry.max_expert_bytes,),) * geometry.num_layers
        trace = replace(trace, geometry=replace(geometry, expert_bytes=sizes))
        inputs = trace, Future(trace)
        for cycles, eviction in product(capacities, evictions(trace)):
            if cycles * geometry.top_k < geometry.num_experts:
                yield {"trace": name, "cycles": cycles, "eviction": eviction}, inputs


def slots_of(cell: Run, trace: Trace) -> Setting:
    slots = round(cell["cycles"] * trace.geometry.num_layers * trace.geometry.top_k)
    return grid.setting_of(trace.geometry, f"{slots}experts", {"eviction": cell["eviction"]})


def measure(cell: Run, meaning: tuple[Trace, Future]) -> Run:
    trace, future = meaning
    setting = slots_of(cell, trace)
    passes = replay(trace, setting, future=future, cache_reset="never").ledger.passes
    blocks = (passes[start : start + BLOCK] for start in range(0, len(passes), BLOCK))
    misses = [sum(record.misses for record in block) for block in blocks]
    counts: Run = {"requests": total(passes).requests, "misses": misses}
    if cell["eviction"] == BELADY:
        counts["bound"] = fewest_misses(trace, setting, cache_reset="never")[0]
    return counts


def time_it(cell: Run, meaning: tuple[Trace, Future]) -> Run:
    """Return the shorter of two replays' times; the first may compile."""
    trace, future = meaning
    setting, costs_us = slots_of(cell, trace), []
    for _ in range(2):
        start_s = time.process_time()
        engine = replay(trace, setting, future=future, cache_reset="never")
        requests = sum(record.requests for record in engine.ledger.passes)
        costs_us.append(1e6 * (time.process_time() - start_s) / requests)
    return {"us_per_request": round(min(costs_us), 2)}


def rates_of(runs: Sequence[Run]) -> Series:
    """Return misses in percent of requests, by trace, cycles and eviction."""
    cells = grid.frame(runs).set_index(PLACE)
    return 100 * cells.misses.map(sum) / cells.requests


def gaps_of(runs: Sequence[Run]) -> DataFrame:
    """Return the percent of the gap that each rule closes: the estimate, then one column a draw."""
    cells = grid.frame(runs).set_index(PLACE)
    misses = DataFrame(
        [grid.draws(len(counts)) @ counts for counts in cells.misses], index=cells.index
    )
    places = misses.index.droplevel("eviction")
    lru, least = (
        misses.xs(name, level="eviction").loc[places].set_axis(misses.index)
        for name in (LRU, BELADY)
    )
    is_wide = lru[0] - least[0] >= LEAST_GAP * cells.requests
    return (100 * (lru - misses) / (lru - least))[is_wide]


def render(runs: Sequence[Run], costs: Sequence[Run]) -> str:
    """Rank rules by the median gap closed from two cycles on; below, LRU keeps almost nothing."""
    gaps, rates = gaps_of(runs), rates_of(runs)
    summary = _summary(gaps, grid.frame(costs).groupby("eviction").us_per_request.median())
    names = [row[0].strip("`") for row in summary]
    heads = ["Eviction", "median", "95%", "worst", f"median below {ENOUGH} cycles"]
    places = rates.unstack("eviction").sort_index().index

    def by_place(values: Series, chosen: Sequence[str], form: str) -> str:
        wide = values.map(form.format).unstack(["trace", "cycles"])
        rows = wide.reindex(index=chosen, columns=places).astype(object).fillna("")
        rows.index = [f"`{name}`" for name in chosen]
        columns = [f"{trace} {cycles:g}" for trace, cycles in places]
        return padded(["Eviction", *columns], rows.reset_index().to_numpy().tolist())

    others = [name for name in names if name != LRU]
    share = f"Percent of the gap between LRU and Belady closed, from {ENOUGH} cycles on"
    return grid.sections(
        {
            share: padded([*heads, "traces", "us/request"], summary),
            "The same by trace and cycles": by_place(gaps[0], others, "{:.0f}"),
            "Misses in percent of requests, by trace and cycles": by_place(rates, names, "{:.1f}"),
        }
    )


def _summary(gaps: DataFrame, costs: Series) -> list[list[Any]]:
    is_enough, rows = gaps.index.get_level_values("cycles") >= ENOUGH, []
    medians = gaps[is_enough].groupby("eviction").median()
    for name in medians[0].sort_values(ascending=False, kind="stable").index:
        above, below = (
            gaps[part].xs(name, level="eviction")[0] for part in (is_enough, ~is_enough)
        )
        low, high = grid.bounds(medians.loc[name].to_numpy())
        spread = "" if name in (LRU, BELADY) else f"[{low:.0f}, {high:.0f}]"
        figures = [f"{above.median():.0f}", spread, f"{above.min():.0f}", f"{below.median():.0f}"]
        traces = above.index.union(below.index).get_level_values("trace").nunique()
        rows.append([f"`{name}`", *figures, traces, f"{costs[name]:.1f}"])
    return rows


def draw(runs: Sequence[Run], file: Path) -> None:
    """One column per trace: misses above, gap closed below; rules not in DRAWN are grey."""
    rates, gaps = rates_of(runs), gaps_of(runs)[0]
    names, traces = gaps.index.unique("eviction"), sorted(gaps.index.unique("trace"))
    figure, panels = new_figure(2, len(traces))
    figure.set_size_inches(13, 8)
    named = {name: look(index) for index, name in enumerate(DRAWN)}
    named |= {LRU: {"color": "black", "linestyle": ":"}, BELADY: {"color": "black"}}
    lines: dict[str, object] = {}
    for column, trace in enumerate(traces):
        above, below = panels[column], panels[len(traces) + column]
        for name in sorted(names, key=lambda name: name in named):
            if name not in rates[trace].index.unique("eviction"):
                continue
            style = named.get(name, {"color": "0.8", "linewidth": 1})
            for axes, values in ((below, gaps), (above, rates)):
                curve = values[trace].xs(name, level="eviction").sort_index()
                [line] = axes.plot(curve.index, curve, **style)
            lines[name if name in named else "others"] = line
        geometry = grid.shipped_trace(trace).geometry
        all_cycles = geometry.num_experts / geometry.top_k
        above.set(title=f"{trace} (all experts: {all_cycles:.3g} cycles)", ylim=(0, 100))
        below.set(xlabel="capacity [token cycles]", ylim=(-60, 105))
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.set_xticks(CYCLES, [f"{cycles:g}" for cycles in CYCLES])
            axes.axvline(ENOUGH, color="0.6", linewidth=0.8, zorder=0)
    panels[0].set_ylabel("misses [% of requests]")
    panels[len(traces)].set_ylabel("gap from LRU to Belady closed [%]")
    order = [BELADY, *DRAWN, LRU, "others"]
    legend(figure, {name: lines[name] for name in order if name in lines})
    save(figure, file)


def main() -> None:
    out = grid.arguments(__doc__, out=grid.RESULTS / "evictions").out
    runs = grid.fill(out / "cells.json.gz", cells(), measure)
    costs = grid.fill(out / "costs.json.gz", cells([ENOUGH]), time_it)
    (out / "table.md").write_text(render(runs, costs))
    draw(runs, out / "plots" / "gap.svg")


if __name__ == "__main__":
    main()
