"""What a model carries from one decode step to the next, for the rows of a batch.

It is the keywords of the next call: masks and positions [.., rows, tokens], and the cache of the
model's layers. The cache holds all tokens but the newest, which the mask already counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Carried = dict[str, Any]
MASK = "attention_mask"
_KNOWN = {
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Classes of transformers' cache layers that hold nothing but keys, values and states."""
_KEYS, _STATES = ("keys", "values"), ("conv_states", "recurrent_states")


def take_prompts(carried: Carried, rows: slice) -> Carried:
    """Return what some rows carry before the first pass, without padding that all of them have.

    Caches are empty then: each row set gets one of its own.
    """
    mask = carried[MASK]
    size, length = mask.shape
    taken, first = dict(carried), length - int(mask[rows].sum(-1).max())
    for name, value in carried.items():
        if hasattr(value, "get_seq_length"):
            taken[name] = copy.deepcopy(value)
        elif isinstance(value, Tensor) and value.shape[-1:] == (length,):
            own = value[rows] if _axis(value, size) == 0 else value[:, rows]
            taken[name] = own[..., first:]
    return taken


def keep_rows(carried: Carried, rows: Sequence[int], size: int) -> bool:
    """Keep only these of `size` rows; False, with nothing changed, where a cache gives up none."""
    index, caches = torch.tensor(rows), _caches(carried)
    try:
        for cache in caches:
            cache.reorder_cache(index)
    except (NotImplementedError, AttributeError):
        return False
    for name, value in carried.items():
        if isinstance(value, Tensor) and value.ndim:
            axis = _axis(value, size)
            if value.ndim > axis and value.shape[axis] == size:
                carried[name] = value.index_select(axis, index.to(value.device))
    return True


def can_join(carried: Carried) -> bool:
    """Whether rows of other prompts may come to stand beside these."""
    length, caches = carried[MASK].shape[-1], _caches(carried)
    tensors = [value for value in carried.values() if isinstance(value, Tensor)]
    layers = [layer for cache in caches for layer in getattr(cache, "layers", [None])]
    return (
        all(value.shape[-1:] == (length,) for value in tensors)
        and all(type(layer).__name__ in _KNOWN for layer in layers)
        and all(isinstance(getattr(layer, name, {}), dict) for layer in layers for name in _STATES)
    )


def join_rows(first: Carried, second: Carried) -> Carried:
    """Return what the rows of both carry. Both must allow it (`can_join`), and are used up.

    Rows are padded on the left to the longest; padding that all have is cut off.
    """
    own = [int(part[MASK].sum(-1).max()) for part in (first, second)]
    length, joined = max(own), dict(first)
    for name, value in first.items():
        if isinstance(value, Tensor):
            parts = [value[..., -own[0] :], second[name][..., -own[1] :]]
            padded = [pad(part, (length - part.shape[-1], 0)) for part in parts]
            joined[name] = torch.cat(padded, dim=_axis(value, len(first[MASK])))
    for cache, other in zip(_caches(first), _caches(second), strict=True):
        for layer, more in zip(cache.layers, other.layers, strict=True):
            _set_length(layer, own[0] - 1, length - 1)
            _set_length(more, own[1] - 1, length - 1)
            for (holder, key), (others, _) in zip(_held(layer), _held(more), strict=True):
                holder[key] = torch.cat([holder[key], others[key]])
    return joined


def _axis(value: Tensor, size: int) -> int:
    """Return the axis of the rows: positions of several kinds come as [kinds, rows, tokens]."""
    return 0 if value.shape[0] == size else 1


def _caches(carried: Carried) -> list[Any]:
    return [value for value in carried.values() if hasattr(value, "get_seq_length")]


def _held(layer: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Yield where a layer holds each tensor [rows, ..]: in which dictionary, under which key."""
    attributes = vars(layer)
    holders = [attributes, *(attributes.get(name, {}) for name in _STATES)]
    for holder, keys in zip(holders, (_KEYS, *holders[1:]), strict=True):
        for key in keys:
            if holder.get(key) is not None:
                yield holder, key


def _set_length(layer: Any, own: int, length: int) -> None:
    """Cut a layer's keys and values to the last `own` tokens, then pad them to `length`."""
    if getattr(layer, "keys", None) is None:
        return
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        # Such a layer keeps the last ones only, and counts all.
        layer.cumulative_length = length
        own, length = min(own, window - 1), min(length, window - 1)
    for name in _KEYS:
        kept = getattr(layer, name)
        first = kept.shape[-2] - own
        setattr(layer, name, pad(kept[..., first:, :], (0, 0, length - own, 0)))
