"""Checks what rules of other packages return or raise, in one place: where it enters this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import getmembers, isfunction, signature
from numbers import Integral
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.miss.base import Resolution
from lm_eval_moecache.algorithms.registry import base_of, reason_of, source_of
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection

Given = Mapping[str, Any]
"""A method's arguments by the names that its base gives them, and the keys that are `loaded`."""


def guarded(algorithm: Any, name: str) -> Any:
    """Return a rule of another package, which users call `name`, with its methods guarded.

    Every error names the rule, its file, the method and the layer: one that it raised, or one of
    what it returned.
    """
    kind, geometry = type(algorithm), algorithm.geometry

    def guard(method: Callable[..., Any], words: Sequence[str]) -> Callable[..., Any]:
        def error_of(given: Given, what: str) -> AlgorithmError:
            layer = getattr(given.get("event"), "layer", given.get("layer"))
            if layer is None and "key" in given:
                layer = given["key"] // geometry.num_experts
            where = "" if layer is None else f" at layer {layer}"
            rule = f"{kind.axis}={name} ({source_of(kind)})"
            return AlgorithmError(f"{rule}: {kind.__name__}.{method.__name__}{where} {what}")

        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            given = dict(zip(words, args, strict=False)) | named
            try:
                returned = method(*args, **named)
            except AlgorithmError:
                raise
            except Exception as error:
                raise error_of(given, f"raised {reason_of(error)}") from error
            if method.__name__ == "on_insert":
                loaded.add(given["key"])
            elif method.__name__ == "on_evict":
                loaded.discard(given["key"])
            try:
                check = _CHECKS.get(method.__name__)
                if check is not None and (returned is not None or check in _REQUIRED):
                    check(returned, {"loaded": loaded, **given}, geometry)
            except _Misfit as wrong:
                raise error_of(given, f"returned {wrong}") from None
            return returned

        return call

    # An eviction's residents, as it was notified of them.
    loaded: set[int] = set()
    for own, _ in getmembers(kind, isfunction):
        if not own.startswith("_"):
            # A method of its own may call its arguments otherwise than the base does.
            words = signature(getattr(base_of(kind.axis), own, None) or getattr(kind, own))
            named = [word for word in words.parameters if word != "self"]
            setattr(algorithm, own, guard(getattr(algorithm, own), named))
    return algorithm


class _Misfit(Exception):
    """What was returned, and what is expected."""


def _need(fits: bool, expected: str, found: str = "", shown: Any = _Misfit) -> None:
    """Raise a _Misfit unless it `fits`; what is `shown` is put into words only then."""
    if not fits:
        words = "" if shown is _Misfit else _shown(shown)
        raise _Misfit(f"{found}{words}. Expected: {expected}.")


def _selected(returned: Any, given: Given, geometry: Geometry) -> None:
    expected = "a Selection, or None for the router's own choice"
    _need(isinstance(returned, Selection), expected, shown=returned)
    _check_selection(returned, given["event"], geometry)
    is_dropped = (returned.experts == DROPPED).any()
    expected = "keep=False where one is dropped"
    _need(not is_dropped, expected, f"a Selection with experts={DROPPED}")
    for token, row in enumerate(returned.experts):
        kept = row if returned.keep is None else row[returned.keep[token]]
        found = f"a Selection with experts={row.tolist()} for token {token}"
        _need(len(np.unique(kept)) == len(kept), "no expert twice", found)


def _check_selection(selection: Selection, event: Event, geometry: Geometry) -> None:
    """Check that every field has the right type, shape and values."""
    kinds = {"experts": "iu", "keep": "b", "weigh_as": "iu", "weights": "f"}
    words = {"iu": "integers", "b": "booleans", "f": "floats"}
    for name, kind in kinds.items():
        field, shape = getattr(selection, name), event.experts.shape
        if field is None and name != "experts":
            continue
        fits = isinstance(field, np.ndarray) and field.shape == shape and field.dtype.kind in kind
        expected = f"an array of {words[kind]} [tokens, top_k], here {[*shape]}"
        _need(fits, expected, f"a Selection with {name}=", field)
        if kind == "iu":
            allowed = (field >= 0) & (field < geometry.num_experts)
            allowed |= (field == DROPPED) & (event.experts == DROPPED)
            first = int(field[~allowed][0]) if not allowed.all() else 0
            expected = f"experts in 0..{geometry.num_experts - 1}, not keys"
            _need(bool(allowed.all()), expected, f"a Selection with {name}={first}")


def _resolved(returned: Any, given: Given, geometry: Geometry) -> None:
    expected = "a Resolution, or None to load all that is absent"
    _need(isinstance(returned, Resolution), expected, shown=returned)
    event: Event = given["event"]
    selection, experts = returned.selection, event.experts
    if selection is not None:
        is_one, found = isinstance(selection, Selection), "a Resolution with selection="
        _need(is_one, "a Selection or None", found, selection)
        _check_selection(selection, event, geometry)
        revived = (selection.experts != DROPPED) & (event.experts == DROPPED)
        expected = f"{DROPPED} where the event has it"
        _need(not revived.any(), expected, "a Selection that revives an expert")
        experts = selection.experts
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
    fetches = returned.fetch
    fits = isinstance(fetches, Sequence) and all(isinstance(f, Fetch) for f in fetches)
    _need(fits, "a list of Fetch", "a Resolution with fetch=", fetches)
    first, levels = event.layer * geometry.num_experts, len(geometry.precision)
    for key, level in fetches:
        expected = f"a key of this layer, {first}..{first + geometry.num_experts - 1}"
        _need(_is_below(geometry.num_experts, key, first), expected, f"a Fetch of key {key!r}")
        expected = f"0..{levels - 1}, 0 being the best"
        _need(_is_below(levels, level), expected, f"a Fetch at level {level!r}")
    # What is neither absent nor resident is on its way: the engine waits for it.
    at_hand = {*given["resident"], *(f.key for f in fetches)}
    at_hand |= set(event.keys).difference(given["absent"])
    lacking = {*(experts[experts != DROPPED] + first).tolist()} - at_hand
    key = min(lacking, default=-1)
    expected = "every key that is executed and not resident is in fetch"
    found = f"a Resolution that executes key {key}, which is neither resident nor loaded"
    _need(not lacking, expected, found)


def _proposed(returned: Any, given: Given, geometry: Geometry) -> None:
    end = geometry.num_layers * geometry.num_experts
    expected = f"a list of keys in 0..{end - 1}, none twice; empty for none"
    fits = isinstance(returned, Sequence) and not isinstance(returned, str)
    _need(fits, expected, shown=returned)
    for key in returned:
        _need(_is_below(end, key), expected, f"the key {key!r}")
    _need(len({*returned}) == len(returned), expected, "a key twice in ", returned)


def _proposed_arrays(returned: Any, given: Given, geometry: Geometry) -> None:
    rows, end = len(given["layers"]), geometry.num_layers * geometry.num_experts
    fits = isinstance(returned, tuple) and len(returned) == 2
    fits = fits and all(isinstance(a, np.ndarray) and a.dtype.kind in "iu" for a in returned)
    if fits:
        keys, counts = returned
        fits = keys.ndim == 1 and counts.shape == (rows,) and int(counts.sum()) == len(keys)
        fits = fits and (not len(keys) or bool(keys.min() >= 0 and keys.max() < end))
    expected = "None, or two arrays of integers: all keys, in "
    expected += f"0..{end - 1}, and how many of them are each row's, here [{rows}]"
    _need(fits, expected, shown=returned)


def _levels(returned: Any, given: Given, geometry: Geometry) -> None:
    count, levels = len(given["keys"]), len(geometry.precision)
    fits = isinstance(returned, Sequence) and len(returned) == count
    fits = fits and all(_is_below(levels, level) for level in returned)
    _need(fits, f"a list of {count} levels, each in 0..{levels - 1}", shown=returned)


def _victim(returned: Any, given: Given, geometry: Geometry) -> None:
    end = geometry.num_layers * geometry.num_experts
    expected = f"a resident key in 0..{end - 1}, or None"
    _need(_is_below(end, returned), expected, shown=returned)
    expected = "a resident key that is not pinned, or None"
    _need(int(returned) not in given["pinned"], expected, f"the pinned key {returned}")
    expected, found = "a resident key, or None", f"the key {returned}, which is not resident"
    _need(returned in given["loaded"], expected, found)


_CHECKS: Mapping[str, Callable[[Any, Given, Geometry], None]] = {
    "select": _selected,
    "resolve": _resolved,
    "prefetch_levels": _levels,
    "propose": _proposed,
    "propose_draft": _proposed,
    "propose_arrays": _proposed_arrays,
    "victim": _victim,
}
_REQUIRED = (_levels, _proposed)
"""The others may return None."""


def _is_below(end: int, value: object, first: int = 0) -> bool:
    """Whether a value is one of the `end` whole numbers from `first` on, Python's or numpy's."""
    return isinstance(value, Integral) and 0 <= int(value) - first < end


def _shown(value: Any) -> str:
    """Describe a value in few words: its class, and its shape or beginning."""
    if isinstance(value, np.ndarray):
        return f"a numpy.ndarray {[*value.shape]} of {value.dtype}"
    if isinstance(value, (Selection, Resolution)):
        return f"a {type(value).__name__}"
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    return "None" if value is None else f"the {type(value).__name__} {text}"
