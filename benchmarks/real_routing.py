"""Replays real routing over evictions, predictors, capacities and links: results/real_routing.

Usage: python benchmarks/real_routing.py [--tiny TRACE] [--out results/real_routing]. A few minutes
on one core. Writes `cells.json.gz` with `table.md` and the plots, and `claims.json.gz` with
`claims.md`, the evidence on SpecMD's claims S1, S2, S3, S4 and S8; cells already there are kept.

In the first table capacity is in token cycles (layers x top-k) and the link's speed is a ratio: one
expert's transfer takes `ratio` times as long as a layer's decode step without waiting. Dense sizes
and kernels are those of the trace's model on `a100-5GBps`; transfers have no latency.

The traces have no gates, and OLMoE's has no routing weights: predictors are oracles of stated
recall and precision, and score eviction is left out. Claims that need gates or routing weights run
on the shipped model, charged as OLMoE-1B-7B. Its trace (3 MB) is recorded by

    moecache eval --model moecache --tasks tiny_gsm8k,tiny_bbh --limit 20
        --model_args pretrained=tiny,policy=specmd,capacity=25%,trace=DIR,trace_keep=all

A cell of the claims holds sums over units: sixteen passes of a trace, or one request of the shipped
model. Figures are ratios of sums over a run; the 95% intervals are percentiles over 2000 draws of
its units, with the same draws for compared cells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from grid import (
    RESULTS,
    Floats,
    Run,
    arguments,
    blocks,
    draws,
    fill,
    frame,
    interval,
    sections,
    setting_of,
    shipped_traces,
)
from pandas import DataFrame, Series
from scipy.stats import spearmanr

from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.ledger import PassRecord, total
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.plots import new_figure, save
from lm_eval_moecache.report.tables import padded
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
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
    is_foreseen, two_cycles = cells.recall.notna(), cells.capacity == "2 cycles"
    rows = cells.trace + cells.cycles.map(" {:.2f} cycles".format)
    settings = rows + cells.recall.map(" {:g}".format) + cells.precision.map("/{:g}".format)
    misses, collisions = 100 * cells.miss_rate, 100 * cells.collision_miss_rate
    rates = misses.map("{:.1f}".format) + collisions.map(" / {:.2f}".format)
    speeds = cells.tpot_ms.map("{:.2f}".format) + misses.map(" ({:.0f}%)".format)
    plain = cells[~is_foreseen & cells.capacity.str.endswith("cycles")]
    of_two = "ms a token (misses) at 2 cycles over transfer / layer"
    return sections(
        {
            "Closed of the gap between LRU and Belady, percent, on demand": closed(
                cells[~is_foreseen & cells.capacity.str.endswith("%")]
            ),
            "On demand: misses / collisions, percent of requests": by_eviction(plain, rows, rates),
            "With predictors (recall/precision), transfer / layer 0.02: the same": by_eviction(
                cells[is_foreseen & (cells.ratio == 0.02)], settings, rates
            ),
            of_two: by_eviction(
                cells[is_foreseen & two_cycles], settings + cells.ratio.map(" x{:g}".format), speeds
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
        rows.append([eviction, *(f"{gap:.0f}" for gap in percents), f"{costs[eviction]:.1f}"])
    headers = ["Eviction", *(" ".join(place) for place in places), "median", "us/request"]
    return padded(headers, sorted(rows, key=lambda row: -float(row[-2])))


def by_eviction(cells: DataFrame, at: Series, texts: Series) -> str:
    """Table of `texts` with one row per value of `at` and one column per eviction."""
    wide = cells.assign(at=at, text=texts).pivot(index="at", columns="eviction", values="text")
    wide = wide.loc[at[cells.index].unique(), cells.eviction.unique()].fillna("")
    return padded(["", *wide.columns], wide.reset_index().to_numpy().tolist())


def draw(runs: Sequence[Run], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
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
            axes.plot(curve[x], curve[y], style, marker=".", label=eviction)
        axes.set_title(trace)
        axes.set_xscale("log", base=labels[2])
        axes.set(xlabel=labels[0], ylabel=labels[1])
    panels[0].legend(fontsize="small")
    save(figure, file)


# --- SpecMD's claims ---


MACHINES = {"inside": "specmd-a100", "outside": "a100-5GBps"}
"""SpecMD's own stack of 30 ms a layer, and a stack as fast as its kernels."""
CHARGED = "OLMoE-1B-7B"
"""The model that the shipped one is charged as."""
CLAIMED_SHARES = ("1%", "5%", "25%", "50%")
OTHERS = ("lru", "lfu", "fld", "shallow_first", "frequency_layer", "least_stale", "hazard")
CLAIMED = {name: EVICTIONS[name] for name in (*OTHERS, "least_stale none")}
SCORES = {
    f"score {history}": {"eviction": "score", "eviction.history": history}
    for history in ("sum", "mean", "decayed")
}
NONE = {"none": {"prefetch": "none"}}
ORACLES: dict[str, dict[str, Any]] = {
    # A gate's top-k has equal recall and precision; half as many again trade one for the other.
    "top-k": {"prefetch": "oracle", "prefetch.recall": 0.85, "prefetch.precision": 0.85},
    "score": {"prefetch": "oracle", "prefetch.recall": 0.95, "prefetch.precision": 0.63},
}
GATES = {"top-k": {"prefetch": "next_gate"}, "score": {"prefetch": "score"}}
WIDER: dict[str, dict[str, Any]] = {
    f"top-k x{over:g}": {"prefetch": "next_gate", "prefetch.overfetch": over} for over in (1.5, 2)
} | {f"score p{p}": {"prefetch": "score", "prefetch.percentile": p} for p in (70, 75, 85, 90)}
LEFT_OUT = {"least_stale none", "hazard"}
"""Not the papers' evictions, so outside claims S2 and S8."""
KEYS = ["trace", "machine", "capacity", "prefetch", "eviction"]


def claim_cells(tiny: str | None = None) -> Iterator[tuple[Run, Any]]:
    """Yield each cell with its trace, its future and its policy overrides."""
    traces = shipped_traces()
    if tiny:
        traces["tiny"] = load_trace(tiny, predicted=True)
    for name, trace in traces.items():
        future, shares = Future(trace), CLAIMED_SHARES
        grids = [({**NONE, **ORACLES}, CLAIMED)]
        if name == "tiny":
            stale, shares = {"least_stale": CLAIMED["least_stale"]}, CLAIMED_SHARES[:3]
            grids = [({**NONE, **GATES}, CLAIMED), ({**NONE, **GATES}, SCORES), (WIDER, stale)]
        for machine, share, (prefetchers, evictions) in product(MACHINES, shares, grids):
            for prefetch, eviction in product(prefetchers, evictions):
                cell = {"trace": name, "machine": machine, "capacity": share}
                inputs = trace, future, {**prefetchers[prefetch], **evictions[eviction]}
                yield {**cell, "prefetch": prefetch, "eviction": eviction}, inputs


def measure_claim(cell: Run, known: tuple[Trace, Future, dict[str, Any]]) -> Run:
    trace, future, overrides = known
    is_tiny, charged = cell["trace"] == "tiny", trace.geometry
    keys = {"hardware": MACHINES[cell["machine"]], **({"emulate": CHARGED} if is_tiny else {})}
    setting = setting_of(trace.geometry, cell["capacity"], overrides, **keys)
    if setting.emulate is not None:
        charged = setting.emulate.emulated_by(trace.geometry)
    ledger = replay(trace, setting, future=future).ledger
    units = [r.passes for r in ledger.requests] if is_tiny else blocks(ledger.passes)
    regime = regime_of(charged, setting.capacity.total_bytes, setting.hardware)
    return {
        "cycles": round(regime.cycles, 3),
        "transfer_per_layer": round(regime.transfer_per_layer, 4),
        "units": [sums(unit) for unit in units],
    }


def sums(passes: Sequence[PassRecord]) -> dict[str, float]:
    """Sum the quantities that the claims concern."""
    counts = total(passes)
    steps = [record for record in passes if record.phase == DECODE]
    return {
        "requests": counts.requests,
        "absent": counts.misses + counts.late,
        "collisions": counts.collisions,
        "proposed": counts.predicted,
        "right": counts.predicted_right,
        "predictable": counts.predictable,
        "stall_s": round(sum(record.stall_s for record in steps), 9),
        "decode_s": round(sum(record.duration_s for record in steps), 9),
        "decoded": len(steps),
        "prefill_s": round(sum(r.duration_s for r in passes if r.phase == PREFILL), 9),
    }


AT = ["Trace", "Regime (transfer/layer)", "Capacity", "Prefetch"]


def figures_of(runs: Sequence[Run]) -> DataFrame:
    """Return one row per run of figures, each an array: of the run first, then of each draw."""
    cells = frame(sorted(runs, key=lambda run: run["cell"]["trace"]))
    units = cells.units.map(DataFrame)
    sums = DataFrame(
        [{name: draws(len(unit)) @ column for name, column in unit.items()} for unit in units]
    )

    def rate(over: str, under: str, scale: float = 1.0) -> list[Floats]:
        pairs = zip(sums[over], sums[under], strict=True)
        return [scale * np.divide(a, b, out=np.zeros(len(b)), where=b > 0) for a, b in pairs]

    figures = cells.join(sums.add_suffix("_sum")).assign(
        collisions=rate("collisions", "requests", 100),
        misses=rate("absent", "requests", 100),
        precision=rate("right", "proposed"),
        recall=rate("right", "predictable"),
        ms_per_token=rate("decode_s", "decoded", 1000),
        stall_ms=rate("stall_s", "decoded", 1000),
        num_prefills=[np.count_nonzero(unit.prefill_s) for unit in units],
    )
    return figures.set_index(KEYS)


def by_place(cells: DataFrame) -> Iterator[tuple[list[str], DataFrame]]:
    """Yield each place, as labelled in the tables, with its runs by eviction."""
    for (trace, machine, capacity, prefetch), runs in cells.groupby(KEYS[:-1], sort=False):
        regime = f"{machine} ({runs.transfer_per_layer.iloc[0]:.2g})"
        size = f"{capacity} = {runs.cycles.iloc[0]:.2g} cycles"
        yield [trace, regime, size, prefetch], runs.droplevel(KEYS[:-1])


def change(new: Floats, old: Floats) -> Floats:
    """Return the change from the old figure to the new, in percent."""
    return 100 * (np.divide(new, old, out=np.ones_like(new), where=old > 0) - 1)


def collisions(cells: DataFrame) -> str:
    """S1: how many times fewer collisions, and the change in misses."""
    rows = []
    for place, runs in by_place(cells):
        lru, stale, plain = (runs.loc[name] for name in ("lru", "least_stale", "least_stale none"))
        factor = "all" if lru.collisions[0] > 0 else "-"
        if stale.collisions[0] > 0:
            least = stale.collisions[0] / stale.collisions_sum[0]
            factor = interval(lru.collisions / np.maximum(stale.collisions, least))
        shares = [f"{run.collisions[0]:.2f}" for run in (lru, stale, plain)]
        points = [stale.collisions - lru.collisions, stale.misses - lru.misses]
        rows.append([*place, *shares, factor, *(interval(gap, "{:.2f}") for gap in points)])
    headers = ["LRU %", "Least-Stale %", "protect=none %", "times fewer"]
    return padded([*AT, *headers, "collisions, points", "misses, points"], rows)


def swapped(cells: DataFrame, figure: str) -> str:
    """S2: percent of change when Least-Stale replaces another eviction."""
    names = cells.index.unique("eviction")
    evictions, rows = sorted({*names} - LEFT_OUT - {"least_stale"}), []
    for place, runs in by_place(cells):
        stale = runs.loc["least_stale", figure]
        if stale[0] == 0:
            continue
        for eviction in evictions:
            text = ""
            if eviction in runs.index:
                percent = change(stale, runs.loc[eviction, figure])
                # A single prefill has no interval.
                is_single = figure == "prefill_s_sum" and runs.num_prefills[eviction] < 2
                text = f"{percent[0]:.1f}" if is_single else interval(percent)
            place.append(text)
        rows.append(place)
    return padded([*AT, *evictions], rows)


def of_scores(cells: DataFrame) -> str:
    """S3: collisions / misses of every eviction on the shipped model."""
    evictions, rows = sorted(cells.index.unique("eviction")), []
    for place, runs in by_place(cells):
        shares = runs.collisions.str[0][evictions].sort_values(ascending=False, kind="stable")
        is_score = shares.index.str.startswith("score")
        scores, rival = shares.index[is_score], runs.collisions[shares.index[~is_score][0]]
        gaps = [interval(runs.collisions[e] - rival, "{:.2f}") for e in (scores[-1], scores[0])]
        rates = [f"{shares[e]:.2f} / {runs.misses[e][0]:.1f}" for e in evictions]
        rows.append([*place, shares.index[0], *gaps, *rates])
    headers = ["worst", "least score - worst other, points", "most score - worst other, points"]
    return padded([*AT, *headers, *evictions], rows)


def predictors(cells: DataFrame) -> str:
    """S4: what predictors propose and its effect, under Least-Stale."""
    stale, rows = cells.xs("least_stale", level="eviction", drop_level=False), []
    for (place, runs), key in zip(by_place(stale), stale.index, strict=True):
        if place[-1] in NONE:
            continue
        run, base = runs.iloc[0], cells.loc[(*key[:3], "top-k", "least_stale")]
        texts = [f"{run.proposed_sum[0] / base.predictable_sum[0]:.2f}"]
        texts += [f"{run.precision[0]:.3f}", f"{run.recall[0]:.3f}"]
        texts += [f"{100 - run.misses[0]:.1f}", interval(base.misses - run.misses, "{:.2f}")]
        texts += [f"{run.stall_ms[0]:.2f}", interval(run.stall_ms - base.stall_ms, "{:.2f}")]
        rows.append([*place, *texts, interval(change(run.ms_per_token, base.ms_per_token))])
    headers = ["proposed / needed", "precision", "recall", "hits %", "hits, points"]
    return padded([*AT, *headers, "stall ms/token", "stall, ms", "ms/token, %"], rows)


def winners(cells: DataFrame) -> str:
    """S8: the fastest policy at each capacity, and whether one is fastest at all of them."""
    published, rows = cells[~cells.index.isin(LEFT_OUT, level="eviction")], []
    for place, group in published.ms_per_token.groupby(level=["trace", "machine"], sort=False):
        times = group.droplevel(["trace", "machine"]).unstack("capacity").sort_index()
        shares = [share for share in CLAIMED_SHARES if share in times]
        means = times.map(lambda values: values[0])
        best = means[shares].idxmin()
        deficits = Series(
            {
                policy: max((change(ms[policy], ms[best[s]]) for s, ms in times[shares].items()),
                            key=lambda values: values[0])
                for policy in times.index
            }
        )  # fmt: skip
        steady = deficits.str[0].idxmin()
        fastest = [
            f"{' + '.join(best[s])} {means[s].min():.1f} ms" if s in best else ""
            for s in CLAIMED_SHARES
        ]
        correlation = f"{spearmanr(means[shares[0]], means[shares[2]]).statistic:.2f}"
        rows.append([*place, *fastest, " + ".join(steady), interval(deficits[steady]), correlation])
    headers = ["Trace", "Regime", *CLAIMED_SHARES, "least behind", "at worst behind by %"]
    return padded([*headers, "rank correlation 1% and 25%"], rows)


def render_claims(runs: Sequence[Run]) -> str:
    cells = figures_of(runs)
    # Prefetchers that ran with all evictions: none, and one of each kind.
    usual = cells[cells.index.isin([*NONE, *ORACLES], level="prefetch")]
    tiny = usual.xs("tiny", level="trace", drop_level=False)
    return sections(
        {
            "S1: collision misses, LRU and Least-Stale": collisions(usual),
            "S2: time to the first token, percent of change": swapped(usual, "prefill_s_sum"),
            "S2: time per token, percent of change": swapped(usual, "ms_per_token"),
            "S3: collisions / misses in percent, shipped model as OLMoE-1B-7B": of_scores(tiny),
            "S4: predictors under Least-Stale, changes against top-k": predictors(cells),
            "S8: the fastest at each capacity": winners(cells),
        }
    )


def main() -> None:
    options = arguments(__doc__, tiny=None, out=RESULTS / "real_routing")
    out = options.out
    runs = fill(out / "cells.json.gz", cells(), measure)
    (out / "table.md").write_text(render(runs))
    draw(runs, out / "plots")
    runs = fill(out / "claims.json.gz", claim_cells(options.tiny), measure_claim)
    (out / "claims.md").write_text(render_claims(runs))


if __name__ == "__main__":
    main()
