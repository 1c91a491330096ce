"""A byte n-gram model with absolute discounting, the baseline of perplexity per byte."""

from __future__ import annotations

import numpy as np

ORDER = 6
DISCOUNT = 0.75


def _grams(text: np.ndarray, length: int) -> np.ndarray:
    """Every run of `length` bytes as one number."""
    size = len(text) - length + 1
    keys = np.zeros(size, dtype=np.int64)
    for place in range(length):
        keys = (keys << 8) | text[place : place + size]
    return keys


class ByteNgram:
    """P(byte | up to ORDER - 1 bytes before), each order interpolated with the one below."""

    def __init__(self, train: bytes) -> None:
        text = np.frombuffer(train, dtype=np.uint8).astype(np.int64)
        self.tables = list[tuple[np.ndarray, ...]]()
        for length in range(1, ORDER + 1):
            grams, counts = np.unique(_grams(text, length), return_counts=True)
            heads, first = np.unique(grams >> 8, return_index=True)
            totals = np.add.reduceat(counts, first)
            kinds = np.diff(np.append(first, len(grams)))
            self.tables.append((grams, counts, heads, totals, kinds))

    def bits_per_byte(self, test: bytes) -> float:
        text = np.frombuffer(test, dtype=np.uint8).astype(np.int64)
        size = len(text) - ORDER + 1
        probability = np.full(size, 1 / 256)
        for length, (grams, counts, heads, totals, kinds) in enumerate(self.tables, start=1):
            keys = _grams(text, length)[ORDER - length :]
            place = np.minimum(np.searchsorted(grams, keys), len(grams) - 1)
            count = np.where(grams[place] == keys, counts[place], 0)
            head = np.minimum(np.searchsorted(heads, keys >> 8), len(heads) - 1)
            known = heads[head] == keys >> 8
            total, kind = totals[head], kinds[head]
            mixed = (np.maximum(count - DISCOUNT, 0) + DISCOUNT * kind * probability) / total
            probability = np.where(known, mixed, probability)
        return float(-np.log2(probability).mean())
