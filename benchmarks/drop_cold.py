"""What drop_cold avoids and loses on real routing, beside its authors' figures.

Usage: python benchmarks/drop_cold.py. Two traces, two factors; less than a minute of one core.

BigMoeOnEdge (docs/expert-dropping.md) took the residency that its engine had recorded while it
loaded everything, and counted which misses of decoding lie below F / top-k: `static` does the same
in the cache of a replay that loads everything. `replayed` leaves them out, so that the cache goes
on without them. The recorded residencies are those of 4000 MiB (80.3 and 81.9% hits in their
curves).
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from pathlib import Path

from grid import TRACES, setting_of

from lm_eval_moecache.algorithms.miss.base import Resolution, absent_entries, weight_shares
from lm_eval_moecache.algorithms.miss.drop_cold import DropCold
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import Event, resident_mask
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import total
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

THEIRS = {
    ("qwen3-30b-a3b", 1.0): (66.3, 9.5),
    ("qwen3-30b-a3b", 0.75): (36.8, 4.4),
    ("gemma-4-26b-a4b", 1.0): (67.4, 8.2),
}
"""Trace and factor -> misses avoided and weight lost, in percent."""


class Shadow(DropCold):
    """Notes what it would leave out, and loads it all the same."""

    def __init__(self, geometry: Geometry, *, seed: int = 0, factor: float = 1.0) -> None:
        super().__init__(geometry, seed=seed, factor=factor)
        self.missed = self.cold = 0
        self.lost = 0.0

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        is_resident = resident_mask(event.layer, self.geometry.num_experts, resident)
        gone, shares = absent_entries(event.experts, is_resident), weight_shares(event)
        cold = gone & (shares < self.factor / self.geometry.top_k)
        self.missed += int(gone.sum())
        self.cold += int(cold.sum())
        self.lost += float(shares[cold].sum())
        return None


def run(trace: Trace, miss: str, factor: float, capacity: str) -> tuple[float, float, float]:
    """Return misses avoided, weight lost and misses of decoding, in percent."""
    chosen = {"miss": miss, "miss.factor": factor, "eviction": "tail_lru", "phases": "decode"}
    engine = replay(trace, setting_of(trace.geometry, capacity, chosen))
    passes = total(p for p in engine.ledger.passes if p.phase == "decode")
    miss_rate = 100 * passes.misses / passes.requests
    if miss == "drop_cold":
        avoided, lost = passes.avoided / passes.misses, passes.lost_weight / passes.weighed_tokens
        return 100 * avoided, 100 * lost, miss_rate
    found = engine.rules.miss
    tokens = passes.token_requests / trace.geometry.top_k
    return 100 * found.cold / found.missed, 100 * found.lost / tokens, miss_rate


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    print("trace              F    reported        static          replayed        decode misses")
    for name in ("qwen3-30b-a3b", "gemma-4-26b-a4b"):
        trace = load_trace(str(TRACES / f"{name}.parquet"))
        for factor in (1.0, 0.75):
            theirs = THEIRS.get((name, factor))
            static = run(trace, "benchmarks.drop_cold.Shadow", factor, "4000MiB")
            replayed = run(trace, "drop_cold", factor, "4000MiB")
            told = "-" if theirs is None else f"{theirs[0]:.1f}% / {theirs[1]:.1f}%"
            print(
                f"{name:16}  {factor:4}  {told:14}  {static[0]:.1f}% / {static[1]:.1f}%   "
                f"{replayed[0]:.1f}% / {replayed[1]:.1f}%   {static[2]:.1f}% and "
                f"{replayed[2]:.1f}%"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
