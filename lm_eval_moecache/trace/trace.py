"""Routing traces in memory: what a run's routers chose, checked before anything uses it.

Rows are (pass, layer, token) in execution order. The files they come from are the business of
`trace_file` (Parquet) and `trace_import` (other formats); all of them end in `build_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as made

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.detail import Proposed

Ints = npt.NDArray[np.int32]
Halves = npt.NDArray[np.float16]
NO_REQUEST = -1
"""Request number of a row that no harness request was waiting for."""
_CHUNK_EVENTS = 65536


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRequest:
    """One harness request: what the ledger knew of it, and the passes that served it."""

    task: str
    kind: str
    prompt_tokens: int
    output_tokens: int | None
    passes: tuple[int, ...]
    document: int | None = None
    place: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Logits that were predicted from a row's input for the next `depth` layers.

    Row r of layer l holds min(depth, num_layers - 1 - l) * num_experts values, nearest layer
    first, at `values[offsets[r]:offsets[r + 1]]`. Where `by` names a trained predictor and not the
    gates, a decode pass' rows of the last layer hold num_experts values for layer 0 of the next.
    """

    depth: int
    values: Halves
    offsets: IntArray
    by: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One recorded run. Event number e is layer e % num_layers of pass e // num_layers.

    The rows of event e are `row_bounds[e]:row_bounds[e + 1]`; its keys, each once and in order
    of first need, are `keys[key_bounds[e]:key_bounds[e + 1]]`.
    """

    name: str
    geometry: Geometry
    seed: int
    columns: Columns
    row_bounds: IntArray
    keys: Ints
    key_bounds: IntArray
    requests: tuple[TracedRequest, ...]
    logits: Halves | None = None
    predicted: Predicted | None = None
    proposed: Mapping[str, Proposed] = made(default_factory=dict)
    """By prefetcher, as `detail.identity` names it: proposals that were recorded."""
    scans: tuple[tuple[int, int], ...] = ()
    """(First pass, number of passes) of each text that was routed layer by layer and token after
    token in each (`scoring=scan`): a replay keeps that order."""
    has_sizes: bool = True
    """False where the file does not say how large an expert is, so that bytes mean nothing."""

    @property
    def num_passes(self) -> int:
        return (len(self.row_bounds) - 1) // self.geometry.num_layers

    def starts_sequence(self, pass_index: int) -> bool:
        """Whether a text, or a window of one, begins here."""
        event = pass_index * self.geometry.num_layers
        first, last = self.row_bounds[event], self.row_bounds[event + 1]
        return bool((self.columns.token[first:last] == 0).any())


def build_trace(
    name: str,
    geometry: Geometry,
    columns: Columns,
    *,
    where: Callable[[int], str] = "row {}".format,
    seed: int = 0,
    requests: tuple[TracedRequest, ...] | None = None,
    logits: Halves | None = None,
    predicted: Predicted | None = None,
    has_sizes: bool = True,
) -> Trace:
    """Check the rows and index their events. Raises ValueError naming the row and the field.

    `where` names a row as its file's reader would look for it. Without `requests`, they are told
    from the rows: a request with decode passes generated one token in each pass that served it.
    """
    _check_values(name, geometry, columns, where)
    bounds = _check_order(name, geometry, columns, where)
    _check_tokens(name, geometry, columns, bounds, where)
    keys, key_bounds = _unique_keys(geometry, columns, bounds)
    return Trace(
        name=name,
        geometry=geometry,
        seed=seed,
        columns=columns,
        row_bounds=bounds,
        keys=keys,
        key_bounds=key_bounds,
        requests=_tell_requests(geometry, columns, bounds) if requests is None else requests,
        logits=logits,
        predicted=predicted,
        has_sizes=has_sizes,
    )


def misfit(name: str, place: str, field: str, problem: str) -> ValueError:
    """Build the error for a value that does not fit the format."""
    return ValueError(f"trace {name}: {place}: {field} {problem}.")


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

    A layer may serve fewer (engines that need only the last token's output skip the others in
    the last layer), never more or in another order.
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
    pairs = np.stack([columns.request, columns.token], axis=-1)
    for event in np.flatnonzero(~full):
        base = event - event % geometry.num_layers
        of_pass = iter(pairs[bounds[base] : bounds[base + 1]].tolist())
        for row in range(bounds[event], bounds[event + 1]):
            if pairs[row].tolist() not in of_pass:
                raise misfit(name, where(row), "token", "is not among those of layer 0, in order")


def _unique_keys(geometry: Geometry, columns: Columns, bounds: IntArray) -> tuple[Ints, IntArray]:
    """Return the keys of all events, each once per event and in order of first need."""
    num_events = len(bounds) - 1
    num_keys = geometry.num_layers * geometry.num_experts
    parts: list[Ints] = []
    counts: list[IntArray] = []
    for start in range(0, num_events, _CHUNK_EVENTS):
        stop = min(start + _CHUNK_EVENTS, num_events)
        rows = slice(bounds[start], bounds[stop])
        keys = columns.experts[rows] + (columns.layer[rows] * geometry.num_experts)[:, None]
        sizes = np.diff(bounds[start : stop + 1])
        if len(keys) == stop - start:
            parts.append(keys.ravel().astype(np.int32))
            counts.append(np.full(stop - start, geometry.top_k, dtype=np.int64))
            continue
        event_of = np.repeat(np.arange(stop - start), sizes)
        labelled = event_of[:, None] * num_keys + keys
        _, places = np.unique(labelled, return_index=True)
        places.sort()
        parts.append(keys.ravel()[places].astype(np.int32))
        found = event_of[places // geometry.top_k]
        counts.append(np.bincount(found, minlength=stop - start).astype(np.int64))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts))])
    return np.concatenate(parts), offsets


def _tell_requests(
    geometry: Geometry, columns: Columns, bounds: IntArray
) -> tuple[TracedRequest, ...]:
    found: dict[int, dict[int, int]] = {}
    for pass_index in range((len(bounds) - 1) // geometry.num_layers):
        event = pass_index * geometry.num_layers
        for request in _plain(columns.request[bounds[event] : bounds[event + 1]]):
            served = found.setdefault(request, {})
            served[pass_index] = served.get(pass_index, 0) + 1
    found.pop(NO_REQUEST, None)
    phases = columns.phase[bounds[:-1][:: geometry.num_layers]]
    requests = []
    for request in sorted(found):
        served = found[request]
        prompt = sum(n for p, n in served.items() if phases[p] == 0)
        generates = any(phases[p] != 0 for p in served)
        requests.append(
            TracedRequest(
                task="trace",
                kind="generate_until" if generates else "loglikelihood",
                prompt_tokens=prompt,
                output_tokens=len(served) if generates else None,
                passes=tuple(served),
            )
        )
    return tuple(requests)


def _plain(values: Ints) -> Iterable[int]:
    numbers: list[int] = values.tolist()
    return numbers
