"""Tables of S1, S2, S3, S4 and S8 with intervals. Usage: python FILE [--out results/real_routing].

Figures are ratios of sums over a run; the 95% intervals are percentiles over 2000 draws of its
units (blocks of sixteen passes, or requests), the same draws for the cells that are compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pytablewriter import MarkdownTableWriter

Floats = npt.NDArray[np.float64]
Place = tuple[str, str, str]
"""Trace, machine, capacity."""
DRAWS = 2000
SHARES = ("1%", "5%", "25%", "50%")
LEFT_OUT = {"least_stale none", "hazard"}
"""Not the papers' compositions: not among those that S2 and S8 are about."""


@cache
def draws(num_units: int) -> npt.NDArray[np.int64]:
    """Return how often each unit is in a sample: each once, then in each draw."""
    drawn = np.random.default_rng(0).integers(0, num_units, (DRAWS, num_units))
    counts = [np.bincount(own, minlength=num_units) for own in drawn]
    return np.vstack([np.ones(num_units, dtype=np.int64), *counts])


class Cell:
    """The units of one run, and ratios of their sums."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.cycles, self.ratio = run["cycles"], run["transfer_per_layer"]
        self.units = {name: np.array([u[name] for u in run["units"]]) for name in run["units"][0]}
        self._weights = draws(len(run["units"]))

    def rate(self, over: str, under: str) -> Floats:
        """Return a ratio of sums: of the run first, then of each draw."""
        above, below = (self._weights @ self.units[name] for name in (over, under))
        rate: Floats = np.divide(above, below, out=np.zeros(len(below)), where=below > 0)
        return rate

    @property
    def collisions(self) -> Floats:
        return 100 * self.rate("collisions", "requests")

    @property
    def misses(self) -> Floats:
        return 100 * self.rate("absent", "requests")

    @property
    def ms_per_token(self) -> Floats:
        return 1000 * self.rate("decode_s", "decoded")

    @property
    def prefill_s(self) -> Floats:
        return np.asarray(self._weights @ self.units["prefill_s"])


Cells = dict[tuple[str, str, str, str, str], Cell]


def spread(values: Floats, digits: int = 1) -> str:
    """Write a figure and the interval of its draws."""
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return f"{values[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def told(values: Floats, cell: Cell) -> str:
    """Write a change of prefills; one prefill alone has no interval."""
    return spread(values) if np.count_nonzero(cell.units["prefill_s"]) > 1 else f"{values[0]:.1f}"


def change(new: Floats, old: Floats) -> Floats:
    """Return by how many percent the new figure is above the old."""
    return 100 * (np.divide(new, old, out=np.ones_like(new), where=old > 0) - 1)


def at(cells: Cells, place: Place, prefetch: str, eviction: str) -> Cell:
    key = (*place, prefetch, eviction)
    return cells[key]


def places(cells: Cells) -> list[Place]:
    return list(dict.fromkeys((t, m, c) for t, m, c, _, _ in cells))


def named(place: Place, cell: Cell) -> list[str]:
    trace, machine, capacity = place
    return [trace, f"{machine} ({cell.ratio:.2g})", f"{capacity} = {cell.cycles:.2g} cycles"]


AT = ["Trace", "Regime (transfer/layer)", "Capacity"]


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    writer = MarkdownTableWriter()
    writer.headers, writer.value_matrix = [*headers], [*rows]
    return str(writer.dumps())


def collisions(cells: Cells) -> str:
    """S1: how many times fewer collisions, and what becomes of the misses."""
    rows = []
    for place in places(cells):
        for prefetch in ("none", "top-k", "score"):
            lru, stale, other = (
                at(cells, place, prefetch, name)
                for name in ("lru", "least_stale", "least_stale none")
            )
            factor = "-"
            if stale.collisions[0] > 0:
                some = np.maximum(stale.units["collisions"].sum(), 1)
                least = np.maximum(stale.collisions, stale.collisions[0] / some)
                factor = spread(lru.collisions / least)
            elif lru.collisions[0] > 0:
                factor = "all"
            rows.append(
                [
                    *named(place, lru),
                    prefetch,
                    f"{lru.collisions[0]:.2f}",
                    f"{stale.collisions[0]:.2f}",
                    f"{other.collisions[0]:.2f}",
                    factor,
                    spread(stale.collisions - lru.collisions, 2),
                    spread(stale.misses - lru.misses, 2),
                ]
            )
    headers = ["Prefetch", "LRU %", "Least-Stale %", "protect=none %", "times fewer"]
    return table([*AT, *headers, "collisions, points", "misses, points"], rows)


def swapped(
    cells: Cells, value: Callable[[Cell], Floats], write: Callable[[Floats, Cell], str]
) -> str:
    """S2: percent of change where Least-Stale takes the place of an eviction."""
    evictions = sorted({e for *_, e in cells} - LEFT_OUT - {"least_stale"})
    rows = []
    for place in places(cells):
        for prefetch in ("none", "top-k", "score"):
            stale = at(cells, place, prefetch, "least_stale")
            if value(stale)[0] == 0:
                continue
            row = [*named(place, stale), prefetch]
            for eviction in evictions:
                key = (*place, prefetch, eviction)
                own = cells.get(key)
                row.append("" if own is None else write(change(value(stale), value(own)), own))
            rows.append(row)
    return table([*AT, "Prefetch", *evictions], rows)


def by_eviction(cells: Cells) -> str:
    """S3: collisions / misses of every eviction on the shipped model."""
    evictions = sorted({e for t, *_, e in cells if t == "tiny"})
    rows = []
    for place in places(cells):
        for prefetch in ("none", "top-k", "score") if place[0] == "tiny" else ():
            found = [at(cells, place, prefetch, eviction) for eviction in evictions]
            shares = [f"{c.collisions[0]:.2f} / {c.misses[0]:.1f}" for c in found]
            worst = max(found, key=lambda c: float(c.collisions[0]))
            others = [c for c, e in zip(found, evictions, strict=True) if not e.startswith("score")]
            scores = [c for c, e in zip(found, evictions, strict=True) if e.startswith("score")]
            rival = max(others, key=lambda c: float(c.collisions[0]))
            best = min(scores, key=lambda c: float(c.collisions[0]))
            gap = [spread(s.collisions - rival.collisions, 2) for s in (best, max_of(scores))]
            rows.append(
                [*named(place, worst), prefetch, evictions[found.index(worst)], *gap, *shares]
            )
    headers = ["worst", "least score - worst other, points", "most score - worst other, points"]
    return table([*AT, "Prefetch", *headers, *evictions], rows)


def max_of(cells: Sequence[Cell]) -> Cell:
    return max(cells, key=lambda c: float(c.collisions[0]))


def predictors(cells: Cells) -> str:
    """S4: what predictors propose, and what comes of it, under Least-Stale."""
    rows = []
    for place in places(cells):
        own = [p for t, m, c, p, e in cells if (t, m, c) == place and e == "least_stale"]
        base = at(cells, place, "top-k", "least_stale")
        for prefetch in own:
            if prefetch == "none":
                continue
            cell = at(cells, place, prefetch, "least_stale")
            top_k = base.units["predictable"].sum()
            stall = 1000 * cell.rate("stall_s", "decoded")
            rows.append(
                [
                    *named(place, cell),
                    prefetch,
                    f"{cell.units['proposed'].sum() / top_k:.2f}",
                    f"{cell.rate('right', 'proposed')[0]:.3f}",
                    f"{cell.rate('right', 'predictable')[0]:.3f}",
                    f"{100 - cell.misses[0]:.1f}",
                    spread(base.misses - cell.misses, 2),
                    f"{stall[0]:.2f}",
                    spread(stall - 1000 * base.rate("stall_s", "decoded"), 2),
                    spread(change(cell.ms_per_token, base.ms_per_token)),
                ]
            )
    headers = ["Prefetch", "proposed / needed", "precision", "recall", "hits %", "hits, points"]
    headers += ["stall ms/token", "stall, ms", "ms/token, %"]
    return table([*AT, *headers], rows)


def winners(cells: Cells) -> str:
    """S8: the fastest at each capacity, and whether one is the fastest at all of them."""
    rows = []
    for trace, machine in dict.fromkeys((t, m) for t, m, *_ in cells):
        shares = [c for t, m, c in places(cells) if (t, m) == (trace, machine)]
        shares = [share for share in SHARES if share in shares]
        policies = sorted(
            {(p, e) for t, m, _, p, e in cells if (t, m) == (trace, machine) and e not in LEFT_OUT}
        )
        speeds = {
            (p, s): at(cells, (trace, machine, s), *p).ms_per_token
            for p in policies
            for s in shares
        }
        best = {s: min(policies, key=lambda p: float(speeds[p, s][0])) for s in shares}
        behind = {
            p: max((change(speeds[p, s], speeds[best[s], s]) for s in shares), key=lambda v: v[0])
            for p in policies
        }
        steady = min(policies, key=lambda p: float(behind[p][0]))
        text = [
            f"{' + '.join(best[s])} {speeds[best[s], s][0]:.1f} ms" if s in best else ""
            for s in SHARES
        ]
        first, last = (ranks([speeds[p, s][0] for p in policies]) for s in (SHARES[0], SHARES[2]))
        like = float(np.corrcoef(first, last)[0, 1])
        last_row = [" + ".join(steady), spread(behind[steady]), f"{like:.2f}"]
        rows.append([trace, machine, *text, *last_row])
    headers = ["Trace", "Regime", *SHARES, "least behind", "at worst behind by %"]
    return table([*headers, f"rank correlation {SHARES[0]} and {SHARES[2]}"], rows)


def ranks(values: Sequence[float]) -> Floats:
    """Return each value's place; equal ones share theirs."""
    array = np.asarray(values)
    return np.array([(array < v).sum() + 0.5 * ((array == v).sum() - 1) for v in array])


def parts(cells: Cells) -> Iterator[str]:
    for title, text in (
        ("S1: collision misses, LRU and Least-Stale", collisions(cells)),
        (
            "S2: time to the first token, percent of change",
            swapped(cells, lambda c: c.prefill_s, told),
        ),
        (
            "S2: time per token, percent of change",
            swapped(cells, lambda c: c.ms_per_token, lambda values, _: spread(values)),
        ),
        ("S3: collisions / misses in percent, shipped model as OLMoE-1B-7B", by_eviction(cells)),
        ("S4: predictors under Least-Stale, changes against top-k", predictors(cells)),
        ("S8: the fastest at each capacity", winners(cells)),
    ):
        yield f"## {title}\n\n{text}"


def load(folder: Path) -> Cells:
    runs = json.loads(gzip.decompress((folder / "claims.json.gz").read_bytes()))
    found: Cells = {}
    for run in sorted(runs, key=lambda run: run["cell"]["trace"]):
        names = run["cell"]
        place = names["trace"], names["machine"], names["capacity"]
        key = (*place, names["prefetch"], names["eviction"])
        found[key] = Cell(run)
    return found


def render(cells: Cells) -> str:
    return "\n".join(parts(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/real_routing"))
    out = parser.parse_args().out
    (out / "claims.md").write_text(render(load(out)))


if __name__ == "__main__":
    main()
