"""Counts collision misses by layer under four evictions (SpecMD, Figures 5 and 9).

Usage: python benchmarks/collisions_by_layer.py TRACE [--out results/specmd/figure_5]. Writes
`layers.json`, which results/claims.yaml reads, and `layers.svg`. The trace is the one that
`moecache reproduce specmd/figure_8` leaves in `traces/`. It is replayed on SpecMD's
machine with OLMoE's sizes at 1.4 cycles of 4-bit experts, its 5%.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from grid import RESULTS, arguments

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.report.plots import legend, look, new_figure, save_as
from lm_eval_moecache.sweep.replay_grid import Replays

EVICTIONS = ("fld", "score", "lru", "least_stale")
PREFETCHERS = {"score": "score prefetch", "next_gate": "top-k prefetch"}
CAPACITY = "17.5%"


def shares(trace: Path, prefetch: str, eviction: str) -> list[float]:
    """Return, by layer, the share of requests for experts evicted earlier in the same pass."""
    keys = {"policy": "specmd", "prefetch": prefetch, "eviction": eviction, "capacity": CAPACITY}
    keys |= {"hardware": "specmd-a100", "emulate": "OLMoE-1B-7B", "cache_reset": "never"}
    config = read_config(keys, replayed=True).with_changes(seed=None)
    replays = Replays(str(trace), [config], None, bound=False)
    counts = np.zeros((2, replays.trace.geometry.num_layers))

    def watch(engine: Engine) -> None:
        rows = engine.alone
        choose = rows.choose

        def counting(batch: Batch, *given: Any, **named: Any) -> object:
            before = [int(rows.counts[0][name]) for name in ("collisions", "requests")]
            answer = choose(batch, *given, **named)
            after = [int(rows.counts[0][name]) for name in ("collisions", "requests")]
            counts[:, batch.first_layer] += np.subtract(after, before)
            return answer

        # Layer by layer, and each counted at once.
        rows.by_loop = False
        rows.choose = counting  # type: ignore[assignment, method-assign]

    replays.replay(replays.setting(config), on_engine=watch)
    collisions, requests = counts
    assert requests.all(), "a layer whose requests were not counted"
    return [round(float(share), 6) for share in collisions / requests]


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    figure, panels = new_figure(columns=len(PREFETCHERS))
    lines = {}
    for axes, (prefetch, title) in zip(panels, PREFETCHERS.items(), strict=True):
        for index, eviction in enumerate(EVICTIONS):
            y = [100 * row[f"{prefetch}_{eviction}"] for row in rows]
            [lines[eviction]] = axes.plot([row["layer"] for row in rows], y, **look(index))
        # Score-based eviction is so far above the others that a linear axis would flatten them.
        axes.set(title=title, xlabel="layer", yscale="symlog", ylim=(0, 100))
        axes.set_ylabel("collision misses [% of requests]")
    legend(figure, lines)
    save_as(figure, path)


def main() -> None:
    options = arguments(__doc__, "trace", out=RESULTS / "specmd/figure_5")
    columns = {
        f"{prefetch}_{eviction}": shares(options.trace, prefetch, eviction)
        for prefetch, eviction in product(PREFETCHERS, EVICTIONS)
    }
    layers = zip(*columns.values(), strict=True)
    rows = [{"layer": n, **dict(zip(columns, row, strict=True))} for n, row in enumerate(layers)]
    draw(rows, options.out / "layers")
    (options.out / "layers.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
