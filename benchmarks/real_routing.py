"""Replays real routing over evictions, predictors, capacities and links: results/real_routing.

Usage: python benchmarks/real_routing.py [--out results/real_routing]. A few minutes on one core.
Writes `cells.json.gz` (cells already there are kept), `table.md` and the plots.

Capacity is in token cycles (layers x top-k) and the link's speed is a ratio: one expert's transfer
takes `ratio` times as long as a layer's decode step without waiting. Dense sizes and kernels are
those of the trace's model on `a100-5GBps`; transfers have no latency.

The traces have no gates, and OLMoE's has no routing weights: predictors are oracles of stated
recall and precision, and score eviction is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grid import RESULTS, Run, arguments, fill, frame, sections, setting_of, shipped_traces
from pandas import DataFrame, Series

from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.plots import new_figure, save
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

PLAIN = "lru lfu fifo random fld shallow_first frequency_layer layered_lru lfru least_stale hazard"
EVICTIONS: dict[str, dict[str, Any]] = {
    **{name: {"eviction": name} for name in [*PLAIN.split(), "belady"]},
    "fld forward": {"eviction": "fld", "eviction.distance": "forward"},
    "least_stale none": {"eviction": "least_stale", "eviction.protect": "none"},
}
SHOWN = {
    "fld forward": "fld, distance=forward",
    "least_stale none": "least_stale, protect=none",
}
"""Variant -> how tables and plots name it: the rule and the parameter that differs."""
FEW = ("lru", "least_stale", "least_stale none", "hazard")
DRAWN = ("lru", "lfu", "layered_lru", "least_stale", "fld forward", "hazard", "belady")
SHARES = (5, 10, 25, 50)
"""Percent of all experts, as in the published figures and the targets for `hazard`."""
CYCLES = (0.5, 1, 2, 4, 8)
RATIOS = (0.02, 0.2, 1.0, 10.0)


def cells() -> Iterator[tuple[Run, tuple[Trace, Future]]]:
    for name, trace in shipped_traces().items():
        inputs = trace, Future(trace)
        yield from (({"trace": name, **cell}, inputs) for cell in cells_of(trace))


def cells_of(trace: Trace) -> Iterator[Run]:
    geometry = trace.geometry
    cycle, count = geometry.num_layers * geometry.top_k, geometry.num_layers * geometry.num_experts
    sizes = {f"{c:g} cycles": round(c * cycle) for c in CYCLES if c * cycle <= count}
    sizes |= {f"{share}%": count * share // 100 for share in SHARES}
    for capacity, experts in sizes.items():
        for eviction in EVICTIONS:
            yield {"capacity": capacity, "experts": experts, "eviction": eviction, "ratio": 1.0}
    # A gate's top-k has equal recall and precision. The last predictor proposes half as many
    # again: higher recall, lower precision.
    qualities = [((q, q), (0.5, 2), RATIOS[:1]) for q in (0.75, 0.85, 0.95)]
    qualities += [((0.85, 0.85), (2,), RATIOS[1:]), ((0.95, 0.63), (2,), RATIOS)]
    for eviction in FEW:
        for (recall, precision), capacities, ratios in qualities:
            for cycles in capacities:
                size = {"capacity": f"{cycles:g} cycles", "experts": round(cycles * cycle)}
                for ratio in ratios:
                    oracle = {"recall": recall, "precision": precision}
                    yield {**size, "eviction": eviction, "ratio": ratio, **oracle}


def measure(cell: Run, known: tuple[Trace, Future]) -> Run:
    trace, future = known
    geometry, oracle = trace.geometry, {k: cell[k] for k in ("recall", "precision") if k in cell}
    overrides = {**EVICTIONS[cell["eviction"]], "prefetch": "oracle" if oracle else "none"}
    overrides |= {f"prefetch.{name}": value for name, value in oracle.items()}
    # A share is of all bytes; a number counts experts of the largest layer's size.
    text = cell["capacity"] if cell["capacity"].endswith("%") else f"{cell['experts']}experts"
    hardware = link_of(trace, cell["ratio"])
    setting = replace(setting_of(geometry, text, overrides), hardware=hardware)
    start_s = time.process_time()
    engine = replay(trace, setting, future=future, cache_reset="never")
    cpu_s = time.process_time() - start_s
    metrics = task_metrics(engine.ledger.requests, engine.peak_cache_bytes)
    requests = sum(record.requests for record in engine.ledger.passes)
    regime = regime_of(geometry, setting.capacity.total_bytes, hardware)
    names = ("miss_rate", "decode_miss_rate", "late_rate", "collision_miss_rate", "bytes_moved")
    return {
        **{name: metrics[name] for name in (*names, "stall_ms_per_token")},
        "cycles": regime.cycles,
        "layer_s": regime.compute_s + regime.launches_s,
        "prefetch_hit_rate": metrics["prefetch_hits"] / requests,
        # None without a prefill.
        "ttft_ms": metrics["ttft_ms"]["mean"] if "ttft_ms" in metrics else None,
        "tpot_ms": metrics["tpot_ms"]["mean"],
        "us_per_request": round(1e6 * cpu_s / requests, 2),
    }


def link_of(trace: Trace, ratio: float) -> Hardware:
    """Return the machine on which one expert's transfer takes as long as `ratio` layers."""
    base = replace(load_hardware("a100-5GBps"), link_latency_s=0.0)
    regime = regime_of(trace.geometry, trace.geometry.total_expert_bytes, base)
    layer_s = regime.compute_s + regime.launches_s
    mean = sum(levels[0] for levels in trace.geometry.expert_bytes) / trace.geometry.num_layers
    return replace(base, link_bytes_per_s=mean / (ratio * layer_s))


def render(runs: Sequence[Run]) -> str:
    cells = frame(runs)
    is_predicted, two_cycles = cells.recall.notna(), cells.capacity == "2 cycles"
    rows = cells.trace + cells.cycles.map(" {:.2f} cycles".format)
    settings = rows + cells.recall.map(" {:g}".format) + cells.precision.map("/{:g}".format)
    misses, collisions = 100 * cells.miss_rate, 100 * cells.collision_miss_rate
    rates = misses.map("{:.1f}".format) + collisions.map(" / {:.2f}".format)
    speeds = cells.tpot_ms.map("{:.2f}".format) + misses.map(" ({:.0f}%)".format)
    plain = cells[~is_predicted & cells.capacity.str.endswith("cycles")]
    of_two = "ms a token (misses) at 2 cycles over transfer / layer"
    return sections(
        {
            "Closed of the gap between LRU and Belady, percent, on demand": closed(
                cells[~is_predicted & cells.capacity.str.endswith("%")]
            ),
            "On demand: misses / collisions, percent of requests": by_eviction(plain, rows, rates),
            "With predictors (recall/precision), transfer / layer 0.02: the same": by_eviction(
                cells[is_predicted & (cells.ratio == 0.02)], settings, rates
            ),
            of_two: by_eviction(
                cells[is_predicted & two_cycles],
                settings + cells.ratio.map(" x{:g}".format),
                speeds,
            ),
        }
    )


def closed(cells: DataFrame) -> str:
    """Table of the percentage of the gap between LRU and Belady that each eviction closes."""
    rates = cells.pivot(index="eviction", columns=["trace", "capacity"], values="miss_rate")
    places = [(trace, f"{share}%") for trace in sorted(cells.trace.unique()) for share in SHARES]
    rates, costs = rates[places], cells.groupby("eviction").us_per_request.median()
    gaps = 100 * (rates.loc["lru"] - rates) / (rates.loc["lru"] - rates.loc["belady"])
    rows = []
    for eviction in cells.eviction.unique():
        percents = [*gaps.loc[eviction], gaps.loc[eviction].median()]
        name, cost = SHOWN.get(eviction, eviction), f"{costs[eviction]:.1f}"
        rows.append([name, *(f"{gap:.0f}" for gap in percents), cost])
    headers = ["Eviction", *(" ".join(place) for place in places), "median", "us/request"]
    return padded(headers, sorted(rows, key=lambda row: -float(row[-2])))


def by_eviction(cells: DataFrame, at: Series, texts: Series) -> str:
    """Table of `texts` with one row per value of `at` and one column per eviction."""
    wide = cells.assign(at=at, text=texts).pivot(index="at", columns="eviction", values="text")
    wide = wide.loc[at[cells.index].unique(), cells.eviction.unique()].fillna("")
    heads = [SHOWN.get(eviction, eviction) for eviction in wide.columns]
    return padded(["", *heads], wide.reset_index().to_numpy().tolist())


def draw(runs: Sequence[Run], folder: Path) -> None:
    cells = frame(runs)
    cells["tok_per_s"] = 1e3 / cells.tpot_ms
    demand, two_cycles = cells[cells.recall.isna()], cells[cells.capacity == "2 cycles"]
    for field, label in (("miss_rate", "misses"), ("collision_miss_rate", "collision misses")):
        labels = "capacity [token cycles]", f"{label} / requests, on demand", 2
        lines(demand, "cycles", field, DRAWN, labels, folder / f"{field}.svg")
    labels = "transfer of one expert / layer", "tok/s, 2 cycles, recall 0.95", 10
    predicted = two_cycles[two_cycles.precision == 0.63]
    lines(predicted, "ratio", "tok_per_s", FEW, labels, folder / "speed.svg")


def lines(
    cells: DataFrame,
    x: str,
    y: str,
    evictions: Sequence[str],
    labels: tuple[str, str, int],
    file: Path,
) -> None:
    """One panel per trace, one line per eviction; `labels` are the axes' and the log base of x."""
    traces = cells.groupby("trace")
    figure, panels = new_figure(len(traces))
    for axes, (trace, at) in zip(panels, traces, strict=True):
        for eviction in evictions:
            curve = at[at.eviction == eviction].sort_values([x, y])
            style = "--" if eviction == "belady" else "-"
            axes.plot(curve[x], curve[y], style, marker=".", label=SHOWN.get(eviction, eviction))
        axes.set_title(trace)
        axes.set_xscale("log", base=labels[2])
        axes.set(xlabel=labels[0], ylabel=labels[1])
    panels[0].legend(fontsize="small")
    save(figure, file)


def main() -> None:
    out = arguments(__doc__, out=RESULTS / "real_routing").out
    runs = fill(out / "cells.json.gz", cells(), measure)
    (out / "table.md").write_text(render(runs))
    draw(runs, out / "plots")


if __name__ == "__main__":
    main()
