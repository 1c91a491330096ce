"""Computes the rows of a batch to the bits that each gets alone, in float32 on a CPU.

The libraries there choose their kernels by shape, so that a row's last bits depend on how many
others it is batched with, and near ties of a router fall otherwise. Four kinds of work are done row
by row; all else treats rows alike in any case:

- A product with the weights: of one row each while decoding. From a few rows on a product's rows do
  not depend on each other (`least_shared`), so that prompts are multiplied together.
- Attention, without the padding of a row, where torch computes it in one call. Where a model
  multiplies by itself (`eager`), only rows of one length stand side by side.
- Functions such as a cosine, where a row is no whole number of vectors: the last elements of an
  array are computed by other code than those before.
- Experts (`forward_by_row`): the tokens of different rows share a product only where each has
  enough of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, overrides
from torch.nn import functional
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from lm_eval_moecache.records.arrays import BoolArray

_FEW = 16
"""Rows from which on a product's rows are taken to be independent, if they are at all."""
_PROBED = (*range(1, 3 * _FEW), 57, 100, 192, 257)
"""Rows of the products by which `least_shared` finds out what a machine's kernels do."""
_LANES = 32
"""A multiple of the float32 elements that torch's loops take at a time, two vectors of AVX-512:
what is left at the end of an array is computed by other code."""
_MOST_HEAD = 256
"""Size of a head up to which transformers leaves shared keys to torch."""
_LEAST_PRODUCT = 400
"""Weights below which torch multiplies batches of matrices by a loop of its own."""
_BY_VECTOR = {
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("cos", "sin", "exp", "sigmoid", "tanh", "log", "log1p", "erf")
} | {functional.silu, functional.gelu, functional.softplus}
"""Functions of which vectors and single elements round otherwise. A softmax takes each row anew."""
_REPLACED = {"linear": linear, "scaled_dot_product_attention": scaled_dot_product_attention}
"""What decode steps may do row by row without asking about every operation."""


class ByRow(TorchFunctionMode):
    """While entered, products and attention of a pass are computed row by row where it matters.

    `begin_pass` says which tokens of each row count, `pass_alone` that the pass has a single row.

    To be asked about each operation takes some 4 us, a fifth of a step of `tiny`. Decode steps are
    therefore watched once: where all products and attention are called by their names in
    `torch.nn.functional`, and nothing else needs a row of its own, later steps replace those names
    in place of asking.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replaces: bool | None = None
        """Whether names are replaced in decode steps; None until a step was watched."""
        self._watched = [0, 0]
        """In the step watched, the calls by a name that is replaced, and all that mattered."""
        self._unasked = ExitStack()
        """Closed, the mode is asked again."""
        self._thread = 0
        """Whose calls by a replaced name are meant; 0 while none is replaced."""
        self._spans: Sequence[tuple[int, int]] = ()
        self._length = self._least = self._total = 0
        self._divides = False
        self._own: dict[Any, Callable[..., Tensor]] = {
            **{func: partial(self._apply, cast(Any, func)) for func in _BY_VECTOR},
            linear: self._multiply,
            scaled_dot_product_attention: self._attend,
        }
        self._open: dict[int, tuple[Tensor, Sequence[bool]]] = {}
        """A decode step's masks, which layers share, and of which rows one hides only padding."""

    def begin_pass(self, valid: BoolArray, padding: Sequence[int], past_length: int) -> None:
        """Begin a pass whose rows have these `valid` tokens [rows, tokens].

        `padding` counts the tokens before each row's first one, `past_length` all earlier ones.
        """
        self.end_pass()
        self._length = valid.shape[1]
        starts, counts = valid.argmax(axis=1).tolist(), valid.sum(axis=1).tolist()
        self._spans = [(a, a + n) for a, n in zip(starts, counts, strict=True)]
        self._least = min((count for count in counts if count), default=0)
        self._padding = padding
        self._total = past_length + self._length
        full = all(span == (0, self._length) for span in self._spans)
        self._divides = len(self._spans) > 1 or not full or any(padding)
        if not self._divides:
            self.pass_alone()
        elif self._length == 1 and self._replaces is not False and self._may_replace():
            self._watched, self._thread = [0, 0], get_ident()
            for name, own in _REPLACED.items():
                setattr(functional, name, partial(self._called, own))
            if self._replaces:
                self.pass_alone()

    def _may_replace(self) -> bool:
        """Whether the mode is the one that torch asks, and nobody else has replaced the names."""
        is_asked = overrides._get_current_function_mode() is self  # type: ignore[no-untyped-call]
        return is_asked and all(getattr(functional, name) is f for name, f in _REPLACED.items())

    def pass_alone(self) -> None:
        """Begin a pass that is computed as ever."""
        if overrides._get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._unasked.enter_context(overrides._pop_mode_temporarily())

    def _called(self, func: Any, *args: Any, **more: Any) -> Any:
        """Stand in for a function of torch's, by its name."""
        if get_ident() != self._thread:
            return func(*args, **more)
        self._watched[0] += 1
        return self._own[func](*args, **more) if self._replaces else func(*args, **more)

    def end_pass(self) -> None:
        """End the pass: what follows is computed as ever."""
        self._divides = False
        self._open.clear()
        self._unasked.close()
        if self._thread:
            self._thread = 0
            for name, own in _REPLACED.items():
                setattr(functional, name, own)
            if self._replaces is None:
                self._replaces = self._watched[0] == self._watched[1] > 0

    def __exit__(self, *error: Any) -> None:
        self.end_pass()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = self._own.get(func) if self._divides else None
        if own is None or (func in _BY_VECTOR and not self._is_uneven(args[0])):
            return func(*args, **kwargs) if kwargs else func(*args)
        # What is not called by a replaced name makes the two differ.
        self._watched[1] += 1
        return own(*args, **(kwargs or {}))

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
        is_of_rows = input.numel() == rows * self._length * size
        if not is_of_rows or self._least >= least_shared(weight.t()):
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
        # A layer with a window keeps only the last keys.
        firsts = [max(padding - (self._total - keys), 0) for padding in self._padding]
        if decodes:
            return self._attend_once(query, key, value, attn_mask, firsts, more)
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for row, ((start, stop), first) in enumerate(zip(self._spans, firsts, strict=True)):
            if start == stop:
                continue
            own, last, mask = slice(row, row + 1), keys - (queries - stop), attn_mask
            if mask is not None:
                which = own if mask.shape[0] == rows else slice(None)
                asking = slice(start, stop) if mask.shape[-2] > 1 else slice(None)
                mask = mask[which, :, asking, first:last]
            asked = query[own, :, start:stop], key[own, :, first:last], value[own, :, first:last]
            output[own, :, start:stop] = scaled_dot_product_attention(*asked, mask, **more)
        return output

    def _attend_once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        firsts: Sequence[int],
        more: dict[str, Any],
    ) -> Tensor:
        """Let each row's one token attend to its keys; rows with equally many, in one call."""
        rows, keys, packed = len(firsts), key.shape[-2], query
        is_open = [True] * rows if mask is None else self._is_open(mask, firsts)
        # Under a mask transformers packs the heads that share a key; alone there is no mask.
        packs = query.shape[-2] > 1 and key.shape[-1] == value.shape[-1] <= _MOST_HEAD
        unpacked = {**more, "enable_gqa": True} if packs else more
        if packs:
            packed = query.reshape(rows, -1, 1, query.shape[-1])
        alike = [
            f if o else -1 - row for row, (f, o) in enumerate(zip(firsts, is_open, strict=True))
        ]
        sizes = [len([*group]) for _, group in groupby(alike)]
        found, row = list[Tensor](), 0
        for asked, own_key, own_value in zip(
            *(_cut(values, sizes) for values in (packed, key, value)), strict=True
        ):
            if first := firsts[row]:
                own_key = own_key.narrow(2, first, keys - first)
                own_value = own_value.narrow(2, first, keys - first)
            if is_open[row]:
                result = scaled_dot_product_attention(asked, own_key, own_value, **unpacked)
            else:
                assert mask is not None, "nothing hides a key"
                own_mask = mask[row if len(mask) == rows else 0][None, ..., first:]
                asked = query[row : row + 1]
                result = scaled_dot_product_attention(asked, own_key, own_value, own_mask, **more)
            found.append(result.reshape(len(asked), *query.shape[1:-1], -1))
            row += len(asked)
        return torch.cat(found)

    def _is_open(self, mask: Tensor, firsts: Sequence[int]) -> Sequence[bool]:
        """Return for each row whether a decode step's mask hides nothing from it but padding."""
        if id(mask) not in self._open:
            seen = mask if mask.dtype == torch.bool else mask == 0
            seen_BK = seen.all(1).all(1).expand(len(firsts), -1).numpy()
            own = zip(firsts, seen_BK, strict=True)
            self._open[id(mask)] = mask, [bool(row[first:].all()) for first, row in own]
        return self._open[id(mask)][1]


def _cut(values: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Return consecutive parts of a tensor, of so many rows each."""
    parts: Sequence[Tensor] = values.split_with_sizes(sizes)
    return parts


_least_shared: dict[tuple[int, ...], int] = {}


def least_shared(matrix_DH: Tensor) -> int:
    """Return from how many rows on a float32 product gives each its bits, however many there are.

    With fewer, the libraries take other kernels: below four on one processor, below six on another.
    Some give the last rows of any product to another kernel: the number is then beyond any. Found
    out once for each shape, by products of few rows beside those of many.
    """
    key = *matrix_DH.shape, *matrix_DH.stride(), torch.get_num_threads()
    if key not in _least_shared:
        source = torch.Generator().manual_seed(0)
        rows_SD = torch.randn(_PROBED[-1], len(matrix_DH), generator=source)
        all_SH = torch.mm(rows_SD, matrix_DH)
        other = [n for n in _PROBED if not torch.mm(rows_SD[:n], matrix_DH).equal(all_SH[:n])]
        most = max(other, default=0)
        _least_shared[key] = most + 1 if most < _FEW else sys.maxsize
    return _least_shared[key]


def forward_by_row(
    module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, matrices: Any, row_T: Any
) -> Tensor:
    """Compute an experts module's output [T, D]; `row_T` is each token's row, -1 for padding.

    Bit for bit what transformers' `grouped_mm` gives each row alone. Padding gets zeros.
    """
    with torch._C.DisableTorchFunction():
        own_T = np.flatnonzero(row_T >= 0)
        if len(own_T) == len(row_T):
            return _forward(module, hidden_TD, index_TK, w_TK, matrices, row_T)
        output_TD = torch.zeros_like(hidden_TD)
        if len(own_T):
            own, of_own = torch.from_numpy(own_T), row_T[own_T]
            given = hidden_TD[own], index_TK[own], w_TK[own]
            output_TD[own] = _forward(module, *given, matrices, of_own)
        return output_TD


def _forward(
    module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, matrices: Any, row_T: Any
) -> Tensor:
    """Compute the output of tokens in the order of their rows."""
    (num_tokens, top_k), dtype = index_TK.shape, matrices.dtype
    index_S = index_TK.numpy().ravel().astype(np.int64)
    own_S, size_S = np.arange(len(index_S)), np.ones(1, np.int64)
    tokens_of = np.bincount(row_T)
    tokens_of = tokens_of[tokens_of > 0]
    if num_tokens > len(tokens_of):
        # Where a token stands in a product may count: `grouped_mm` sorts a row so, and not stably.
        each = index_TK.flatten().split_with_sizes((tokens_of * top_k).tolist())
        starts = np.repeat((tokens_of.cumsum() - tokens_of) * top_k, tokens_of * top_k)
        own_S = starts + torch.cat([torch.sort(own).indices for own in each]).numpy()
        index_S = index_S[own_S]
        pair_S = index_S * (int(row_T[-1]) + 1) + np.repeat(row_T, top_k)
        count_S = np.bincount(pair_S)[pair_S]
        # By expert; rows with few tokens of one stay apart, those with equally few side by side.
        least = max(least_shared(matrices.up[0]), least_shared(matrices.down[0]))
        size_S = np.where(count_S < least, count_S, 0)
    sizes = int(size_S.max()) + 1
    kind_S = index_S * sizes + size_S
    order_S = own_S[np.argsort(kind_S, kind="stable")]
    count_of = np.bincount(kind_S)
    kinds = np.flatnonzero(count_of)
    counts: list[int] = count_of[kinds].tolist()
    # By expert, so that absent ones come last.
    known = np.searchsorted(kinds, len(matrices.up) * sizes)
    parts = [divmod(kind, sizes) for kind in kinds[:known].tolist()]
    order = torch.from_numpy(order_S)
    given_S1D = hidden_TD[torch.from_numpy(order_S // top_k)].to(dtype).unsqueeze(1)
    make = torch.empty if known == len(kinds) else torch.zeros
    middle_S1H = make(len(order_S), 1, matrices.up[0].shape[1], dtype=dtype)
    _multiply(given_S1D, matrices.up, matrices.up_bias, middle_S1H, counts, parts)
    activate = module._apply_gate if module.has_gate else module.act_fn
    active_S1H = activate(middle_S1H.squeeze(1)).to(dtype).unsqueeze(1)
    out_S1D = make(len(order_S), 1, matrices.down[0].shape[1], dtype=dtype)
    _multiply(active_S1H, matrices.down, matrices.down_bias, out_S1D, counts, parts)
    out_SD = out_S1D.squeeze(1)
    if getattr(module, "has_post_expert_norm", False):
        out_SD = module.post_expert_norm(out_SD)
    chosen_SD = torch.empty_like(out_SD)
    chosen_SD[order] = out_SD
    weighted_TKD = (chosen_SD * w_TK.reshape(-1, 1)).view(num_tokens, top_k, -1)
    return weighted_TKD.sum(dim=1).to(hidden_TD.dtype)


def _multiply(
    rows_S1D: Tensor,
    matrices: Sequence[Tensor],
    biases: Any,
    out_S1H: Tensor,
    counts: list[int],
    parts: Sequence[tuple[int, int]],
) -> None:
    """Multiply consecutive rows by the experts of these parts, so many each.

    A part is an expert and how many rows share a product; 0: all of them.
    """
    # Cut in one call each: slices of their own took as long as the products.
    given, out = rows_S1D.split_with_sizes(counts), out_S1H.split_with_sizes(counts)
    for (expert, size), count, own, product in zip(parts, counts, given, out, strict=False):
        matrix = matrices[expert]
        if size in (0, count):
            torch.mm(own.squeeze(1), matrix, out=product.squeeze(1))
        elif size == 1:
            torch.bmm(own, matrix.expand(count, -1, -1), out=product)
        else:
            shape = count // size, size, -1
            shared = matrix.expand(count // size, -1, -1)
            torch.bmm(own.view(shape), shared, out=product.view(shape))
        if biases is not None:
            product.add_(biases[expert])
