"""Which experts are chosen together, and which give similar outputs (BuddyMoE Figures 4, 6, 7, 9).

Shapes: T tokens of a window, E experts, D hidden size, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.analysis.analyzed_model import Analysis, AnalyzedModel, Rows, watched
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.coactivation import NO_BUDDY, Coactivation, buddy_lists, conditional
from lm_eval_moecache.report.plots import new_figure

TITLE = "Experts chosen together"
Weights = Callable[[int], Any]
"""Number of tokens in a window -> the weight of each."""


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Analyse all layers, and draw one of them."""
    reading, layer = observe(analyzed, options["sample_tokens"]), options["layer"]
    similarity = reading.similarity()
    rows = analyze(reading.counts, similarity, options["alpha"], options["k_max"])
    title = f"{TITLE} ({analyzed.name}, MoE layer {layer})"
    return Analysis({"coactivation": rows}, title, partial(draw, reading.counts, similarity, layer))


class Observation(NamedTuple):
    """One reading of the model's text: counts, and sampled tokens of each layer."""

    layers: Sequence[MoELayer]
    counts: Coactivation
    num_tokens: int
    top_logits: FloatArray
    """The sampled tokens' logits of their own experts: [layers, N, K]."""
    hidden: Sequence[Tensor]
    """Their router's inputs, by layer: [N, D]."""

    def similarity(self) -> FloatArray:
        """Return the mean cosine of two experts' outputs on the sampled tokens: [layers, E, E]."""
        similarities = []
        pairs = list(zip(self.layers, self.hidden, strict=True))
        for layer, hidden_ND in tqdm(pairs, desc="output similarity", unit="layer"):
            outputs = []
            for expert in range(layer.num_experts):
                index = torch.full((len(hidden_ND), 1), expert, device=hidden_ND.device)
                ones = torch.ones_like(index, dtype=hidden_ND.dtype)
                with torch.no_grad():
                    output = layer.experts(hidden_ND, index, ones)
                outputs.append(nn.functional.normalize(output.float(), dim=-1))
            stacked_END = torch.stack(outputs)
            cosines = torch.einsum("and,bnd->ab", stacked_END, stacked_END) / len(hidden_ND)
            similarities.append(np.asarray(cosines.cpu().numpy(), dtype=np.float32))
        return np.stack(similarities)


def observe(
    analyzed: AnalyzedModel, sample_tokens: int = 256, weights: Weights = np.ones
) -> Observation:
    """Read the model's text once through the unmodified model."""
    if analyzed.geometry.top_k < 2:
        raise ValueError(
            f"pretrained={analyzed.name!r} has one expert per token: none are chosen together."
        )
    counts, num_tokens = Coactivation(analyzed.geometry), sum(map(len, analyzed.windows))
    stride, num_read = max(1, num_tokens // max(sample_tokens, 1)), 0
    top_logits: list[list[FloatArray]] = [[] for _ in analyzed.layers]
    hidden: list[list[Tensor]] = [[] for _ in analyzed.layers]

    def note(layer: int, args: Any, output: Any) -> None:
        choice = analyzed.layers[layer].gate.read(output)
        logits, _, experts = (part.reshape(len(weight_T), -1).cpu() for part in choice)
        logits_TE, experts_TK = logits.float().numpy(), experts.numpy().astype(np.int64)
        counts.add(layer, experts_TK, logits_TE, weight_T)
        sampled = slice(-num_read % stride, None, stride)
        top_logits[layer].append(np.take_along_axis(logits_TE, experts_TK, -1)[sampled])
        # Copied: a view would keep the whole tensor alive.
        hidden[layer].append(args[0].reshape(len(weight_T), -1)[sampled].clone())

    with watched(analyzed.routers, note):
        for window in tqdm(analyzed.windows, desc="profiling", unit="text"):
            weight_T = weights(len(window))
            analyzed.logits(window)
            num_read += len(window)
    return Observation(
        layers=analyzed.layers,
        counts=counts,
        num_tokens=num_tokens,
        top_logits=np.stack([np.concatenate(rows) for rows in top_logits]),
        hidden=[torch.cat(rows) for rows in hidden],
    )


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


def draw(counts: Coactivation, similarity: FloatArray, layer: int, title: str) -> Any:
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
    figure.suptitle(title)
    return figure
