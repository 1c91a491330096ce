"""How long experts stay and when they are missed (cache-conditional experts, Figure 7, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.report.metrics import cache_metrics
from lm_eval_moecache.report.plots import new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel

TITLE = "Expert selection, token after token"
ABSENT, CACHED, HIT, MISS = range(4)
_SHOWN = (
    *("miss_rate", "token_miss_rate", "expert_lifetime_tokens"),
    *("routing_fidelity", "bytes_per_token"),
)


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Analyse the router's own choices and those of `cache_prior`, with one cache per layer.

    A row for each: perplexity, miss rates, lifetime in tokens, fidelity. The plot shows, for
    `layer` (MoE layers from 0), the state of every expert at every token: [tokens, experts].
    """
    capacity, share, layer = options["capacity"], options["lambda"], options["layer"]
    cache_prior = {"routing": "cache_prior", "routing.lambda": share}
    rows, maps = [], {}
    for name, overrides in {"standard": {}, f"cache_prior (lambda {share:g})": cache_prior}.items():
        with analyzed.under(overrides, capacity=capacity, scan=True) as engine:
            states = _watch(engine, layer)
            row = {"routing": name, "perplexity": analyzed.perplexity()}
        metrics = cache_metrics(engine.ledger.passes)
        rows.append(row | {key: metrics[key] for key in _SHOWN})
        maps[name] = np.array(states)
    return Analysis({"locality": rows}, partial(draw, maps, layer), capacity)


def _watch(engine: Engine, layer: int) -> list[IntArray]:
    """Return the list to which each lookup appends the states of the layer's experts [E]."""
    states: list[IntArray] = []
    num_experts, pool = engine.geometry.num_experts, engine.pools[layer]
    keys = np.arange(num_experts) + layer * num_experts

    def observe(event: Event) -> None:
        if event.layer == layer:
            resident = pool.resident
            is_resident = np.array([key in resident for key in keys.tolist()])
            needed, others = np.where(is_resident, HIT, MISS), np.where(is_resident, CACHED, ABSENT)
            states.append(np.where(np.isin(keys, event.keys), needed, others))

    engine.on_event = observe
    return states


def draw(maps: Mapping[str, IntArray], layer: int, tokens: int = 100) -> Any:
    """Draw the maps below each other: green a hit, red a miss, blue in the cache and not needed."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colors = ListedColormap(["#ffffff", "#9ecae1", "#31a354", "#de2d26"])
    figure, axes = new_figure(rows=len(maps))
    for panel, (name, all_states) in zip(axes, maps.items(), strict=True):
        states, style = all_states[:tokens], {"aspect": "auto", "interpolation": "nearest"}
        panel.imshow(states.T, cmap=colors, vmin=ABSENT, vmax=MISS, **style)
        miss_rate = np.sum(states == MISS) / np.sum(states >= HIT)
        panel.set_title(f"{name}: {miss_rate:.1%} misses in MoE layer {layer}")
        panel.set_ylabel("expert")
        panel.grid(False)
    axes[-1].set_xlabel("token")
    names = (("hit", HIT), ("miss", MISS), ("cached, not needed", CACHED))
    patches = [Patch(color=colors(value), label=label) for label, value in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
    return figure
