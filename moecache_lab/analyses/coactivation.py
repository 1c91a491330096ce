"""Which experts are chosen together and give similar outputs (BuddyMoE Figures 4, 6, 7, 9)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.learned.buddies import (
    NO_BUDDY,
    Coactivation,
    buddy_lists,
    conditional,
)
from lm_eval_moecache.model.reading import observe
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.report.plots import new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel, Rows

TITLE = "Experts chosen together"


def coactivation(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Analyse all layers, and draw one of them."""
    reading, layer = observe(analyzed, options["sample_tokens"]), options["layer"]
    similarity = reading.similarity()
    rows = analyze(reading.counts, similarity, options["alpha"], options["k_max"])
    picture = partial(draw, reading.counts, similarity, layer)
    return Analysis({"coactivation": rows}, picture, TITLE, f"MoE layer {layer}")


def analyze(counts: Coactivation, similarity: FloatArray, alpha: float, k_max: int) -> Rows:
    """Return a row for each layer: how uneven its experts and their pairs are, and its lists.

    The similarity (mean output cosine) of buddies is listed with that of all pairs: whether experts
    chosen together compute alike. `correlation` is that of the two over all pairs.
    """
    rows = []
    for layer, (active, pairs) in enumerate(zip(counts.activations, counts.pairs, strict=True)):
        q = conditional(pairs, 0.0)
        lists = buddy_lists(q, alpha, k_max)
        pivots, places = (lists != NO_BUDDY).nonzero()
        paired = np.flatnonzero(lists[:, 0] != NO_BUDDY)
        off_diagonal = ~np.eye(len(q), dtype=bool)
        cosines = similarity[layer]
        rows.append(
            {
                "layer": layer,
                "most_active_share": float(active.max() / active.sum()),
                "least_active_share": float(active.min() / active.sum()),
                "mass_of_4_best_peers": float(np.sort(q, axis=-1)[:, -4:].sum(-1).mean()),
                "mean_list_size": len(pivots) / len(q),
                "similarity_of_pairs": float(cosines[off_diagonal].mean()),
                "similarity_of_buddies": float(cosines[pivots, lists[pivots, places]].mean()),
                "similarity_of_best_buddy": float(cosines[paired, lists[paired, 0]].mean()),
                "correlation": float(np.corrcoef(q[off_diagonal], cosines[off_diagonal])[0, 1]),
            }
        )
    return rows


def draw(counts: Coactivation, similarity: FloatArray, layer: int) -> Any:
    """Draw a layer's co-activations, output similarities (diagonals left out) and activations."""
    figure, (left, middle, right) = new_figure(columns=3)
    for panel, name, values in (
        (left, "tokens that chose i and j", counts.pairs[layer]),
        (middle, "mean cosine of outputs", similarity[layer]),
    ):
        cells = np.where(np.eye(len(values), dtype=bool), np.nan, values)
        image = panel.imshow(cells, cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=panel, shrink=0.8)
        panel.set_title(name)
        panel.set_xlabel("expert j")
        panel.set_ylabel("expert i")
        panel.grid(False)
    right.bar(range(len(counts.activations[layer])), counts.activations[layer])
    right.set_title("tokens that chose i")
    right.set_xlabel("expert i")
    return figure
