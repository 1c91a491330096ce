"""Which experts a model chooses together as it reads, and which give similar outputs (BuddyMoE).

Shapes: T tokens of a window, E experts, D hidden size, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.algorithms.learned.buddies import Coactivation
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.reading import ReadingModel, watched
from lm_eval_moecache.records.arrays import FloatArray

Weights = Callable[[int], Any]
"""Number of tokens in a window -> the weight of each."""


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
    reading: ReadingModel, sample_tokens: int = 256, weights: Weights = np.ones
) -> Observation:
    """Read the model's text once through the unmodified model.

    Raises ValueError for a model of one expert per token.
    """
    if reading.geometry.top_k < 2:
        raise ValueError(
            f"pretrained={reading.name!r} has one expert per token: none are chosen together."
        )
    counts, num_tokens = Coactivation(reading.geometry), reading.num_tokens
    stride, num_read = max(1, num_tokens // max(sample_tokens, 1)), 0
    top_logits: list[list[FloatArray]] = [[] for _ in reading.layers]
    hidden: list[list[Tensor]] = [[] for _ in reading.layers]

    def note(layer: int, args: Any, output: Any) -> None:
        choice = reading.layers[layer].gate.read(output)
        logits, _, experts = (part.reshape(len(weight_T), -1).cpu() for part in choice)
        logits_TE, experts_TK = logits.float().numpy(), experts.numpy().astype(np.int64)
        counts.add(layer, experts_TK, logits_TE, weight_T)
        sampled = slice(-num_read % stride, None, stride)
        top_logits[layer].append(np.take_along_axis(logits_TE, experts_TK, -1)[sampled])
        # Copied: a view would keep the whole tensor alive.
        hidden[layer].append(args[0].reshape(len(weight_T), -1)[sampled].clone())

    with watched(reading.routers, note):
        for window in tqdm(reading.windows, desc="profiling", unit="text"):
            weight_T = weights(len(window))
            reading.logits(window)
            num_read += len(window)
    return Observation(
        layers=reading.layers,
        counts=counts,
        num_tokens=num_tokens,
        top_logits=np.stack([np.concatenate(rows) for rows in top_logits]),
        hidden=[torch.cat(rows) for rows in hidden],
    )
