"""Applies trained predictors: of each layer's next router, and of all routers from the text.

Shapes: B texts, T tokens, L layers, E experts, D embedding or hidden size, W width of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.learned.data_aware import NUM_LSTMS, sizes_of
from lm_eval_moecache.algorithms.learned.predictor import (
    array_name,
    hidden_size,
    num_stages,
)
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.arrays import BoolArray, FloatArray
from lm_eval_moecache.records.artifact import Artifact

Stages = list[tuple[Tensor, Tensor]]


class PredictorNetwork:
    """The predictors of all layers. They compute in float32, whatever the model's dtype."""

    def __init__(self, arrays: Mapping[str, Any], num_layers: int) -> None:
        arrays = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
        self._layers: list[Stages] = [
            [
                (
                    arrays[array_name(layer, stage, "weight")],
                    arrays[array_name(layer, stage, "bias")],
                )
                for stage in range(num_stages(layer, num_layers))
            ]
            for layer in range(num_layers)
        ]

    @torch.no_grad()
    def __call__(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Return logits [T, E] for the layer after `layer` (the first one after the last)."""
        stages = self._layers[layer]
        if stages[0][0].device != hidden_TD.device:
            stages = [(w.to(hidden_TD.device), b.to(hidden_TD.device)) for w, b in stages]
            self._layers[layer] = stages
        values = hidden_TD.float()
        for stage, (weight, bias) in enumerate(stages):
            values = nn.functional.linear(values.relu() if stage else values, weight, bias)
        return values


def network_of(prefetch: PrefetchAlgorithm, width: int) -> PredictorNetwork | None:
    """Return a prefetcher's network, None without one; ValueError if its input is not `width`."""
    if not prefetch.uses_predictor or prefetch.artifact is None:
        return None
    artifact, expected = prefetch.artifact, hidden_size(prefetch.artifact)
    if expected != width:
        raise ValueError(
            f"prefetch.profile={artifact.path!r} takes hidden states of {expected} numbers, but "
            f"the routers of {prefetch.geometry.model!r} take {width}. Make one for this model "
            "with `moecache profile predictor`."
        )
    return PredictorNetwork(artifact.arrays, artifact.num_layers)


State = tuple[Tensor, Tensor]
Embed = Callable[[Tensor], Tensor]


class DataAwareNetwork(nn.Module):
    """Compression, LSTM stages, sparse causal attention, a residual, heads. Computes in float32."""

    def __init__(self, hidden: int, width: int, num_layers: int, num_experts: int) -> None:
        super().__init__()
        self.compress = nn.Linear(hidden, width)
        self.lstm = nn.LSTM(width, width, NUM_LSTMS, batch_first=True)
        self.residual = nn.Linear(width, width)
        self.heads = nn.Linear(width, num_layers * num_experts)
        self.per_layer: tuple[int, int] = (num_layers, num_experts)

    def forward(
        self, embedded_BTD: Tensor, read_BSW: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """Return logits [B, T, L, E], the LSTM's outputs so far [B, S + T, W], and its state.

        `read_BSW` and `state` come from the call on the S tokens before.
        """
        compressed = self.compress(embedded_BTD.float()).relu()
        output, state = self.lstm(compressed, state)
        history = output if read_BSW is None else torch.cat([read_BSW, output], dim=1)
        scores = output @ history.mT / output.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        future = future.triu(1 + history.shape[1] - output.shape[1])
        context = sparsemax(scores.masked_fill(future, -1e9)) @ history
        logits = self.heads(context + self.residual(compressed).relu())
        assert state is not None
        return logits.unflatten(-1, self.per_layer), history, state


def sparsemax(scores: Tensor) -> Tensor:
    """Project each row onto the simplex (Martins & Astudillo 2016): like softmax, with zeros."""
    ordered = scores.sort(dim=-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    excess = ordered.cumsum(-1) - 1
    support = (count * ordered > excess).sum(-1, keepdim=True)
    return (scores - excess.gather(-1, support - 1) / support).clamp_min(0)


@dataclass(slots=True)
class _Text:
    """One row's tokens so far, by place in the KV cache, and the network's state after them."""

    ids: list[int]
    is_real: list[bool]
    num_read: int = 0
    """Places that `read` and `state` cover."""
    read: Tensor | None = None
    state: State | None = None


class PassPredictor:
    """Predicts each pass from the text so far, which is kept by row like the model's KV cache.

    Tokens that the KV cache drops again (rejected drafts) are dropped here, too. Rows whose past
    is unknown (their number has changed) are read from this pass on. Beams that swap rows are not
    followed.
    """

    def __init__(self, artifact: Artifact, embed: Embed) -> None:
        sizes = *sizes_of(artifact), artifact.num_layers, artifact.num_experts
        arrays = {n: torch.from_numpy(np.array(a)).float() for n, a in artifact.arrays.items()}
        self._network = DataAwareNetwork(*sizes)
        self._network.load_state_dict(arrays)
        self._network.eval()
        self._embed = embed
        self._texts: list[_Text] = []

    @torch.no_grad()
    def begin_pass(
        self, input_ids: Tensor, past_length: int, valid: BoolArray | None
    ) -> dict[int, FloatArray]:
        """Return for each layer the logits [tokens, E] of the pass's valid tokens, row by row."""
        rows, length = input_ids.shape
        real = np.ones((rows, length), dtype=bool) if valid is None else valid.reshape(rows, length)
        if past_length == 0 or len(self._texts) != rows:
            self._texts = [_Text([0] * past_length, [False] * past_length) for _ in range(rows)]
        self._network.to(input_ids.device)
        row_logits = [
            self._read(text, ids, mask, past_length)
            for text, ids, mask in zip(self._texts, input_ids.tolist(), real.tolist(), strict=True)
        ]
        logits_TLE = torch.cat(row_logits).cpu().numpy()
        return {layer: logits_TLE[:, layer] for layer in range(logits_TLE.shape[1])}

    def _read(self, text: _Text, ids: list[int], real: list[bool], past_length: int) -> Tensor:
        """Return the logits of a row's real tokens among `ids`: [t, L, E]."""
        if len(text.ids) > past_length and text.num_read > past_length:
            text.num_read, text.read, text.state = 0, None, None
        text.ids[past_length:], text.is_real[past_length:] = ids, real
        new = range(text.num_read, len(text.ids))
        new_ids = [text.ids[place] for place in new if text.is_real[place]]
        text.num_read = len(text.ids)
        if not new_ids:
            return self._network.heads.weight.new_zeros((0, *self._network.per_layer))
        device = self._network.heads.weight.device
        embedded = self._embed(torch.tensor([new_ids], device=device))
        logits, text.read, text.state = self._network(embedded, text.read, text.state)
        pass_logits: Tensor = logits[0][len(new_ids) - sum(real) :]
        return pass_logits


def pass_predictor_of(prefetch: PrefetchAlgorithm, embedding: nn.Module) -> PassPredictor | None:
    """Return a prefetcher's predictor of whole passes, if any, over the model's token embeddings.

    ValueError where the network takes embeddings of another length.
    """
    artifact = prefetch.artifact
    if not prefetch.predicts_pass or artifact is None:
        return None
    actual, expected = next(embedding.parameters()).shape[-1], sizes_of(artifact)[0]
    if actual != expected:
        raise ValueError(
            f"prefetch.profile={artifact.path!r} takes embeddings of {expected} numbers, but those "
            f"of {prefetch.geometry.model!r} have {actual}. Make one for this model with `moecache "
            "profile data_aware`."
        )
    return PassPredictor(artifact, embedding)
