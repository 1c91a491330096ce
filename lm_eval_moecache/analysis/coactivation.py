"""Which experts are chosen together, and which give similar outputs (BuddyMoE Figures 4, 6, 7, 9).

Shapes: T tokens of a window, E experts, D hidden size, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.analysis.subject import Subject
from lm_eval_moecache.core.coactivation import (
    NO_BUDDY,
    Coactivation,
    buddy_lists,
    conditional,
)
from lm_eval_moecache.core.records import FloatArray
from lm_eval_moecache.moe_layers import MoELayer

TITLE = "Experts chosen together"
Weights = Callable[[int], Any]
"""Number of tokens in a window -> how much each of them counts."""


class Observation:
    """What one reading of a subject's text showed: counts, and sampled tokens of each layer."""

    def __init__(self, subject: Subject, sample_tokens: int) -> None:
        self.counts = Coactivation(subject.geometry)
        self.num_tokens = sum(len(window) for window in subject.windows)
        self._layers = subject.layers
        self._stride = max(1, self.num_tokens // max(sample_tokens, 1))
        self._seen = 0
        self._top_logits: list[list[FloatArray]] = [[] for _ in subject.layers]
        self._hidden: list[list[Tensor]] = [[] for _ in subject.layers]

    def note(self, layer: int, hidden_TD: Tensor, output: Any, weight_T: Any) -> None:
        """Take one router call: its input and its (logits, weights, indices)."""
        logits = output[0].detach().float().reshape(len(weight_T), -1).cpu().numpy()
        experts = output[2].reshape(len(weight_T), -1).cpu().numpy().astype(np.int64)
        self.counts.add(layer, experts, logits, weight_T)
        picked = np.arange(-self._seen % self._stride, len(weight_T), self._stride)
        self._top_logits[layer].append(
            np.take_along_axis(logits, experts, -1)[picked].astype(np.float32)
        )
        flat = hidden_TD.detach().reshape(len(weight_T), -1)
        self._hidden[layer].append(flat[torch.from_numpy(picked).to(flat.device)])

    def end_window(self, num_tokens: int) -> None:
        self._seen += num_tokens

    @property
    def top_logits(self) -> FloatArray:
        """The sampled tokens' logits of their own experts: [layers, N, K]."""
        return np.stack([np.concatenate(rows) for rows in self._top_logits])

    def similarity(self) -> FloatArray:
        """Return the mean cosine of two experts' outputs on the sampled tokens: [layers, E, E]."""
        pairs = zip(self._layers, self._hidden, strict=True)
        bar = tqdm(pairs, desc="output similarity", total=len(self._layers), unit="layer")
        return np.stack([_similarity(layer, torch.cat(rows)) for layer, rows in bar])


def observe(subject: Subject, sample_tokens: int = 256, weights: Weights = np.ones) -> Observation:
    """Read the subject's text once through the unmodified model."""
    found = Observation(subject, sample_tokens)
    current: list[Any] = [None]

    def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda router, args, output: found.note(layer, args[0], output, current[0])

    handles = [
        layer.router.register_forward_hook(hook(i)) for i, layer in enumerate(subject.layers)
    ]
    try:
        for window in tqdm(subject.windows, desc="profiling", unit="text"):
            current[0] = weights(len(window))
            with torch.no_grad():
                subject.model(window[None].to(subject.model.device))
            found.end_window(len(window))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _similarity(layer: MoELayer, hidden_ND: Tensor) -> FloatArray:
    outputs = []
    for expert in range(layer.num_experts):
        index = torch.full((len(hidden_ND), 1), expert, device=hidden_ND.device)
        with torch.no_grad():
            output = layer.experts(hidden_ND, index, torch.ones_like(index, dtype=hidden_ND.dtype))
        outputs.append(nn.functional.normalize(output.float(), dim=-1))
    stacked_END = torch.stack(outputs)
    cosines = torch.einsum("and,bnd->ab", stacked_END, stacked_END) / len(hidden_ND)
    return np.asarray(cosines.cpu().numpy(), dtype=np.float32)


def analyze(
    observation: Observation, similarity: FloatArray, alpha: float, k_max: int, smoothing: float
) -> list[dict[str, Any]]:
    """Return a row for each layer: how uneven its experts and their pairs are, and its lists.

    `similarity_of_buddies` is the mean output cosine of experts and their buddies, beside that of
    all pairs: whether being chosen together says anything about doing the same.
    """
    rows = []
    counts = observation.counts
    for layer, (active, pairs) in enumerate(zip(counts.activations, counts.pairs, strict=True)):
        q = conditional(pairs, smoothing)
        lists = buddy_lists(q, alpha, k_max)
        pivots, places = (lists != NO_BUDDY).nonzero()
        others = ~np.eye(len(q), dtype=bool)
        first = lists[:, 0]
        rows.append(
            {
                "layer": layer,
                "most_active_share": float(active.max() / active.sum()),
                "least_active_share": float(active.min() / active.sum()),
                "mass_of_4_peers": float(np.sort(q, axis=-1)[:, -4:].sum(-1).mean()),
                "mean_list_size": len(pivots) / len(q),
                "similarity_of_pairs": float(similarity[layer][others].mean()),
                "similarity_of_buddies": float(
                    similarity[layer][pivots, lists[pivots, places]].mean()
                ),
                "similarity_of_first_buddy": float(
                    similarity[layer][np.arange(len(q)), first][first != NO_BUDDY].mean()
                ),
            }
        )
    return rows


def draw(panels: Mapping[str, FloatArray], active: Any, title: str, path: str) -> None:
    """Draw one layer: a heat map of each measure [E, E] (diagonals left out), and activations."""
    from lm_eval_moecache.report.figure import new_figure, save

    figure, axes = new_figure(columns=len(panels) + 1)
    for panel, (name, values) in zip(axes, panels.items(), strict=False):
        shown = np.where(np.eye(len(values), dtype=bool), np.nan, values)
        image = panel.imshow(shown, cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=panel, shrink=0.6)
        panel.set_title(name)
        panel.set_xlabel("expert j")
        panel.set_ylabel("expert i")
        panel.grid(False)
    axes[-1].bar(range(len(active)), active)
    axes[-1].set_title("activations A(i)")
    axes[-1].set_xlabel("expert i")
    axes[-1].set_ylabel("tokens")
    figure.suptitle(title)
    save(figure, path)
