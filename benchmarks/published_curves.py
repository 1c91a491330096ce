"""Compares the clock with published curves, with one fitted figure per curve.

    python benchmarks/published_curves.py

Each curve is of one engine at several cache sizes. Cache and clock are tested separately: hits are
those of a shipped trace (another text, and six experts a token where the model has eight); speeds
are the clock's at the published hits. Only the link's rate is fitted, where speeds were published,
because no data sheet states how much of its link an engine uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from grid import setting_of, shipped_trace, text_table
from scipy import optimize

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.virtual.costs import attention_s
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.ledger import total
from lm_eval_moecache.trace.future import Future


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Published measurements over the number of cached experts per layer."""

    source: str
    model: str
    precision: str
    hardware: str
    trace: str
    per_layer: Sequence[int]
    hits: Sequence[float | None]
    tok_per_s: Sequence[float | None]
    eviction: str = "lru"
    note: str = ""
    kernel_overhead_s: float | None = None
    """Overrides the profile where the measured path launches its kernels differently."""


CURVES = (
    Curve(
        source="imp PR 1374, 256 decoded tokens from a cold cache",
        model="Qwen3-30B-A3B",
        precision="q4_k_m",
        hardware="rtx-5090",
        trace="qwen3-30b-a3b",
        # Its slots hold projections, three per expert: 24, 73, 146 and 244 slots a layer.
        per_layer=(8, 24, 48, 81),
        hits=(0.366, 0.741, 0.894, 0.962),
        tok_per_s=(10.51, 20.99, 30.51, 51.86),
        kernel_overhead_s=5.0e-6,
        note="with experts on the host its captured graphs are off: the usual 5 us a kernel",
    ),
    Curve(
        source="omlx PR 2595, an M-series machine",
        model="Gemma-4-26B-A4B",
        precision="q4_k_m",
        hardware="m4-max",
        trace="gemma-4-26b-a4b",
        per_layer=(16, 32, 64, 128),
        hits=(0.45, 0.67, 0.89, None),
        tok_per_s=(29.3, 40.1, 59.4, 122.5),
        note="an M4 Max by its speed with all resident; its experts come out of the page cache",
    ),
    Curve(
        source="colibri issue 362, OLMoE int8",
        model="OLMoE-1B-7B",
        precision="int8",
        hardware="rtx-4090-24gb",
        trace="olmoe-1b-7b",
        per_layer=(8, 24),
        hits=(0.278, 0.684),
        tok_per_s=(None, None),
        note="no speeds were published: nothing is fitted",
    ),
    Curve(
        source="colibri issue 362, OLMoE int8, Belady",
        model="OLMoE-1B-7B",
        precision="int8",
        hardware="rtx-4090-24gb",
        trace="olmoe-1b-7b",
        per_layer=(24,),
        hits=(0.841,),
        tok_per_s=(None,),
        eviction="belady",
    ),
)


def table(curve: Curve) -> str:
    """Return a Markdown table of one curve."""
    model = replace(load_real_model(curve.model), stored=load_stored(curve.precision))
    hardware = load_hardware(curve.hardware)
    if curve.kernel_overhead_s is not None:
        hardware = replace(hardware, kernel_overhead_s=curve.kernel_overhead_s)
    trace = shipped_trace(curve.trace)
    future, charged, hits = Future(trace), model.emulated_by(trace.geometry), []
    for count in curve.per_layer:
        setting = setting_of(charged, f"{count}/layer", {"eviction": curve.eviction})
        setting = replace(setting, hardware=hardware, seed=trace.seed, emulate=model)
        engine = replay(trace, setting, future=future, cache_reset="never")
        counts = total(p for p in engine.ledger.passes if p.index)
        hits.append(1 - counts.misses / counts.requests)
    published_hits, measured = (np.array(x, dtype=float) for x in (curve.hits, curve.tok_per_s))
    misses = model.num_layers * model.top_k * np.nan_to_num(1 - published_hits)
    regime = regime_of(model.geometry(), 1, hardware)
    context_s = attention_s(model, hardware, DECODE, np.array([255]))
    rest_s = model.num_layers * (regime.compute_s + regime.launches_s + context_s)

    def speeds(rate: float) -> np.ndarray:
        return 1 / (rest_s + misses * (hardware.link_latency_s + model.expert_bytes / rate))

    is_known = ~np.isnan(measured) & (misses > 0)
    rate, fitted = hardware.link_rate, ""
    if is_known.any():
        best = optimize.minimize_scalar(
            lambda log: float(np.sum(np.log(speeds(np.exp(log)) / measured)[is_known] ** 2)),
            bounds=(np.log(1e8), np.log(1e12)),
            method="bounded",
        )
        rate = float(np.exp(best.x))
        nominal_rate = hardware.link_bytes_per_s / 1e9
        fitted = f" Fitted: the link, {rate / 1e9:.2g} GB/s (nominal {nominal_rate:.3g})."
    rows, ours, unfitted = [], speeds(rate), speeds(hardware.link_rate)
    for i, count in enumerate(curve.per_layer):
        hits_cell = "-" if np.isnan(published_hits[i]) else f"{published_hits[i]:.1%}"
        replayed_hits = f"{hits[i]:.1%}" if misses[i] else "-"
        speed_cells = [f"{measured[i]:.1f}", f"{ours[i]:.1f}", f"{ours[i] / measured[i]:.2f}"]
        speed_cells = [*speed_cells, f"{unfitted[i]:.1f}"] if measured[i] > 0 else ["-"] * 4
        rows.append([str(count), hits_cell, replayed_hits, *speed_cells])
    note = f" ({curve.note})" if curve.note else ""
    head = f"**{curve.source}**: {curve.model} {curve.precision} on `{curve.hardware}`."
    headers = ["experts a layer", "hits theirs", "ours", "tok/s theirs", "ours", "ours / theirs"]
    return f"{head}{fitted}{note}\n\n{text_table([*headers, 'unfitted'], rows, '--:', '--:')}\n"


if __name__ == "__main__":
    for curve in CURVES:
        print(table(curve))
