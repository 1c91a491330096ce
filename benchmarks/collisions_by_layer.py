"""Counts collision misses by layer under four evictions (SpecMD, Figures 5 and 9).

Usage: python benchmarks/collisions_by_layer.py TRACE [--out results/specmd/figure_5]. Writes
`layers.json`, which results/claims.yaml reads, and `layers.svg`. The trace is of

    moecache eval --model moecache --tasks tiny_gsm8k --limit 8
        --model_args pretrained=tiny,policy=specmd,precision=int4,trace=DIR,trace_keep=all

and is replayed on SpecMD's machine with OLMoE's sizes at 1.4 cycles of 4-bit experts, its 5%.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from grid import RESULTS

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.report.replays import SweepSetting, one_replay

EVICTIONS = ("fld", "score", "lru", "least_stale")
PREFETCHERS = {"score": "score prefetch", "next_gate": "top-k prefetch"}
CAPACITY = "17.5%"


def shares(trace: Path, prefetch: str, eviction: str) -> npt.NDArray[np.float64]:
    """Return by layer the share of requests that were evicted earlier in the same pass."""
    policy = load_policy("specmd", {"prefetch": prefetch, "eviction": eviction})
    setting = SweepSetting(
        policies=[policy],
        capacities=[CAPACITY],
        hardwares=[load_hardware("specmd-a100")],
        emulate=load_real_model("OLMoE-1B-7B"),
        bound=False,
    )
    found, built, future = one_replay([str(trace)], setting)
    counts = np.zeros((2, found.geometry.num_layers))

    def watch(engine: Engine) -> None:
        run = engine.run

        def counting(event: Event) -> object:
            assert engine.record is not None
            before = engine.record.collisions, engine.record.requests
            answer = run(event)
            after = engine.record.collisions, engine.record.requests
            counts[:, event.layer] += np.subtract(after, before)
            return answer

        engine.run = counting  # type: ignore[assignment, method-assign]

    replay(found, built, future=future, on_engine=watch, compiled=False)
    collisions, requests = counts
    return collisions / requests


def draw(rows: list[dict[str, float]], path: Path) -> None:
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(PREFETCHERS), figsize=(9, 3.6), layout="constrained")
    layers = [row["layer"] for row in rows]
    for axis, (prefetch, title) in zip(axes, PREFETCHERS.items(), strict=True):
        for marker, eviction in zip("osD^", EVICTIONS, strict=True):
            y = [100 * row[f"{prefetch}_{eviction}"] for row in rows]
            axis.plot(layers, y, marker=marker, label=eviction)
        # Score-based eviction is beyond the others by so much that nothing else would be seen.
        axis.set(title=title, xlabel="layer", yscale="symlog", ylim=(0, 100))
        axis.set_ylabel("collision misses [% of requests]")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    fig.savefig(path, metadata={"Date": None})
    fig.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "specmd/figure_5")
    given = parser.parse_args()
    columns = {
        f"{prefetch}_{eviction}": shares(given.trace, prefetch, eviction)
        for prefetch in PREFETCHERS
        for eviction in EVICTIONS
    }
    number = len(next(iter(columns.values())))
    rows = [
        {"layer": layer, **{name: float(round(found[layer], 6)) for name, found in columns.items()}}
        for layer in range(number)
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "layers.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    draw(rows, given.out / "layers.svg")
    for row in rows:
        print({name: round(value, 4) for name, value in row.items()})


if __name__ == "__main__":
    main()
