"""Checks the rows of a trace: each by itself, their order, and that none is twice or missing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import NO_REQUEST, Columns, Ints, misfit

_DECODE = PHASES.index(DECODE)


def check_rows(
    name: str, geometry: Geometry, columns: Columns, where: Callable[[int], str]
) -> IntArray:
    """Check all rows; return the bounds of the events. ValueError names the row and the field."""
    _check_values(name, geometry, columns, where)
    bounds = _check_order(name, geometry, columns, where)
    _check_tokens(name, geometry, columns, bounds, where)
    return bounds


def _check_values(
    name: str, geometry: Geometry, columns: Columns, where: Callable[[int], str]
) -> None:
    """Check each row by itself."""
    if not len(columns.layer):
        raise ValueError(f"trace {name} holds no rows.")

    def check(found: npt.ArrayLike, field: str, values: Ints | FloatArray, rule: str) -> None:
        bad = np.asarray(found)
        if bad.any():
            row = int(bad.argmax())
            raise misfit(name, where(row), field, f"is {values[row].tolist()}, {rule}")

    experts = columns.experts
    outside = ((experts < 0) | (experts >= geometry.num_experts)).any(axis=-1)
    check(outside, "experts", experts, f"must lie in 0..{geometry.num_experts - 1}")
    ordered = np.sort(experts, axis=-1)
    check((ordered[:, 1:] == ordered[:, :-1]).any(axis=-1), "experts", experts, "names one twice")
    if columns.weights is not None:
        weights = columns.weights
        check(~np.isfinite(weights).all(axis=-1), "weights", weights, "must be finite")
        rising = (weights[:, 1:] > weights[:, :-1]).any(axis=-1)
        check(rising, "weights", weights, "must come heaviest first")
    check(columns.token < 0, "token", columns.token, "must be 0 or more")
    check(columns.request < NO_REQUEST, "request", columns.request, "must be -1 or more")
    layers = (columns.layer < 0) | (columns.layer >= geometry.num_layers)
    check(layers, "layer", columns.layer, f"must lie in 0..{geometry.num_layers - 1}")


def _check_order(
    name: str, geometry: Geometry, columns: Columns, where: Callable[[int], str]
) -> IntArray:
    """Check that passes follow one another and each runs all layers; return the event bounds."""
    passes, layers, last = columns.pass_index, columns.layer, geometry.num_layers - 1
    if passes[0] != 0:
        raise misfit(name, where(0), "pass", f"is {passes[0]}, must begin at 0")
    step = np.diff(passes)
    bad = (step != 0) & (step != 1)
    if bad.any():
        row = int(bad.argmax()) + 1
        raise misfit(
            name, where(row), "pass", f"is {passes[row]} after {passes[row - 1]}, must count up"
        )
    begins = np.concatenate([[True], step == 1])
    ends = np.concatenate([step == 1, [True]])
    advance = np.diff(layers, prepend=-1)
    bad = np.where(begins, layers != 0, (advance != 0) & (advance != 1)) | (ends & (layers != last))
    if bad.any():
        row = int(bad.argmax())
        before = "" if begins[row] else f" after {layers[row - 1]}"
        raise misfit(
            name,
            where(row),
            "layer",
            f"is {layers[row]}{before}, but each pass runs layers 0..{last} in order",
        )
    bad = np.concatenate([[False], (np.diff(columns.phase) != 0) & (step == 0)])
    if bad.any():
        raise misfit(name, where(int(bad.argmax())), "phase", "changes within a pass")
    starts = np.flatnonzero(begins | (advance == 1))
    return np.append(starts, len(layers)).astype(np.int64)


def _check_tokens(
    name: str,
    geometry: Geometry,
    columns: Columns,
    bounds: IntArray,
    where: Callable[[int], str],
) -> None:
    """Check that the layers of a pass serve the same tokens in the same order.

    The last layer may serve the last tokens of the pass' sequences only, as engines do that need
    no other output; no layer serves more, or others, or in another order.
    """
    sizes = np.diff(bounds)
    first = np.repeat(bounds[:-1][:: geometry.num_layers], geometry.num_layers)
    full = sizes == np.repeat(sizes[:: geometry.num_layers], geometry.num_layers)
    position = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    twin = np.minimum(np.repeat(first, sizes) + position, bounds[-1] - 1)
    for field, values in (("request", columns.request), ("token", columns.token)):
        bad = (values != values[twin]) & np.repeat(full, sizes)
        if bad.any():
            row = int(bad.argmax())
            raise misfit(
                name, where(row), field, f"is {values[row]}, layer 0 has {values[twin[row]]} there"
            )
    ends = _check_sequences(name, geometry, columns, bounds, where)
    pairs = np.stack([columns.request, columns.token], axis=-1)
    for event in np.flatnonzero(~full):
        layer = event % geometry.num_layers
        base, row = event - layer, int(bounds[event])
        if layer < geometry.num_layers - 1 or sizes[event] > sizes[base]:
            problem = f"has {sizes[event]} rows in this pass, layer 0 has {sizes[base]}"
            raise misfit(name, where(row), "layer", problem)
        last = ends[bounds[base] : bounds[base + 1]]
        of_pass = iter(pairs[bounds[base] : bounds[base + 1]][last].tolist())
        for row in range(bounds[event], bounds[event + 1]):
            if pairs[row].tolist() not in of_pass:
                problem = "is not the last of a sequence of layer 0, and not all of them are here"
                raise misfit(name, where(row), "token", problem)


def _check_sequences(
    name: str,
    geometry: Geometry,
    columns: Columns,
    bounds: IntArray,
    where: Callable[[int], str],
) -> npt.NDArray[np.bool_]:
    """Check that texts read in one pass have each token once; return which rows end a sequence.

    A row goes on with its request's text, one token further, or begins another. Passes that decode
    have one row a sequence, several of one request where a search has several beams.
    """
    same = (np.diff(columns.request) == 0) & (np.diff(columns.pass_index) == 0)
    same &= np.diff(columns.layer) == 0
    step = np.diff(columns.token)
    goes_on = same & (step == 1)
    reads = same & (columns.phase[1:] != _DECODE)
    beside = np.concatenate([[False], goes_on[:-1]]) | np.concatenate([goes_on[1:], [False]])
    bad = reads & ((step > 1) | ((step == 0) & beside))
    if bad.any():
        row = int(bad.argmax()) + 1
        before, token = columns.token[row - 1], columns.token[row]
        problem = (
            "stands twice" if token == before else f"is {token} after {before}: one is missing"
        )
        raise misfit(name, where(row), "token", problem)
    return np.concatenate([~goes_on, [True]])
