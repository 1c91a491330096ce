"""results/real_routing holds what its cells say, and the bars of `hazard` stand in them."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
REPORT = runpy.run_path(str(ROOT / "benchmarks" / "real_routing_report.py"))
CLAIMS = runpy.run_path(str(ROOT / "benchmarks" / "routing_claims_report.py"))
FOLDER = ROOT / "results" / "real_routing"
CELLS = REPORT["load"](FOLDER)


def test_its_table_comes_from_its_cells_to_the_byte() -> None:
    assert (FOLDER / "table.md").read_text() == REPORT["render"](CELLS)


def test_the_answers_to_the_claims_come_from_their_cells_to_the_byte() -> None:
    assert (FOLDER / "claims.md").read_text() == CLAIMS["render"](CLAIMS["load"](FOLDER))


def test_the_cost_of_every_eviction_stands_beside_it() -> None:
    table = (FOLDER / "cost.md").read_text()
    listed = {line.split("|")[1].strip() for line in table.splitlines() if "|" in line}
    assert {run["cell"]["eviction"] for run in CELLS} <= listed


def test_the_bars_of_hazard() -> None:
    """Never 0.3 points below LRU, and a quarter of the gap to Belady in the median."""
    rates = {
        (c["trace"], c["capacity"], c["eviction"]): run["miss_rate"]
        for run in CELLS
        if "recall" not in (c := run["cell"]) and c["capacity"] in ("5%", "10%", "25%", "50%")
    }
    places = sorted({key[:2] for key in rates})
    assert len(places) == 12
    gaps = []
    for trace, share in places:
        lru, ours, bound = (rates[trace, share, e] for e in ("lru", "hazard", "belady"))
        assert ours - lru <= 0.003
        gaps.append((lru - ours) / (lru - bound))
    assert median(gaps) >= 0.25
