"""Which experts are chosen together, and which give similar outputs (BuddyMoE Figures 4, 6, 7, 9).

Shapes: T tokens of a window, E experts, D hidden size, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.analysis.analyzed_model import Analysis, AnalyzedModel, Rows
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.coactivation import NO_BUDDY, Coactivation, buddy_lists, conditional

TITLE = "Experts chosen together"
Weights = Callable[[int], Any]
"""Number of tokens in a window -> how much each of them counts."""


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Analyse all layers, and draw one of them."""
    found, layer = observe(analyzed, options["sample_tokens"]), options["layer"]
    similarity = found.similarity()
    rows = analyze(found.counts, similarity, options["alpha"], options["k_max"])
    title = f"{TITLE} ({analyzed.name}, MoE layer {layer})"
    return Analysis({"coactivation": rows}, title, partial(draw, found.counts, similarity, layer))


class Observation:
    """What one reading of the model's text showed: counts, and sampled tokens of each layer."""

    def __init__(self, analyzed: AnalyzedModel, sample_tokens: int) -> None:
        self.counts = Coactivation(analyzed.geometry)
        self.num_tokens = sum(len(window) for window in analyzed.windows)
        self._layers = analyzed.layers
        self._stride = max(1, self.num_tokens // max(sample_tokens, 1))
        self._top_logits: list[list[FloatArray]] = [[] for _ in analyzed.layers]
        self._hidden: list[list[Tensor]] = [[] for _ in analyzed.layers]

    def note(self, layer: int, hidden_TD: Tensor, output: Any, weight_T: Any, seen: int) -> None:
        """Take one router call after `seen` tokens: its input, its (logits, weights, indices)."""
        logits = output[0].detach().float().reshape(len(weight_T), -1).cpu().numpy()
        experts = output[2].reshape(len(weight_T), -1).cpu().numpy().astype(np.int64)
        self.counts.add(layer, experts, logits, weight_T)
        picked = np.arange(-seen % self._stride, len(weight_T), self._stride)
        top_logits = np.take_along_axis(logits, experts, -1)[picked]
        self._top_logits[layer].append(top_logits.astype(np.float32))
        flat = hidden_TD.detach().reshape(len(weight_T), -1)
        self._hidden[layer].append(flat[torch.from_numpy(picked).to(flat.device)])

    @property
    def top_logits(self) -> FloatArray:
        """The sampled tokens' logits of their own experts: [layers, N, K]."""
        return np.stack([np.concatenate(rows) for rows in self._top_logits])

    def similarity(self) -> FloatArray:
        """Return the mean cosine of two experts' outputs on the sampled tokens: [layers, E, E]."""
        pairs = zip(self._layers, self._hidden, strict=True)
        found = []
        for layer, rows in tqdm(
            pairs, desc="output similarity", total=len(self._layers), unit="layer"
        ):
            hidden_ND, outputs = torch.cat(rows), []
            for expert in range(layer.num_experts):
                index = torch.full((len(hidden_ND), 1), expert, device=hidden_ND.device)
                ones = torch.ones_like(index, dtype=hidden_ND.dtype)
                with torch.no_grad():
                    output = layer.experts(hidden_ND, index, ones)
                outputs.append(nn.functional.normalize(output.float(), dim=-1))
            stacked_END = torch.stack(outputs)
            cosines = torch.einsum("and,bnd->ab", stacked_END, stacked_END) / len(hidden_ND)
            found.append(np.asarray(cosines.cpu().numpy(), dtype=np.float32))
        return np.stack(found)


def observe(
    analyzed: AnalyzedModel, sample_tokens: int = 256, weights: Weights = np.ones
) -> Observation:
    """Read the model's text once through the unmodified model."""
    found = Observation(analyzed, sample_tokens)
    seen, weight_T = 0, None

    def note(layer: int, router: nn.Module, args: Any, output: Any) -> None:
        found.note(layer, args[0], output, weight_T, seen)

    with ExitStack() as hooks:
        for index, layer in enumerate(analyzed.layers):
            handle = layer.router.register_forward_hook(partial(note, index))
            hooks.callback(handle.remove)
        for window in tqdm(analyzed.windows, desc="profiling", unit="text"):
            weight_T = weights(len(window))
            with torch.no_grad():
                analyzed.model(window[None].to(analyzed.model.device))
            seen += len(window)
    return found


def analyze(counts: Coactivation, similarity: FloatArray, alpha: float, k_max: int) -> Rows:
    """Return a row for each layer: how uneven its experts and their pairs are, and its lists.

    The similarity (mean output cosine) of buddies stands beside that of all pairs: whether being
    chosen together says anything about doing the same. The `correlation` is that of the two over
    all pairs.
    """
    rows = []
    for layer, (active, pairs) in enumerate(zip(counts.activations, counts.pairs, strict=True)):
        q = conditional(pairs, 0.0)
        lists = buddy_lists(q, alpha, k_max)
        pivots, places = (lists != NO_BUDDY).nonzero()
        first = np.flatnonzero(lists[:, 0] != NO_BUDDY)
        others = ~np.eye(len(q), dtype=bool)
        cosines = similarity[layer]
        rows.append(
            {
                "layer": layer,
                "most_active_share": float(active.max() / active.sum()),
                "least_active_share": float(active.min() / active.sum()),
                "mass_of_4_best_peers": float(np.sort(q, axis=-1)[:, -4:].sum(-1).mean()),
                "mean_list_size": len(pivots) / len(q),
                "similarity_of_pairs": float(cosines[others].mean()),
                "similarity_of_buddies": float(cosines[pivots, lists[pivots, places]].mean()),
                "similarity_of_best_buddy": float(cosines[first, lists[first, 0]].mean()),
                "correlation": float(np.corrcoef(q[others], cosines[others])[0, 1]),
            }
        )
    return rows


def draw(counts: Coactivation, similarity: FloatArray, layer: int, title: str) -> Any:
    """Draw a layer's co-activations, output similarities (diagonals left out) and activations."""
    from lm_eval_moecache.report.plots import new_figure

    figure, (left, middle, right) = new_figure(columns=3)
    for panel, name, values in (
        (left, "tokens that chose i and j", counts.pairs[layer]),
        (middle, "mean cosine of outputs", similarity[layer]),
    ):
        shown = np.where(np.eye(len(values), dtype=bool), np.nan, values)
        image = panel.imshow(shown, cmap="viridis", interpolation="nearest")
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
