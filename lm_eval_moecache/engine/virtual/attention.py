"""Attention over the context: its arithmetic, and the KV cache that it reads."""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.hardware import Hardware


def attention_s(model: RealModel, hardware: Hardware, phase: str, positions: IntArray) -> float:
    """Return the seconds a layer's attention to the context takes in a pass, on average.

    `positions` are those of the pass's tokens in their sequences. Each token attends to what is
    before it and itself, as far back as a layer's window goes; each sequence's KV cache is read
    once, and a state of linear attention with it. A decode pass has one token of each sequence;
    in others a sequence's tokens follow each other.
    """
    seen = positions + 1
    multiply_adds = 0.0
    for cache in model.caches:
        looked_at = seen if cache.window is None else np.minimum(seen, cache.window)
        multiply_adds += cache.num_layers * cache.multiply_adds * float(looked_at.sum())
    last = np.append(np.diff(positions) != 1, True)
    ends = seen if phase == DECODE else seen[last]
    nbytes = sum(model.kv_bytes(end) for end in ends.tolist())
    read_s = nbytes / hardware.memory_bytes_per_s
    return max(2 * multiply_adds / hardware.peak_flops, read_s) / model.num_layers
