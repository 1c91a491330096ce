"""Checks what the algorithms of other packages return, where it enters this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.miss.base import Resolution
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection

Given = Mapping[str, Any]
"""A method's arguments by the names that its base gives them, and the keys that are `loaded`."""
OR_NONE = "or None for the router's own choice"


def misfit(method: str, returned: Any, given: Given, geometry: Geometry) -> str | None:
    """Return what a method returned and what is expected instead; None where it fits."""
    check = _CHECKS.get(method)
    return None if check is None else check(returned, given, geometry)


def _selected(returned: Any, given: Given, geometry: Geometry) -> str | None:
    if returned is None:
        return None
    if not isinstance(returned, Selection):
        return f"{_shown(returned)}. Expected: a Selection, {OR_NONE}."
    event: Event = given["event"]
    wrong = _unfit_selection(returned, event, geometry)
    if wrong is None:
        if (returned.experts == DROPPED).any():
            return f"a Selection with experts={DROPPED}. Expected: keep=False where one is dropped."
        for token, row in enumerate(returned.experts):
            kept = row if returned.keep is None else row[returned.keep[token]]
            if len(np.unique(kept)) < len(kept):
                return (
                    f"a Selection with experts={row.tolist()} for token {token}. Expected: no "
                    "expert twice."
                )
    return wrong


def _unfit_selection(selection: Selection, event: Event, geometry: Geometry) -> str | None:
    """Say which field has the wrong type, shape or values."""
    shape = event.experts.shape
    kinds = {"experts": "iu", "keep": "b", "weigh_as": "iu", "weights": "f"}
    words = {"iu": "integers", "b": "booleans", "f": "floats"}
    for name, kind in kinds.items():
        field = getattr(selection, name)
        if field is None and name != "experts":
            continue
        is_array = isinstance(field, np.ndarray)
        if not is_array or field.shape != shape or field.dtype.kind not in kind:
            return (
                f"a Selection with {name}={_shown(field)}. Expected: an array of {words[kind]} "
                f"[tokens, top_k], here {[*shape]}."
            )
        if kind == "iu":
            allowed = (field >= 0) & (field < geometry.num_experts)
            allowed |= (field == DROPPED) & (event.experts == DROPPED)
            if not allowed.all():
                return (
                    f"a Selection with {name}={int(field[~allowed][0])}. Expected: experts in "
                    f"0..{geometry.num_experts - 1}, not keys."
                )
    return None


def _resolved(returned: Any, given: Given, geometry: Geometry) -> str | None:
    if returned is None:
        return None
    if not isinstance(returned, Resolution):
        return f"{_shown(returned)}. Expected: a Resolution, or None to load all that is absent."
    event: Event = given["event"]
    selection, experts = returned.selection, event.experts
    if selection is not None:
        if not isinstance(selection, Selection):
            shown = _shown(selection)
            return f"a Resolution with selection={shown}. Expected: a Selection or None."
        wrong = _unfit_selection(selection, event, geometry)
        if wrong is not None:
            return wrong
        was_dropped = event.experts == DROPPED
        if (selection.experts[was_dropped] != DROPPED).any():
            return (
                f"a Selection that revives an expert. Expected: {DROPPED} where the event has it."
            )
        experts = selection.experts
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
    first, levels = event.layer * geometry.num_experts, len(geometry.precision)
    fetches = returned.fetch
    if not isinstance(fetches, Sequence) or not all(isinstance(f, Fetch) for f in fetches):
        return f"a Resolution with fetch={_shown(fetches)}. Expected: a list of Fetch."
    for key, level in fetches:
        if not _is_below(geometry.num_experts, key, first):
            last = first + geometry.num_experts - 1
            return f"a Fetch of key {key!r}. Expected: a key of this layer, {first}..{last}."
        if not _is_below(levels, level):
            return f"a Fetch at level {level!r}. Expected: 0..{levels - 1}, 0 being the best."
    # What is neither absent nor resident is on its way: the engine waits for it.
    at_hand = {*given["resident"], *(f.key for f in fetches)}
    at_hand |= set(event.keys).difference(given["absent"])
    lacking = {*(experts[experts != DROPPED] + first).tolist()} - at_hand
    if lacking:
        return (
            f"a Resolution that executes key {min(lacking)}, which is neither resident nor loaded. "
            "Expected: every key that is executed and not resident is in fetch."
        )
    return None


def _proposed(returned: Any, given: Given, geometry: Geometry) -> str | None:
    most = geometry.num_layers * geometry.num_experts
    expected = f"Expected: a list of keys in 0..{most - 1}, none twice; empty for none."
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        return f"{_shown(returned)}. {expected}"
    for key in returned:
        if not _is_below(most, key):
            return f"the key {key!r}. {expected}"
    if len(set(returned)) < len(returned):
        return f"{_shown(returned)} with a key twice. {expected}"
    return None


def _proposed_arrays(returned: Any, given: Given, geometry: Geometry) -> str | None:
    if returned is None:
        return None
    rows, most = len(given["layers"]), geometry.num_layers * geometry.num_experts
    fits = isinstance(returned, tuple) and len(returned) == 2
    fits = fits and all(isinstance(a, np.ndarray) and a.dtype.kind in "iu" for a in returned)
    if fits:
        keys, counts = returned
        fits = keys.ndim == 1 and counts.shape == (rows,) and int(counts.sum()) == len(keys)
        fits = fits and (not len(keys) or bool(keys.min() >= 0 and keys.max() < most))
    if fits:
        return None
    return (
        f"{_shown(returned)}. Expected: None, or two arrays of integers: all keys, in "
        f"0..{most - 1}, and how many of them are each row's, here [{rows}]."
    )


def _levels(returned: Any, given: Given, geometry: Geometry) -> str | None:
    count, levels = len(given["keys"]), len(geometry.precision)
    fits = isinstance(returned, Sequence) and len(returned) == count
    if fits and all(_is_below(levels, level) for level in returned):
        return None
    return f"{_shown(returned)}. Expected: a list of {count} levels, each in 0..{levels - 1}."


def _victim(returned: Any, given: Given, geometry: Geometry) -> str | None:
    most = geometry.num_layers * geometry.num_experts
    if returned is None:
        return None
    if not _is_below(most, returned):
        return f"{_shown(returned)}. Expected: a resident key in 0..{most - 1}, or None."
    if int(returned) in given["pinned"]:
        return f"the pinned key {returned}. Expected: a resident key that is not pinned, or None."
    if returned not in given["loaded"]:
        return f"the key {returned}, which is not resident. Expected: a resident key, or None."
    return None


_CHECKS: Mapping[str, Callable[[Any, Given, Geometry], str | None]] = {
    "select": _selected,
    "resolve": _resolved,
    "prefetch_levels": _levels,
    "propose": _proposed,
    "propose_draft": _proposed,
    "propose_arrays": _proposed_arrays,
    "victim": _victim,
}


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
