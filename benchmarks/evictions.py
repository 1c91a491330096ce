"""Every eviction on every shipped trace, on demand, by cycles: results/evictions.

Usage: python benchmarks/evictions.py [--out results/evictions]. About five minutes of one core.
Writes `cells.json.gz`, `costs.json.gz` (what is there already is kept), `table.md` and the plot.

A capacity of one cycle is what one token needs on its way through the model (layers x top-k), in
slots: each expert counts as one, whatever its layer's bytes, as in caches of equal slots. So every
event fits, and Belady's rule is the bound itself: the gap is between LRU and it. Intervals are of
draws of blocks of sixteen passes of a trace, the same draws for all rules. Microseconds are the
CPU time of the whole replay over its requests at two cycles, the lesser of two, of one machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from grid import RESULTS, TRACES, Floats, Run, fill, sections, setting_of, shipped_traces, table
from routing_claims import BLOCK, draws

from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.report.mpl_style import legend, look, new_figure, save
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

CYCLES = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)
LEAST_GAP = 0.02
"""Of requests: where LRU and Belady differ by less, a share of it would be a share of nothing."""
ENOUGH = 2
"""Cycles from which on LRU keeps enough to be the yardstick: a token before the last one's."""
DRAWN = ("hazard", "lfru", "lfu", "w_tinylfu", "arc", "s3_fifo")
LRU, BELADY = "lru", "belady"
Place = tuple[str, float]
"""A trace and a capacity in cycles."""


def evictions(trace: Trace) -> list[str]:
    """Return the rules that see what the trace has: no logits, no scores without weights."""
    has_weights = trace.columns.weights is not None
    return [
        name
        for name in algorithm_names("eviction")
        if not (rule := find_algorithm("eviction", name)).uses_logits
        and not rule.pairs_with
        and (has_weights or not rule.uses_weights)
    ]


def cells(
    capacities: Sequence[float] = CYCLES,
) -> Iterator[tuple[Run, tuple[Trace, Future]]]:
    for name, shipped in shipped_traces():
        trace = in_slots(shipped)
        future = Future(trace)
        for cycles in capacities:
            if cycles * trace.geometry.top_k < trace.geometry.num_experts:
                for eviction in evictions(trace):
                    cell = {"trace": name, "cycles": cycles, "eviction": eviction}
                    yield cell, (trace, future)


def in_slots(trace: Trace) -> Trace:
    """Return the trace of a model whose experts are equally large."""
    geometry = trace.geometry
    sizes = ((geometry.max_expert_bytes,),) * geometry.num_layers
    return replace(trace, geometry=replace(geometry, expert_bytes=sizes))


def slots_of(cell: Run, trace: Trace) -> Setting:
    slots = round(cell["cycles"] * trace.geometry.num_layers * trace.geometry.top_k)
    return setting_of(trace.geometry, str(slots), {"eviction": cell["eviction"]})


def measure(cell: Run, meaning: tuple[Trace, Future]) -> Run:
    trace, future = meaning
    setting = slots_of(cell, trace)
    passes = replay(trace, setting, future=future).ledger.passes
    found: Run = {
        "requests": sum(record.requests for record in passes),
        "misses": [
            sum(record.misses for record in passes[start : start + BLOCK])
            for start in range(0, len(passes), BLOCK)
        ],
    }
    if cell["eviction"] == BELADY:
        found["bound"] = fewest_misses(trace, setting)[0]
    return found


def time_it(cell: Run, meaning: tuple[Trace, Future]) -> Run:
    """Return the lesser of two replays' time: the first may compile."""
    trace, future = meaning
    setting, found = slots_of(cell, trace), []
    for _ in range(2):
        start_s = time.process_time()
        engine = replay(trace, setting, future=future)
        requests = sum(record.requests for record in engine.ledger.passes)
        found.append(1e6 * (time.process_time() - start_s) / requests)
    return {"us_per_request": round(min(found), 2)}


def closed(runs: Sequence[Run]) -> dict[str, dict[Place, Floats]]:
    """Return the percent of the gap that each rule closes: as it is first, then of each draw."""
    misses: dict[tuple[str, Place], Floats] = {}
    requests = {place_of(run): run["requests"] for run in runs}
    for run in runs:
        drawn = draws(len(run["misses"])) @ np.asarray(run["misses"], dtype=np.float64)
        misses[run["cell"]["eviction"], place_of(run)] = drawn
    found: dict[str, dict[Place, Floats]] = {}
    for (eviction, place), own in misses.items():
        lru, least = misses[LRU, place], misses[BELADY, place]
        if lru[0] - least[0] < LEAST_GAP * requests[place]:
            continue
        found.setdefault(eviction, {})[place] = 100 * (lru - own) / (lru - least)
    return found


def place_of(run: Run) -> Place:
    return run["cell"]["trace"], run["cell"]["cycles"]


def render(runs: Sequence[Run], costs: Sequence[Run]) -> str:
    """Rules by the median gap closed from two cycles on; below, LRU keeps next to nothing."""
    gaps = closed(runs)
    names = sorted(gaps, key=lambda name: -_median(gaps[name])[0])
    shown = [name for name in names if name != LRU]
    places = sorted({place_of(run) for run in runs})
    rates = {
        (run["cell"]["eviction"], place_of(run)): 100 * sum(run["misses"]) / run["requests"]
        for run in runs
    }
    parts = [
        (
            f"Percent of the gap between LRU and Belady closed, from {ENOUGH} cycles on",
            _summary(costs, gaps, names),
        ),
        ("The same by trace and cycles", _by_place(shown, places, gaps, "{:.0f}")),
        (
            "Misses in percent of requests, by trace and cycles",
            _by_place(names, places, {n: _of(rates, n) for n in names}, "{:.1f}"),
        ),
    ]
    return sections(parts)


def _median(gaps: Mapping[Place, Floats], enough: bool = True) -> Floats:
    """Return the median over the cells with so many cycles: of all, then of each draw."""
    chosen = [gap for (_, cycles), gap in gaps.items() if (cycles >= ENOUGH) == enough]
    found: Floats = np.median(np.stack(chosen), axis=0)
    return found


def _summary(
    costs: Sequence[Run], gaps: Mapping[str, Mapping[Place, Floats]], names: Sequence[str]
) -> str:
    rows = []
    for name in names:
        middle = _median(gaps[name])
        low, high = np.percentile(middle[1:], [2.5, 97.5])
        alone = {place: float(gap[0]) for place, gap in gaps[name].items()}
        worst = min(gap for (_, cycles), gap in alone.items() if cycles >= ENOUGH)
        own = [run["us_per_request"] for run in costs if run["cell"]["eviction"] == name]
        traces = len({trace for trace, _ in alone})
        below = _median(gaps[name], enough=False)[0]
        interval = f"[{low:.0f}, {high:.0f}]"
        figures = [f"{middle[0]:.0f}", interval, f"{worst:.0f}", f"{below:.0f}"]
        if name in (LRU, BELADY):
            figures[1] = ""
        rows.append([f"`{name}`", *figures, traces, f"{median(own):.1f}"])
    headers = ["Eviction", "median", "95%", "worst", f"median below {ENOUGH} cycles"]
    return table([*headers, "traces", "us/request"], rows)


def _of(rates: Mapping[tuple[str, Place], float], name: str) -> dict[Place, list[float]]:
    return {place: [rate] for (eviction, place), rate in rates.items() if eviction == name}


def _by_place(
    names: Sequence[str],
    places: Sequence[Place],
    values: Mapping[str, Mapping[Place, Floats | list[float]]],
    form: str,
) -> str:
    rows = [
        [f"`{name}`", *(form.format(own[p][0]) if p in own else "" for p in places)]
        for name in names
        for own in [values[name]]
    ]
    return table(["Eviction", *(f"{trace} {cycles:g}" for trace, cycles in places)], rows)


def draw(runs: Sequence[Run], file: Path) -> None:
    """A column a trace: misses above, gap closed below; grey are the rules not named."""
    gaps = closed(runs)
    traces = sorted({trace for trace, _ in gaps[LRU]})
    figure, panels = new_figure(2, len(traces))
    figure.set_size_inches(13, 8)
    named = {name: look(index) for index, name in enumerate(DRAWN)}
    named |= {LRU: {"color": "black", "linestyle": ":"}, BELADY: {"color": "black"}}
    lines: dict[str, object] = {}
    for column, trace in enumerate(traces):
        above, below = panels[column], panels[len(traces) + column]
        for name in sorted(gaps, key=lambda name: name in named):
            own = sorted(
                (run["cell"]["cycles"], 100 * sum(run["misses"]) / run["requests"])
                for run in runs
                if (run["cell"]["trace"], run["cell"]["eviction"]) == (trace, name)
            )
            if not own:
                continue
            style = named.get(name, {"color": "0.8", "linewidth": 1})
            [line] = above.plot(*zip(*own, strict=True), **style)
            lines[name if name in named else "others"] = line
            points = sorted((n, gap[0]) for (t, n), gap in gaps[name].items() if t == trace)
            below.plot(*zip(*points, strict=True), **style)
        geometry = load_trace(str(TRACES / f"{trace}.parquet")).geometry
        every = geometry.num_experts / geometry.top_k
        above.set(title=f"{trace} (all experts: {every:.3g} cycles)", ylim=(0, 100))
        below.set(xlabel="capacity [token cycles]", ylim=(-60, 105))
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.set_xticks(CYCLES, [f"{cycles:g}" for cycles in CYCLES])
            axes.axvline(ENOUGH, color="0.6", linewidth=0.8, zorder=0)
    panels[0].set_ylabel("misses [% of requests]")
    panels[len(traces)].set_ylabel("gap from LRU to Belady closed [%]")
    order = [BELADY, *DRAWN, LRU, "others"]
    legend(figure, {name: lines[name] for name in order if name in lines})
    file.parent.mkdir(parents=True, exist_ok=True)
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "evictions")
    out = parser.parse_args().out
    runs = fill(out / "cells.json.gz", cells(), measure)
    costs = fill(out / "costs.json.gz", cells([ENOUGH]), time_it)
    (out / "table.md").write_text(render(runs, costs))
    draw(runs, out / "plots" / "gap.svg")


if __name__ == "__main__":
    main()
