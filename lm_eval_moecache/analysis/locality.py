"""How long experts stay and when they are missed (cache-conditional experts, Figure 7, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.report.metrics import cache_metrics

TITLE = "Expert selection, token after token"
ABSENT, CACHED, HIT, MISS = range(4)
_SHOWN = (
    *("miss_rate", "token_miss_rate", "expert_lifetime_tokens"),
    *("routing_fidelity", "bytes_per_token"),
)


@dataclass(slots=True)
class SelectionMap:
    """For one layer, the state of every expert at every token: [tokens][experts]."""

    layer: int
    states: list[list[int]] = field(default_factory=list)


def analyze(
    analyzed: AnalyzedModel, capacity: str, routings: Mapping[str, Mapping[str, Any]], layer: int
) -> tuple[list[dict[str, Any]], dict[str, SelectionMap]]:
    """Read the text under each routing with one cache per layer.

    Returns a row for each (perplexity, miss rates, lifetime in tokens, fidelity) and the selection
    map of `layer`, which counts MoE layers from 0.
    """
    rows, maps = [], {}
    for name, overrides in routings.items():
        found = SelectionMap(layer)
        with analyzed.under(overrides, capacity=capacity, scan=True) as engine:
            _watch(engine, found)
            row = {"routing": name, "perplexity": analyzed.perplexity()}
        metrics = cache_metrics(engine.ledger.passes)
        rows.append(row | {key: metrics[key] for key in _SHOWN})
        maps[name] = found
    return rows, maps


def _watch(engine: Engine, found: SelectionMap) -> None:
    """Note the state of the layer's experts at each lookup."""
    base = found.layer * engine.geometry.num_experts
    resident = engine.pools[found.layer].resident

    def observe(event: Event) -> None:
        if event.layer != found.layer:
            return
        needed = {key - base for key in event.keys}
        states = []
        for expert in range(engine.geometry.num_experts):
            is_resident = base + expert in resident
            if expert in needed:
                states.append(HIT if is_resident else MISS)
            else:
                states.append(CACHED if is_resident else ABSENT)
        found.states.append(states)

    engine.observe(observe)


def draw(maps: Mapping[str, SelectionMap], title: str, tokens: int = 100) -> Any:
    """Draw the maps below each other: green a hit, red a miss, blue in the cache and not needed."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    from lm_eval_moecache.report.mpl_style import new_figure

    colors = ListedColormap(["#ffffff", "#9ecae1", "#31a354", "#de2d26"])
    figure, axes = new_figure(rows=len(maps))
    for panel, (name, found) in zip(axes, maps.items(), strict=True):
        columns = [list(column) for column in zip(*found.states[:tokens], strict=True)]
        panel.imshow(
            columns, cmap=colors, vmin=ABSENT, vmax=MISS, aspect="auto", interpolation="nearest"
        )
        shown = found.states[:tokens]
        needed = sum(row.count(HIT) + row.count(MISS) for row in shown)
        missed = sum(row.count(MISS) for row in shown)
        panel.set_title(f"{name}: {missed / needed:.1%} misses in MoE layer {found.layer}")
        panel.set_ylabel("expert")
        panel.grid(False)
    axes[-1].set_xlabel("token")
    names = (("hit", 2), ("miss", 3), ("cached, not needed", 1))
    figure.legend(
        handles=[Patch(color=colors(value), label=label) for label, value in names],
        loc="outside lower center",
        ncols=3,
    )
    figure.suptitle(title)
    return figure
