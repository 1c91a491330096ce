"""How much each rank of a router's choice matters (cache-conditional experts, Figure 2).

And AdapMoE's profile of sensitivity: how much the loss would rise where a layer executed only each
token's heaviest expert. Shapes: T tokens of a window, K experts per token, D hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.analysis.analyzed_model import Analysis, AnalyzedModel, Rows, watched
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.sensitivity import Doubles, rises
from lm_eval_moecache.report.plots import new_figure

TITLE = (
    "Perplexity when experts are dropped from a rank on, or one rank is swapped for a random one"
)


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Return one row per rank: perplexity with the rank dropped (and all after it) and swapped.

    Rank 0 is the unmodified model. Swapping is random, so it is read with each of `seeds` seeds;
    the row has the mean and the largest distance from it.
    """
    seeds = options["seeds"]

    def perplexity(overrides: dict[str, Any], seed: int = 0) -> float:
        with analyzed.under(overrides, seed=seed):
            return analyzed.perplexity()

    plain = perplexity({})
    rows: Rows = [{"rank": 0, "drop_from": plain, "swap": plain, "swap_spread": 0.0}]
    for rank in tqdm(range(1, analyzed.geometry.top_k + 1), desc="ranks"):
        dropped = perplexity({"routing": "drop_rank", "routing.rank": rank})
        swap = {"routing": "swap_rank", "routing.rank": rank}
        swapped = [perplexity(swap, seed) for seed in range(seeds)]
        mean = sum(swapped) / seeds
        spread = max(abs(value - mean) for value in swapped)
        rows.append({"rank": rank, "drop_from": dropped, "swap": mean, "swap_spread": spread})
    return Analysis({"sensitivity": rows}, f"{TITLE} ({analyzed.name})", partial(draw, rows))


def draw(rows: Rows, title: str) -> Any:
    """Draw the two panels of Figure 2; perplexity is on a logarithmic axis."""
    figure, (left, right) = new_figure(columns=2)
    plain, ranked = rows[0]["drop_from"], rows[1:]
    columns = {key: [row[key] for row in ranked] for key in rows[0]}
    ranks, spread = columns["rank"], columns["swap_spread"]
    left.plot(ranks, columns["drop_from"], marker="o")
    left.set_title("dropped: this rank and all lighter ones")
    right.errorbar(ranks, columns["swap"], yerr=spread, marker="o", capsize=3)
    right.set_title("swapped: this rank alone, for a random expert")
    for axes in (left, right):
        axes.axhline(plain, linestyle="--", linewidth=1, color="gray", label="unmodified")
        axes.set(yscale="log", xticks=ranks, ylabel="perplexity")
        axes.set_xlabel("rank of the expert (1 is the heaviest)")
        axes.legend()
    figure.suptitle(title)
    return figure


class Fisher:
    """One reading of the model's text, with gradients."""

    def __init__(self, analyzed: AnalyzedModel) -> None:
        self._analyzed = analyzed
        self._sums = np.zeros(len(analyzed.layers))
        self._weights: list[list[FloatArray]] = [[] for _ in analyzed.layers]
        self._changes: list[tuple[Tensor, Tensor]] = []
        self.num_tokens = 0

    def read(self) -> None:
        """Score every window and add up, for each layer, the rise per square of lost weight.

        Leaving out all but the heaviest expert changes a token's output by c (1 - alpha), which
        raises the loss by half of c' H c (1 - alpha)^2. The Hessian's diagonal is taken as the
        square of the gradient (empirical Fisher information), and c' H c is averaged over tokens.
        """
        model, layers = self._analyzed.model, self._analyzed.layers
        with watched([layer.experts for layer in layers], self.note):
            for window in tqdm(self._analyzed.windows, desc="reading", unit="window"):
                ids = window[None].to(model.device)
                # Summed, so that a token's gradient does not depend on its window's length.
                logits = model(ids).logits[0, :-1].float()
                loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                slopes = torch.autograd.grad(loss, [output for output, _ in self._changes])
                for index, (_, change_TD) in enumerate(self._changes):
                    rise = ((slopes[index].double() * change_TD) ** 2).sum() / 2
                    self._sums[index] += float(rise)
                self.num_tokens += len(window)
                self._changes.clear()

    @property
    def sensitivity(self) -> Doubles:
        """The mean rise of each layer [L], in nats per token."""
        return np.asarray(self._sums / self.num_tokens)

    def thresholds(self) -> Doubles:
        """Return the rises below which 0, 1, ... 100% of the activations lie, [101] and finite."""
        pairs = zip(self._weights, self.sensitivity, strict=True)
        all_rises = np.concatenate([rises(np.concatenate(w), float(s)).ravel() for w, s in pairs])
        # A share that includes heaviest experts, whose rise is infinite, gets all the others.
        largest = all_rises[np.isfinite(all_rises)].max()
        shares = np.quantile(all_rises, np.arange(101) / 100, method="lower")
        return np.asarray(np.minimum(shares, largest))

    def note(self, index: int, args: Any, output_TD: Tensor) -> None:
        """Record a layer's call: its output, and the change with the heaviest expert alone."""
        hidden_TD, index_TK, weights_TK = args
        weights = weights_TK.detach().double().sort(dim=-1, descending=True)
        order = index_TK.gather(-1, weights.indices)
        total_T = weights.values.sum(-1, keepdim=True)
        lost_T = 1 - weights.values[:, :1] / total_T
        experts = self._analyzed.layers[index].experts
        with torch.no_grad():
            heaviest_TD = experts.forward(hidden_TD, order[:, :1], total_T.to(weights_TK.dtype))
            change_TD = (output_TD.double() - heaviest_TD.double()) / lost_T.clamp_min(1e-12)
        self._changes.append((output_TD, change_TD * (lost_T > 1e-12)))
        self._weights[index].append(weights.values.float().cpu().numpy())
