"""The rows of a routing trace as arrays, and their checks: each row, their order, none twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.geometry import Geometry

Ints = npt.NDArray[np.int32]
Halves = npt.NDArray[np.float16]
NO_REQUEST = -1
"""Request number of a row that no harness request was waiting for."""
_DECODE = PHASES.index(DECODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The rows of a trace. `phase` indexes PHASES; `experts` and `weights` are [rows, top_k]."""

    request: Ints
    pass_index: Ints
    phase: Ints
    token: Ints
    layer: Ints
    experts: Ints
    weights: FloatArray | None = None


def misfit(name: str, place: str, field: str, problem: str) -> ValueError:
    """Build the error for a value that does not fit the format."""
    return ValueError(f"trace {name}: {place}: {field} {problem}.")


Refuse = Callable[[BoolArray, str, Callable[[int], str]], None]
"""(marked rows, field, what is wrong with a row): raises for the first that is marked."""


def check_rows(
    name: str, geometry: Geometry, columns: Columns, where: Callable[[int], str]
) -> IntArray:
    """Check all rows; return the bounds of the events. ValueError names the row and the field."""
    if not len(columns.layer):
        raise ValueError(f"trace {name} holds no rows.")

    def refuse(bad: BoolArray, field: str, problem: Callable[[int], str]) -> None:
        if bad.any():
            row = int(bad.argmax())
            raise misfit(name, where(row), field, problem(row))

    _check_values(geometry, columns, refuse)
    bounds = _check_order(geometry.num_layers - 1, columns, refuse)
    _check_tokens(geometry.num_layers, columns, bounds, refuse)
    return bounds


def _check_values(geometry: Geometry, columns: Columns, refuse: Refuse) -> None:
    """Check each row by itself."""

    def check(bad: npt.ArrayLike, field: str, rule: str) -> None:
        values = getattr(columns, field)
        refuse(np.asarray(bad), field, lambda row: f"is {values[row].tolist()}, {rule}")

    experts, weights = columns.experts, columns.weights
    outside = ((experts < 0) | (experts >= geometry.num_experts)).any(axis=-1)
    check(outside, "experts", f"must lie in 0..{geometry.num_experts - 1}")
    ordered = np.sort(experts, axis=-1)
    check((ordered[:, 1:] == ordered[:, :-1]).any(axis=-1), "experts", "names one twice")
    if weights is not None:
        check(~np.isfinite(weights).all(axis=-1), "weights", "must be finite")
        rising = (weights[:, 1:] > weights[:, :-1]).any(axis=-1)
        check(rising, "weights", "must come heaviest first")
    check(columns.token < 0, "token", "must be 0 or more")
    check(columns.request < NO_REQUEST, "request", "must be -1 or more")
    layers = (columns.layer < 0) | (columns.layer >= geometry.num_layers)
    check(layers, "layer", f"must lie in 0..{geometry.num_layers - 1}")


def _check_order(last: int, columns: Columns, refuse: Refuse) -> IntArray:
    """Check that passes follow one another and each runs all layers; return the event bounds."""
    passes, layers = columns.pass_index, columns.layer
    refuse(passes[:1] != 0, "pass", lambda row: f"is {passes[row]}, must begin at 0")
    step = np.diff(passes, prepend=passes[:1])
    refuse(
        (step != 0) & (step != 1),
        "pass",
        lambda row: f"is {passes[row]} after {passes[row - 1]}, must count up",
    )
    begins = step == 1
    begins[0] = True
    ends = np.append(begins[1:], True)
    advance = np.diff(layers, prepend=-1)

    def out_of_order(row: int) -> str:
        before = "" if begins[row] else f" after {layers[row - 1]}"
        return f"is {layers[row]}{before}, but each pass runs layers 0..{last} in order"

    bad = np.where(begins, layers != 0, (advance != 0) & (advance != 1)) | (ends & (layers != last))
    refuse(bad, "layer", out_of_order)
    changes = np.diff(columns.phase, prepend=columns.phase[:1]) != 0
    refuse(changes & (step == 0), "phase", lambda row: "changes within a pass")
    starts = np.flatnonzero(begins | (advance == 1))
    return np.append(starts, len(layers)).astype(np.int64)


def _check_tokens(num_layers: int, columns: Columns, bounds: IntArray, refuse: Refuse) -> None:
    """Check that the layers of a pass serve the same tokens in the same order.

    The last layer may serve the last tokens of the pass' sequences only, as engines do that need
    no other output; no layer serves more, or others, or in another order.
    """
    sizes = np.diff(bounds)
    first = np.repeat(bounds[:-1][::num_layers], num_layers)
    full = sizes == np.repeat(sizes[::num_layers], num_layers)
    position = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    twin = np.minimum(np.repeat(first, sizes) + position, bounds[-1] - 1)

    def check_twins(field: str) -> None:
        values = getattr(columns, field)
        bad = (values != values[twin]) & np.repeat(full, sizes)
        refuse(bad, field, lambda row: f"is {values[row]}, layer 0 has {values[twin[row]]} there")

    check_twins("request")
    check_twins("token")
    ends = _check_sequences(columns, refuse)
    uneven = np.flatnonzero(~full)
    layers = uneven % num_layers
    too_many = (layers < num_layers - 1) | (sizes[uneven] > sizes[uneven - layers])
    bad = np.zeros(bounds[-1], dtype=bool)
    bad[bounds[uneven[too_many]]] = True

    def counts(row: int) -> str:
        event = int(np.searchsorted(bounds, row))
        of_first = sizes[event - event % num_layers]
        return f"has {sizes[event]} rows in this pass, layer 0 has {of_first}"

    refuse(bad, "layer", counts)
    pairs = np.stack([columns.request, columns.token], axis=-1)
    for event, base in zip(uneven, uneven - layers, strict=True):
        of_first = slice(bounds[base], bounds[base + 1])
        last = iter(pairs[of_first][ends[of_first]].tolist())
        rows = slice(bounds[event], bounds[event + 1])
        bad[rows] = [pair not in last for pair in pairs[rows].tolist()]
    problem = "is not the last of a sequence of layer 0, and not all of them are here"
    refuse(bad, "token", lambda row: problem)


def _check_sequences(columns: Columns, refuse: Refuse) -> BoolArray:
    """Check that texts read in one pass have each token once; return which rows end a sequence.

    A row goes on with its request's text, one token further, or begins another. Passes that decode
    have one row a sequence, several of one request where a search has several beams.
    """
    token = columns.token
    same = (np.diff(columns.request) == 0) & (np.diff(columns.pass_index) == 0)
    same &= np.diff(columns.layer) == 0
    step = np.diff(token)
    goes_on = same & (step == 1)
    reads = same & (columns.phase[1:] != _DECODE)
    beside = np.append(False, goes_on[:-1]) | np.append(goes_on[1:], False)

    def problem(row: int) -> str:
        before = token[row - 1]
        if token[row] == before:
            return "stands twice"
        return f"is {token[row]} after {before}: one is missing"

    refuse(np.append(False, reads & ((step > 1) | ((step == 0) & beside))), "token", problem)
    return np.append(~goes_on, True)
