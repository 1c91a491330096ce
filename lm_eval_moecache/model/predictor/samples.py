"""Recorded router inputs and logits on disk: shards of whole prompts, read layer by layer.

Shapes: N recorded tokens, L layers, D hidden size, E experts. A shard holds `hidden` [L, N, D] and
`logits` [L, N, E] in float16 and `prompt` [N], its tokens in the order of generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray

HELD_OUT_SHARE = 0.2
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Pairs:
    """What one layer's predictor learns from: its inputs and the logits it has to give."""

    inputs_ND: Halves
    targets_NE: Halves
    prompts_N: IntArray

    def where(self, rows: BoolArray) -> Pairs:
        return Pairs(self.inputs_ND[rows], self.targets_NE[rows], self.prompts_N[rows])


class Samples:
    """The recorded tokens of all shards, or of some prompts."""

    def __init__(self, shards: Sequence[Path]) -> None:
        # A batch whose answers all ended at once has recorded nothing.
        self._shards = [shard for shard in shards if len(_read(shard, "prompt"))]
        if not self._shards:
            raise ValueError("every answer ended at once: there is nothing to learn from.")
        self.prompts: IntArray = np.concatenate([_read(s, "prompt") for s in self._shards])

    def hidden(self, layer: int) -> Halves:
        """Return the inputs [N, D] of a layer's router."""
        return np.concatenate([_read(s, "hidden", layer) for s in self._shards])

    def logits(self, layer: int) -> Halves:
        """Return the logits [N, E] of a layer's router."""
        return np.concatenate([_read(s, "logits", layer) for s in self._shards])

    def pairs(self, layer: int, num_layers: int) -> Pairs:
        """Return what is predicted at `layer`: the next layer, or layer 0 of the next token."""
        inputs = self.hidden(layer)
        if layer < num_layers - 1:
            return Pairs(inputs, self.logits(layer + 1), self.prompts)
        follows = self.prompts[1:] == self.prompts[:-1]
        return Pairs(inputs[:-1][follows], self.logits(0)[1:][follows], self.prompts[:-1][follows])

    def split(self, seed: int) -> tuple[IntArray, IntArray]:
        """Divide the prompts 80/20, so that no token of a held-out prompt was trained on."""
        prompts = np.unique(self.prompts)
        np.random.default_rng(seed).shuffle(prompts)
        held_out = max(1, round(HELD_OUT_SHARE * len(prompts)))
        if held_out >= len(prompts):
            raise ValueError(f"prompts: {len(prompts)} cannot be divided into train and held-out.")
        return np.sort(prompts[held_out:]), np.sort(prompts[:held_out])


def write_shard(path: Path, hidden_LND: Halves, logits_LNE: Halves, prompts_N: IntArray) -> None:
    """Write one shard whole or not at all."""
    from safetensors.numpy import save

    data = save({"hidden": hidden_LND, "logits": logits_LNE, "prompt": prompts_N})
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)


def top_k(logits_NE: FloatArray | Halves, count: int) -> IntArray:
    """Return the `count` best experts of each row, best first, ties to the smaller index."""
    return np.argsort(-logits_NE.astype(np.float32), axis=-1, kind="stable")[:, :count]


def _read(path: Path, name: str, layer: int | None = None) -> Any:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return file.get_tensor(name) if layer is None else file.get_slice(name)[layer]
