"""How much the loss would rise where a layer executed only each token's heaviest expert.

Shapes: T tokens of a window, K experts per token, D hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.sensitivity import Doubles, rises


class Fisher:
    """One reading of the model's text, with gradients."""

    def __init__(self, analyzed: AnalyzedModel) -> None:
        self._analyzed = analyzed
        num_layers = len(analyzed.layers)
        self._sums = np.zeros(num_layers)
        self._weights: list[list[FloatArray]] = [[] for _ in range(num_layers)]
        self._change: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_tokens = 0

    def read(self) -> None:
        """Score every window and note, for each layer, the rise per square of lost weight.

        Leaving out all but the heaviest expert changes a token's output by c (1 - alpha), which
        raises the loss by half of c' H c (1 - alpha)^2. The Hessian's diagonal is taken as the
        square of the gradient (empirical Fisher information), and c' H c is averaged over tokens.
        """
        model = self._analyzed.model
        with ExitStack() as hooks:
            for index, layer in enumerate(self._analyzed.layers):
                hook = layer.experts.register_forward_hook(self._watch(index))
                hooks.callback(hook.remove)
            for window in tqdm(self._analyzed.windows, desc="reading", unit="window"):
                ids = window[None].to(model.device)
                # Summed, so that a token's gradient does not depend on its window's length.
                logits = model(ids).logits[0, :-1].float()
                loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                outputs = [output for output, _ in self._change.values()]
                slopes = torch.autograd.grad(loss, outputs)
                for index, slope_TD in zip(self._change, slopes, strict=True):
                    change_TD = self._change[index][1]
                    self._sums[index] += float(((slope_TD.double() * change_TD) ** 2).sum() / 2)
                self.num_tokens += len(window)
                self._change.clear()

    @property
    def sensitivity(self) -> Doubles:
        """The mean rise of each layer [L]."""
        return np.asarray(self._sums / self.num_tokens)

    def thresholds(self) -> Doubles:
        """Return the rises below which 0, 1, ... 100% of the activations lie, [101] and finite."""
        found = np.concatenate(
            [
                rises(np.concatenate(kept), float(value)).ravel()
                for kept, value in zip(self._weights, self.sensitivity, strict=True)
            ]
        )
        # A share that would need a token's heaviest expert gets all the others.
        most = found[np.isfinite(found)].max()
        shares = np.quantile(found, np.arange(101) / 100, method="lower")
        return np.asarray(np.minimum(shares, most))

    def _watch(self, index: int) -> Callable[..., None]:
        def hook(experts: Any, inputs: Any, output_TD: Tensor) -> None:
            hidden_TD, index_TK, weights_TK = inputs
            weights = weights_TK.detach().double().sort(dim=-1, descending=True)
            order = index_TK.gather(-1, weights.indices)
            total_T = weights.values.sum(-1, keepdim=True)
            lost_T = 1 - weights.values[:, :1] / total_T
            with torch.no_grad():
                alone = experts.forward(
                    hidden_TD, order[:, :1], total_T.to(weights_TK.dtype)
                ).double()
                change = (output_TD.double() - alone) / lost_T.clamp_min(1e-12)
            self._change[index] = (output_TD, change * (lost_T > 1e-12))
            self._weights[index].append(weights.values.float().cpu().numpy())

        return hook
