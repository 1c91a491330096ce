"""How much a model's loss would rise where a layer ran only each token's heaviest expert (AdapMoE).

Shapes: T tokens of a window, K experts per token, D hidden size, L layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.algorithms.learned.sensitivity import Doubles, rises
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.reading import ReadingModel, watched
from lm_eval_moecache.records.arrays import FloatArray


class Fisher:
    """One reading of the model's text, with gradients."""

    def __init__(self, reading: ReadingModel) -> None:
        self._reading = reading
        self._sums = np.zeros(len(reading.layers))
        self._weights: list[list[FloatArray]] = [[] for _ in reading.layers]
        self._changes: list[tuple[Tensor, Tensor]] = []
        self.num_tokens = 0

    def read(self) -> None:
        """Score every window and add up, for each layer, the rise per square of lost weight.

        Leaving out all but the heaviest expert changes a token's output by c (1 - alpha), which
        raises the loss by half of c' H c (1 - alpha)^2. The Hessian's diagonal is taken as the
        square of the gradient (empirical Fisher information), and c' H c is averaged over tokens.
        """
        model, layers = self._reading.model, self._reading.layers
        with watched([layer.experts for layer in layers], self.note):
            for window in tqdm(self._reading.windows, desc="reading", unit="window"):
                ids = window[None].to(device_of(model))
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
        experts = self._reading.layers[index].experts
        with torch.no_grad():
            heaviest_TD = experts.forward(hidden_TD, order[:, :1], total_T.to(weights_TK.dtype))
            change_TD = (output_TD.double() - heaviest_TD.double()) / lost_T.clamp_min(1e-12)
        self._changes.append((output_TD, change_TD * (lost_T > 1e-12)))
        self._weights[index].append(weights.values.float().cpu().numpy())
