"""Replays what S1, S2, S3, S4 and S8 of SpecMD ask for, on real routing: results/real_routing.

Usage: python benchmarks/routing_claims.py [--tiny TRACE] [--out results/real_routing]. Writes
`claims.json.gz` (cells that are there already are kept) and `claims.md`.

The three traces of `traces/` have neither weights nor gates: predictors are oracles of stated
recall and precision, and score eviction is left out. What needs both is asked of the shipped model,
charged as OLMoE-1B-7B. Its trace (3 MB) is made by

    moecache eval --model moecache --tasks tiny_gsm8k,tiny_bbh --limit 20
        --model_args pretrained=tiny,policy=specmd,capacity=25%,trace=DIR,trace_keep=all

A cell is kept as sums over units: sixteen passes of a trace, or one request of the shipped model's.
Figures are ratios of sums over a run; the 95% intervals are percentiles over 2000 draws of its
units, the same draws for the cells that are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import grid
import numpy as np
from grid import Floats, Run, interval
from scipy.stats import spearmanr

from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.ledger import PassRecord, total
from lm_eval_moecache.report.tables import padded
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

MACHINES = {"inside": "specmd-a100", "outside": "a100-5GBps"}
"""SpecMD's own stack of 30 ms a layer, and one that is as fast as its kernels."""
SHARES = ("1%", "5%", "25%", "50%")
OTHERS = ("lru", "lfu", "fld", "shallow_first", "frequency_layer", "least_stale", "hazard")
EVICTIONS: dict[str, dict[str, Any]] = {
    **{name: {"eviction": name} for name in OTHERS},
    "least_stale none": {"eviction": "least_stale", "eviction.protect": "none"},
}
SCORES = {
    f"score {history}": {"eviction": "score", "eviction.history": history}
    for history in ("sum", "mean", "decayed")
}
NONE = {"none": {"prefetch": "none"}}
ORACLES: dict[str, dict[str, Any]] = {
    # The recall of a gate's top-k is its precision, too; half as many again find more and less.
    "top-k": {"prefetch": "oracle", "prefetch.recall": 0.85, "prefetch.precision": 0.85},
    "score": {"prefetch": "oracle", "prefetch.recall": 0.95, "prefetch.precision": 0.63},
}
GATES = {"top-k": {"prefetch": "next_gate"}, "score": {"prefetch": "score"}}
WIDER: dict[str, dict[str, Any]] = {
    f"top-k x{over:g}": {"prefetch": "next_gate", "prefetch.overfetch": over} for over in (1.5, 2)
} | {f"score p{p}": {"prefetch": "score", "prefetch.percentile": p} for p in (70, 75, 85, 90)}
PREFETCHERS = ("none", "top-k", "score")
LEFT_OUT = {"least_stale none", "hazard"}
"""Not the papers' compositions: not among those that S2 and S8 are about."""
Place = tuple[str, str, str]
"""Trace, machine, capacity."""


def cells(tiny: str | None = None) -> Iterator[tuple[Run, Any]]:
    """Yield each cell with its trace, its future and what it means for a policy."""
    files = {path.stem: path for path in sorted(grid.TRACES.glob("*.parquet"))}
    for name, path in (files | ({"tiny": tiny} if tiny else {})).items():
        is_tiny = name == "tiny"
        trace = load_trace(str(path), predicted=is_tiny)
        future, shares = Future(trace), SHARES
        grids = [({**NONE, **ORACLES}, EVICTIONS)]
        if is_tiny:
            only, shares = {"least_stale": EVICTIONS["least_stale"]}, SHARES[:3]
            grids = [({**NONE, **GATES}, EVICTIONS), ({**NONE, **GATES}, SCORES), (WIDER, only)]
        for machine, share, (prefetchers, evictions) in product(MACHINES, shares, grids):
            for prefetch, eviction in product(prefetchers, evictions):
                cell = {"trace": name, "machine": machine, "capacity": share}
                policy = {**prefetchers[prefetch], **evictions[eviction]}
                known = trace, future, policy
                yield {**cell, "prefetch": prefetch, "eviction": eviction}, known


def measure(cell: Run, known: tuple[Trace, Future, dict[str, Any]]) -> Run:
    trace, future, overrides = known
    is_tiny = cell["trace"] == "tiny"
    emulate = load_real_model("OLMoE-1B-7B") if is_tiny else None
    charged = trace.geometry if emulate is None else emulate.emulated_by(trace.geometry)
    machine = MACHINES[cell["machine"]]
    setting = grid.setting_of(charged, cell["capacity"], overrides, hardware=machine)
    engine = replay(trace, replace(setting, emulate=emulate), future=future)
    ledger = engine.ledger
    units = [r.passes for r in ledger.requests] if is_tiny else grid.blocks(ledger.passes)
    regime = regime_of(charged, setting.capacity.total_bytes, setting.hardware)
    return {
        "cycles": round(regime.cycles, 3),
        "transfer_per_layer": round(regime.transfer_per_layer, 4),
        "units": [sums(unit) for unit in units],
    }


def sums(passes: Sequence[PassRecord]) -> dict[str, float]:
    """Add up what the claims are about."""
    counted = total(passes)
    decoded = [record for record in passes if record.phase == DECODE]
    return {
        "requests": counted.requests,
        "absent": counted.misses + counted.late,
        "collisions": counted.collisions,
        "proposed": counted.predicted,
        "right": counted.predicted_right,
        "predictable": counted.predictable,
        "stall_s": round(sum(record.stall_s for record in decoded), 9),
        "decode_s": round(sum(record.duration_s for record in decoded), 9),
        "decoded": len(decoded),
        "prefill_s": round(sum(r.duration_s for r in passes if r.phase == PREFILL), 9),
    }


class Cell:
    """Figures of one run as ratios of sums: of the run first, then of each draw."""

    def __init__(self, run: Run) -> None:
        self.cycles, self.ratio = run["cycles"], run["transfer_per_layer"]
        self.units = {name: np.array([u[name] for u in run["units"]]) for name in run["units"][0]}
        self._weights = grid.draws(len(run["units"]))
        self.collisions = 100 * self.rate("collisions", "requests")
        self.misses = 100 * self.rate("absent", "requests")
        self.ms_per_token = 1000 * self.rate("decode_s", "decoded")
        self.stall_ms = 1000 * self.rate("stall_s", "decoded")
        self.prefill_s: Floats = self._weights @ self.units["prefill_s"]

    def rate(self, over: str, under: str) -> Floats:
        above, below = (self._weights @ self.units[name] for name in (over, under))
        rate: Floats = np.divide(above, below, out=np.zeros(len(below)), where=below > 0)
        return rate


Cells = dict[Place, dict[tuple[str, str], Cell]]
"""Place -> (prefetch, eviction) -> the run."""


def cells_of(runs: Sequence[Run]) -> Cells:
    found: Cells = {}
    for run in sorted(runs, key=lambda run: run["cell"]["trace"]):
        names = run["cell"]
        place = names["trace"], names["machine"], names["capacity"]
        found.setdefault(place, {})[names["prefetch"], names["eviction"]] = Cell(run)
    return found


def change(new: Floats, old: Floats) -> Floats:
    """Return by how many percent the new figure is above the old."""
    return 100 * (np.divide(new, old, out=np.ones_like(new), where=old > 0) - 1)


def evictions_of(cells: Cells) -> list[str]:
    return sorted({eviction for own in cells.values() for _, eviction in own})


def named(place: Place, cell: Cell) -> list[str]:
    trace, machine, capacity = place
    return [trace, f"{machine} ({cell.ratio:.2g})", f"{capacity} = {cell.cycles:.2g} cycles"]


AT = ["Trace", "Regime (transfer/layer)", "Capacity", "Prefetch"]


def collisions(cells: Cells) -> str:
    """S1: how many times fewer collisions, and what becomes of the misses."""
    rows = []
    for (place, own), prefetch in product(cells.items(), PREFETCHERS):
        lru, stale, other = (
            own[prefetch, name] for name in ("lru", "least_stale", "least_stale none")
        )
        factor = "-"
        if stale.collisions[0] > 0:
            some = np.maximum(stale.units["collisions"].sum(), 1)
            least = np.maximum(stale.collisions, stale.collisions[0] / some)
            factor = interval(lru.collisions / least)
        elif lru.collisions[0] > 0:
            factor = "all"
        shares = [f"{cell.collisions[0]:.2f}" for cell in (lru, stale, other)]
        points = [stale.collisions - lru.collisions, stale.misses - lru.misses]
        gained = [interval(p, "{:.2f}") for p in points]
        rows.append([*named(place, lru), prefetch, *shares, factor, *gained])
    headers = ["LRU %", "Least-Stale %", "protect=none %", "times fewer"]
    return padded([*AT, *headers, "collisions, points", "misses, points"], rows)


def swapped(cells: Cells, figure: str) -> str:
    """S2: percent of change where Least-Stale takes the place of an eviction."""
    evictions = [e for e in evictions_of(cells) if e not in LEFT_OUT | {"least_stale"}]
    rows = []
    for (place, own), prefetch in product(cells.items(), PREFETCHERS):
        stale = getattr(own[prefetch, "least_stale"], figure)
        if stale[0] == 0:
            continue
        row = [*named(place, own[prefetch, "least_stale"]), prefetch]
        for eviction in evictions:
            cell = own.get((prefetch, eviction))
            text = ""
            if cell is not None:
                percent = change(stale, getattr(cell, figure))
                # One prefill alone has no interval.
                alone = figure == "prefill_s" and np.count_nonzero(cell.units[figure]) < 2
                text = f"{percent[0]:.1f}" if alone else interval(percent)
            row.append(text)
        rows.append(row)
    return padded([*AT, *evictions], rows)


def by_eviction(cells: Cells) -> str:
    """S3: collisions / misses of every eviction on the shipped model."""
    cells = {place: own for place, own in cells.items() if place[0] == "tiny"}
    evictions, rows = evictions_of(cells), []

    def most(own: Iterable[tuple[str, Cell]]) -> tuple[str, Cell]:
        return max(own, key=lambda item: float(item[1].collisions[0]))

    for (place, at), prefetch in product(cells.items(), PREFETCHERS):
        own = [(name, at[prefetch, name]) for name in evictions]
        scores = [item for item in own if item[0].startswith("score")]
        _, rival = most(item for item in own if item not in scores)
        least = min((cell for _, cell in scores), key=lambda cell: float(cell.collisions[0]))
        gaps = [
            interval(c.collisions - rival.collisions, "{:.2f}") for c in (least, most(scores)[1])
        ]
        shares = [f"{cell.collisions[0]:.2f} / {cell.misses[0]:.1f}" for _, cell in own]
        worst, cell = most(own)
        rows.append([*named(place, cell), prefetch, worst, *gaps, *shares])
    headers = ["worst", "least score - worst other, points", "most score - worst other, points"]
    return padded([*AT, *headers, *evictions], rows)


def predictors(cells: Cells) -> str:
    """S4: what predictors propose, and what comes of it, under Least-Stale."""
    rows = []
    for place, own in cells.items():
        base = own["top-k", "least_stale"]
        for (prefetch, eviction), cell in own.items():
            if eviction != "least_stale" or prefetch == "none":
                continue
            proposed = cell.units["proposed"].sum() / base.units["predictable"].sum()
            rates = [cell.rate("right", of)[0] for of in ("proposed", "predictable")]
            told = [f"{proposed:.2f}", *(f"{rate:.3f}" for rate in rates)]
            told += [f"{100 - cell.misses[0]:.1f}", interval(base.misses - cell.misses, "{:.2f}")]
            stalls = interval(cell.stall_ms - base.stall_ms, "{:.2f}")
            told += [f"{cell.stall_ms[0]:.2f}", stalls]
            told += [interval(change(cell.ms_per_token, base.ms_per_token))]
            rows.append([*named(place, cell), prefetch, *told])
    headers = ["proposed / needed", "precision", "recall", "hits %", "hits, points"]
    return padded([*AT, *headers, "stall ms/token", "stall, ms", "ms/token, %"], rows)


def winners(cells: Cells) -> str:
    """S8: the fastest at each capacity, and whether one is the fastest at all of them."""
    rows = []
    for trace, machine in dict.fromkeys(place[:2] for place in cells):
        at = {s: cells[trace, machine, s] for s in SHARES if (trace, machine, s) in cells}
        policies = sorted(key for key in at["1%"] if key[1] not in LEFT_OUT)
        speeds = {s: {p: own[p].ms_per_token for p in policies} for s, own in at.items()}
        best = {s: min(policies, key=lambda p, s=s: float(speeds[s][p][0])) for s in at}
        behind = {
            p: max((change(speeds[s][p], speeds[s][best[s]]) for s in at), key=lambda v: v[0])
            for p in policies
        }
        steady = min(policies, key=lambda p: float(behind[p][0]))
        first, last = ([speeds[s][p][0] for p in policies] for s in (SHARES[0], SHARES[2]))
        fastest = [
            f"{' + '.join(best[s])} {speeds[s][best[s]][0]:.1f} ms" if s in at else ""
            for s in SHARES
        ]
        alike = f"{spearmanr(first, last).statistic:.2f}"
        rows.append([trace, machine, *fastest, " + ".join(steady), interval(behind[steady]), alike])
    headers = ["Trace", "Regime", *SHARES, "least behind", "at worst behind by %"]
    return padded([*headers, f"rank correlation {SHARES[0]} and {SHARES[2]}"], rows)


def render(runs: Sequence[Run]) -> str:
    cells = cells_of(runs)
    return grid.sections(
        {
            "S1: collision misses, LRU and Least-Stale": collisions(cells),
            "S2: time to the first token, percent of change": swapped(cells, "prefill_s"),
            "S2: time per token, percent of change": swapped(cells, "ms_per_token"),
            "S3: collisions / misses in percent, shipped model as OLMoE-1B-7B": by_eviction(cells),
            "S4: predictors under Least-Stale, changes against top-k": predictors(cells),
            "S8: the fastest at each capacity": winners(cells),
        }
    )


def main() -> None:
    options = grid.arguments(__doc__, tiny=None, out=grid.RESULTS / "real_routing")
    runs = grid.fill(options.out / "claims.json.gz", cells(options.tiny), measure)
    (options.out / "claims.md").write_text(render(runs))


if __name__ == "__main__":
    main()
