"""Computes the rows of a batch to the bits that each gets alone, in float32 on a CPU.

The libraries there choose their kernels by shape, so that a row's last bits depend on how many
others it is batched with, and near ties of a router fall otherwise. Four kinds of work are done row
by row; all else treats rows alike in any case:

- A product with the weights: of one row each while decoding. From `MOST_OWN` rows on a product's
  rows do not depend on each other, so that prompts are multiplied together, but by the narrowest
  weights.
- Attention, without the padding of a row, where torch computes it in one call. Where a model
  multiplies by itself (`eager`), only rows of one length stand side by side.
- Functions such as a cosine, where a row is no whole number of vectors: the last elements of an
  array are computed by other code than those before.
- Experts (`forward_by_row`): the tokens of different rows share a product only where each has
  enough of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from lm_eval_moecache.records.arrays import BoolArray

MOST_OWN = 4
"""Rows from which on a float32 product on a CPU gives each the same bits, however many there are:
with fewer, the libraries take other kernels."""
_LANES = 16
"""A multiple of the float32 elements of a vector."""
_MOST_HEAD = 256
"""Size of a head up to which transformers leaves shared keys to torch."""
_LEAST_PRODUCT = 400
"""Weights below which torch multiplies batches of matrices by a loop of its own."""
_BY_VECTOR = {
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("cos", "sin", "exp", "sigmoid", "tanh", "log", "log1p", "erf", "softmax")
} | {functional.silu, functional.gelu, functional.softplus, functional.softmax}
"""Functions of which vectors and single elements round otherwise."""


class ByRow(TorchFunctionMode):
    """While entered, products and attention of a pass are computed row by row where it matters.

    `begin_pass` says which tokens of each row count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: Sequence[tuple[int, int]] = ()
        self._length = self._least = self._total = 0
        self._divides = False
        self._mask: Tensor | None = None
        self._open: dict[int, bool] = {}
        """Whether `_mask` hides nothing from a row: all layers of a decode step share one."""

    def begin_pass(self, valid: BoolArray, padding: Sequence[int], past_length: int) -> None:
        """Begin a pass whose rows have these `valid` tokens [rows, tokens].

        `padding` counts the tokens before each row's first one, `past_length` all earlier ones.
        """
        self._length = valid.shape[1]
        starts, counts = valid.argmax(axis=1).tolist(), valid.sum(axis=1).tolist()
        self._spans = [(a, a + n) for a, n in zip(starts, counts, strict=True)]
        self._least = min((count for count in counts if count), default=0)
        self._padding = padding
        self._total = past_length + self._length
        full = all(span == (0, self._length) for span in self._spans)
        self._divides = len(self._spans) > 1 or not full

    def end_pass(self) -> None:
        """End the pass: what follows is computed as ever."""
        self._divides, self._mask = False, None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._divides:
            if func is linear:
                return self._multiply(*args, **(kwargs or {}))
            if func is scaled_dot_product_attention:
                return self._attend(*args, **(kwargs or {}))
            if func in _BY_VECTOR and self._is_uneven(args[0]):
                return self._apply(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_uneven(self, values: Tensor) -> bool:
        """Whether these are values of the pass's rows, of which one fills no whole vectors."""
        rows, length = len(self._spans), self._length
        if values.dim() == 2:
            return values.shape[0] == rows * length and bool(values.shape[1] % _LANES)
        is_of_rows = values.dim() > 2 and values.shape[:2] == (rows, length)
        return is_of_rows and bool(values[0, 0].numel() % _LANES)

    def _apply(self, func: Callable[..., Any], values: Tensor, *args: Any, **more: Any) -> Tensor:
        flat = values.dim() == 2
        by_row = values.reshape(len(self._spans), self._length, *values.shape[2 - flat :])
        output = torch.zeros_like(by_row)
        for row, (start, stop) in enumerate(self._spans):
            if stop > start:
                own = by_row[row : row + 1, start:stop]
                own = own.flatten(0, 1) if flat else own.contiguous()
                output[row : row + 1, start:stop] = func(own, *args, **more)
        return output.view(values.shape)

    def _multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, size = len(self._spans), input.shape[-1]
        has_own = min(self._least, len(weight)) < MOST_OWN
        if not has_own or input.numel() != rows * self._length * size:
            return linear(input, weight, bias)
        if self._length > 1 or weight.numel() < _LEAST_PRODUCT:
            by_row = input.reshape(rows, self._length, size)
            output = by_row.new_zeros(rows, self._length, len(weight))
            for row, (start, stop) in enumerate(self._spans):
                if stop > start:
                    output[row, start:stop] = linear(by_row[row, start:stop], weight, bias)
            return output.view(*input.shape[:-1], -1)
        # One call for all rows, with the bits of a product for each.
        product = torch.bmm(input.reshape(rows, 1, size), weight.t().expand(rows, -1, -1))
        product = product if bias is None else product + bias
        return product.view(*input.shape[:-1], -1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **more: Any
    ) -> Tensor:
        rows, queries, keys = len(self._spans), query.shape[-2], key.shape[-2]
        decodes = self._length == 1  # a token's heads may stand as queries
        if query.shape[0] != rows or not (decodes or queries == self._length):
            return scaled_dot_product_attention(query, key, value, attn_mask, **more)
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        # Under a mask transformers packs the heads that share a key; alone there is no mask.
        packed = decodes and queries > 1 and key.shape[-1] == value.shape[-1] <= _MOST_HEAD
        # A layer with a window keeps only the last keys.
        gone = self._total - keys
        if attn_mask is not self._mask:
            self._mask, self._open = attn_mask, {}
        for row, (start, stop) in enumerate(self._spans):
            if start == stop:
                continue
            own, first = slice(row, row + 1), max(self._padding[row] - gone, 0)
            if decodes:
                start, stop = 0, queries
            last = keys - (queries - stop)
            mask = attn_mask
            if mask is not None:
                which = own if mask.shape[0] == rows else slice(None)
                asking = slice(start, stop) if mask.shape[-2] > 1 else slice(None)
                mask = mask[which, :, asking, first:last]
                if decodes and row not in self._open:
                    self._open[row] = _is_open(mask)
                mask = None if decodes and self._open[row] else mask
            asked = query[own, :, start:stop]
            if packed and mask is None:
                asked = asked.reshape(1, -1, 1, asked.shape[-1])
                more = {**more, "enable_gqa": True}
            found = scaled_dot_product_attention(
                *(asked, key[own, :, first:last], value[own, :, first:last]), mask, **more
            )
            output[own, :, start:stop] = found.reshape(output[own, :, start:stop].shape)
        return output


def _is_open(mask: Tensor) -> bool:
    return bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all())


def _multiply(rows_SD: Tensor, matrix_DH: Tensor, out_SH: Tensor, count: int, size: int) -> None:
    """Multiply `count` rows, each `size` of them as a product of their own; 0: all together."""
    if size in (0, count):
        torch.mm(rows_SD, matrix_DH, out=out_SH)
        return
    parts = count // size
    shared = matrix_DH.expand(parts, -1, -1)
    torch.bmm(rows_SD.view(parts, size, -1), shared, out=out_SH.view(parts, size, -1))


def forward_by_row(
    module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, matrices: Any, row_T: Any
) -> Tensor:
    """Compute an experts module's output [T, D]; `row_T` is each token's row, -1 for padding.

    Bit for bit what transformers' `grouped_mm` gives each row alone. Padding gets zeros.
    """
    with torch._C.DisableTorchFunction():
        return _forward(module, hidden_TD, index_TK, w_TK, matrices, row_T)


def _forward(
    module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, matrices: Any, row_T: Any
) -> Tensor:
    top_k, dtype = index_TK.shape[-1], matrices.dtype
    own_T = np.flatnonzero(row_T >= 0)
    if not len(own_T):
        return torch.zeros_like(hidden_TD)
    index_S = index_TK.numpy()[own_T].ravel().astype(np.int64)
    token_S, row_S = np.repeat(own_T, top_k), np.repeat(row_T[own_T], top_k)
    rows = int(row_T.max()) + 1
    pair_S = index_S * rows + row_S
    count_S = np.bincount(pair_S)[pair_S]
    # By expert; rows with few tokens of an expert alone, those with equally few side by side.
    size_S = np.where(count_S < MOST_OWN, count_S, 0)
    order_S = np.lexsort((row_S, size_S, index_S))
    kind = (index_S * MOST_OWN + size_S)[order_S]
    starts = np.flatnonzero(np.r_[True, kind[1:] != kind[:-1]])
    bounds = [*starts.tolist(), len(order_S)]
    known = len(matrices.up)
    # By expert, so that absent ones come last.
    parts = [divmod(of, MOST_OWN) for of in kind[starts].tolist() if of < known * MOST_OWN]
    order = torch.from_numpy(order_S)
    source = torch.from_numpy(token_S[order_S])
    given_SD = hidden_TD[source].to(dtype)
    middle_SH = torch.zeros(len(order_S), matrices.up[0].shape[1], dtype=dtype)
    out_SD = torch.zeros(len(order_S), matrices.down[0].shape[1], dtype=dtype)
    # Cut in one call each: slices of their own took as long as the products.
    counts = [stop - start for start, stop in pairwise(bounds)]
    cut = given_SD.split_with_sizes(counts), middle_SH.split_with_sizes(counts)
    for (expert, size), count, given, part in zip(parts, counts, *cut, strict=False):
        _multiply(given, matrices.up[expert], part, count, size)
        if matrices.up_bias is not None:
            part.add_(matrices.up_bias[expert])
    active_SH = (module._apply_gate if module.has_gate else module.act_fn)(middle_SH).to(dtype)
    cut = active_SH.split_with_sizes(counts), out_SD.split_with_sizes(counts)
    for (expert, size), count, given, part in zip(parts, counts, *cut, strict=False):
        _multiply(given, matrices.down[expert], part, count, size)
        if matrices.down_bias is not None:
            part.add_(matrices.down_bias[expert])
    if getattr(module, "has_post_expert_norm", False):
        out_SD = module.post_expert_norm(out_SD)
    chosen_SD = torch.empty_like(out_SD)
    own = torch.from_numpy(own_T)
    chosen_SD[order] = out_SD
    weighted_TKD = (chosen_SD * w_TK[own].reshape(-1, 1)).view(len(own_T), top_k, -1)
    output_TD = torch.zeros_like(hidden_TD)
    output_TD[own] = weighted_TKD.sum(dim=1).to(hidden_TD.dtype)
    return output_TD
