"""Replays real routing over evictions, predictors, capacities and links: results/real_routing.

Usage: python benchmarks/real_routing.py [--out results/real_routing]. A few minutes of one core.
Writes `cells.json.gz` (cells that are there already are kept), `table.md` and the plots.

Capacity is in token cycles (layers x top-k), the link in transfers: an expert takes `ratio` times
as long to move as a layer's decode step takes without waiting. Dense sizes and kernels are those
of the trace's model on the profile `a100-5GBps`; transfers have no latency of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from grid import RESULTS, Run, fill, sections, setting_of, shipped_traces, table

from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.mpl_style import new_figure, save
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

PLAIN = "lru lfu fifo random fld shallow_first frequency_layer layered_lru lfru least_stale hazard"
EVICTIONS: dict[str, dict[str, Any]] = {
    **{name: {"eviction": name} for name in [*PLAIN.split(), "belady"]},
    "fld forward": {"eviction": "fld", "eviction.distance": "forward"},
    "least_stale none": {"eviction": "least_stale", "eviction.protect": "none"},
}
FEW = ("lru", "least_stale", "least_stale none", "hazard")
DRAWN = ("lru", "lfu", "layered_lru", "least_stale", "fld forward", "hazard", "belady")
SHARES = (5, 10, 25, 50)
"""Percent of all experts: where the published figures and the bars of `hazard` are."""
CYCLES = (0.5, 1, 2, 4, 8)
RATIOS = (0.02, 0.2, 1.0, 10.0)


def cells() -> Iterator[tuple[Run, tuple[Trace, Future]]]:
    for name, trace in shipped_traces():
        future = Future(trace)
        for cell in cells_of(trace):
            yield {"trace": name, **cell}, (trace, future)


def cells_of(trace: Trace) -> Iterator[Run]:
    geometry = trace.geometry
    cycle, every = geometry.num_layers * geometry.top_k, geometry.num_layers * geometry.num_experts
    sizes = {f"{c:g} cycles": round(c * cycle) for c in CYCLES if c * cycle <= every}
    sizes |= {f"{share}%": every * share // 100 for share in SHARES}
    for capacity, experts in sizes.items():
        for eviction in EVICTIONS:
            yield {"capacity": capacity, "experts": experts, "eviction": eviction, "ratio": 1.0}
    # The recall of a gate's top-k is its precision, too. The last proposes half as many again:
    # more of what is needed, and more that is not.
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
    # A share is of bytes; a number counts experts as large as the largest layer's.
    text = cell["capacity"] if cell["capacity"].endswith("%") else str(cell["experts"])
    hardware = link_of(trace, cell["ratio"])
    setting = replace(setting_of(geometry, text, overrides), hardware=hardware)
    start_s = time.process_time()
    engine = replay(trace, setting, future=future)
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
        # A trace of decoded tokens alone has none.
        "ttft_ms": metrics["ttft_ms"]["mean"] if "ttft_ms" in metrics else None,
        "tpot_ms": metrics["tpot_ms"]["mean"],
        "us_per_request": round(1e6 * cpu_s / requests, 2),
    }


def link_of(trace: Trace, ratio: float) -> Hardware:
    """Return the machine on which one expert moves in `ratio` layers' time."""
    base = replace(load_hardware("a100-5GBps"), link_latency_s=0.0)
    regime = regime_of(trace.geometry, trace.geometry.total_expert_bytes, base)
    layer_s = regime.compute_s + regime.launches_s
    mean = sum(levels[0] for levels in trace.geometry.expert_bytes) / trace.geometry.num_layers
    return replace(base, link_bytes_per_s=mean / (ratio * layer_s))


def render(runs: Sequence[Run]) -> str:
    foreseen = [run for run in runs if "recall" in run["cell"]]
    in_cycles = [run for run in on_demand(runs) if "cycles" in run["cell"]["capacity"]]
    fast = [run for run in foreseen if run["cell"]["ratio"] == 0.02]
    two = [run for run in foreseen if run["cell"]["capacity"] == "2 cycles"]
    at = "{cell[trace]} {cycles:.2f} cycles"
    told = at + " {cell[recall]:g}/{cell[precision]:g}"
    parts = [
        ("Closed of the gap between LRU and Belady, percent, on demand", closed(runs)),
        ("On demand: misses / collisions, percent of requests", by_eviction(in_cycles, at, rates)),
        (
            "With predictors (recall/precision), transfer / layer 0.02: the same",
            by_eviction(fast, told, rates),
        ),
        (
            "ms a token (misses) at 2 cycles over transfer / layer",
            by_eviction(
                two,
                told + " x{cell[ratio]:g}",
                lambda run: f"{run['tpot_ms']:.2f} ({100 * run['miss_rate']:.0f}%)",
            ),
        ),
    ]
    return sections(parts)


def closed(runs: Sequence[Run]) -> str:
    """Share of the gap between LRU and Belady that each eviction closes, in percent."""
    at = {
        tuple(r["cell"][k] for k in ("trace", "capacity", "eviction")): r for r in on_demand(runs)
    }
    shares = [f"{share}%" for share in SHARES]
    places = [(t, s) for t in traces(runs) for s in shares if (t, s, "belady") in at]
    rows = []
    for eviction in dict.fromkeys(key[2] for key in at):
        gaps = []
        for place in places:
            lru, least, own = (at[(*place, e)]["miss_rate"] for e in ("lru", "belady", eviction))
            gaps.append(100 * (lru - own) / (lru - least))
        cost = median(at[(*place, eviction)]["us_per_request"] for place in places)
        shown = [f"{value:.0f}" for value in (*gaps, median(gaps))]
        rows.append([eviction, *shown, f"{cost:.1f}"])
    headers = ["Eviction", *(f"{t} {s}" for t, s in places), "median", "us/request"]
    return table(headers, sorted(rows, key=lambda row: -float(row[-2])))


def rates(run: Run) -> str:
    return f"{100 * run['miss_rate']:.1f} / {100 * run['collision_miss_rate']:.2f}"


def by_eviction(runs: Iterable[Run], row: str, value: Callable[[Run], str]) -> str:
    found: dict[str, dict[str, str]] = {}
    for run in runs:
        found.setdefault(row.format(**run), {})[run["cell"]["eviction"]] = value(run)
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    return table(
        ["", *names], [[at, *(own.get(n, "") for n in names)] for at, own in found.items()]
    )


def on_demand(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if "recall" not in run["cell"]]


def traces(runs: Sequence[Run]) -> list[str]:
    return sorted({run["cell"]["trace"] for run in runs})


def draw(runs: Sequence[Run], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for field, label in (("miss_rate", "misses"), ("collision_miss_rate", "collision misses")):
        lines(
            on_demand(runs),
            DRAWN,
            lambda run, field=field: (run["cycles"], run[field]),
            ("capacity [token cycles]", f"{label} / requests, on demand", 2),
            folder / f"{field}.svg",
        )
    wanted = {"capacity": "2 cycles", "precision": 0.63}
    lines(
        [run for run in runs if wanted.items() <= run["cell"].items()],
        FEW,
        lambda run: (run["cell"]["ratio"], 1e3 / run["tpot_ms"]),
        ("transfer of one expert / layer", "tok/s, 2 cycles, recall 0.95", 10),
        folder / "speed.svg",
    )


def lines(
    runs: Sequence[Run],
    evictions: Sequence[str],
    point: Callable[[Run], tuple[float, float]],
    labels: tuple[str, str, int],
    file: Path,
) -> None:
    """One panel a trace, one line an eviction; `labels` are the axes' and the base of x."""
    figure, panels = new_figure(len(traces(runs)))
    for axes, trace in zip(panels, traces(runs), strict=True):
        for eviction in evictions:
            wanted = {"trace": trace, "eviction": eviction}
            points = sorted(point(run) for run in runs if wanted.items() <= run["cell"].items())
            style = "--" if eviction == "belady" else "-"
            axes.plot(*zip(*points, strict=True), style, marker=".", label=eviction)
        axes.set_title(trace)
        axes.set_xscale("log", base=labels[2])
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
    panels[0].legend(fontsize="small")
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "real_routing")
    out = parser.parse_args().out
    runs = fill(out / "cells.json.gz", cells(), measure)
    (out / "table.md").write_text(render(runs))
    draw(runs, out / "plots")


if __name__ == "__main__":
    main()
