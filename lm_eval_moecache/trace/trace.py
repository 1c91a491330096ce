"""Routing traces in memory: what a run's routers chose, checked before anything uses it.

Rows are (pass, layer, token) in execution order. The files they come from are the business of
`file` (Parquet) and `formats` (others'); all of them end in `build_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as made

import numpy as np

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.trace.columns import NO_REQUEST, Columns, Halves, Ints, check_rows
from lm_eval_moecache.trace.drafting import Drafted

_CHUNK_EVENTS = 65536


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
class Proposed:
    """What one prefetcher proposed at each event of the recorded run, most wanted first.

    Event e's keys are `keys[bounds[e]:bounds[e + 1]]`.
    """

    keys: Ints
    bounds: IntArray


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
    """By prefetcher, as `recorder.identity` names it: proposals that were recorded."""
    scans: tuple[tuple[int, int], ...] = ()
    """(First pass, number of passes) of each text that was routed layer by layer and token after
    token in each (`scoring=scan`): a replay keeps that order."""
    first_pass: int = 0
    """Where this is a part of a run, the run's number of its first pass."""
    drafted: Drafted = made(default_factory=Drafted)
    """What was drafted before its passes, and accepted by them."""
    has_sizes: bool = True
    """False where the file does not say how large an expert is, so that bytes mean nothing."""

    @property
    def num_passes(self) -> int:
        return (len(self.row_bounds) - 1) // self.geometry.num_layers

    def parts(self) -> Iterator[Trace]:
        """Yield what a replay serves one after another: of a trace in memory, itself."""
        yield self

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
    drafted: Drafted | None = None,
    has_sizes: bool = True,
) -> Trace:
    """Check the rows and index their events. Raises ValueError naming the row and the field.

    `where` names a row as its file's reader would look for it. Without `requests`, they are told
    from the rows: a request with decode passes generated one token in each pass that served it, and
    one more for each draft that a pass accepted.
    """
    bounds = check_rows(name, geometry, columns, where)
    keys, key_bounds = _unique_keys(geometry, columns, bounds)
    drafted = drafted or Drafted()
    if requests is None:
        requests = _tell_requests(geometry, columns, bounds, drafted)
    return Trace(
        name=name,
        geometry=geometry,
        seed=seed,
        columns=columns,
        row_bounds=bounds,
        keys=keys,
        key_bounds=key_bounds,
        requests=requests,
        logits=logits,
        predicted=predicted,
        drafted=drafted,
        has_sizes=has_sizes,
    )


def with_sizes(trace: Trace, model: RealModel) -> Trace:
    """Return a trace whose layers are charged as a model's."""
    geometry = replace(model.emulated_by(trace.geometry), model=model.name, emulates="")
    if not trace.has_sizes and model.num_experts > geometry.num_experts:
        # Such a file does not say the number of experts either: the largest id was taken.
        layers, experts = np.divmod(trace.keys, geometry.num_experts)
        trace = replace(trace, keys=(layers * model.num_experts + experts).astype(np.int32))
        geometry = replace(geometry, num_experts=model.num_experts)
    return replace(trace, geometry=geometry, has_sizes=True)


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
    geometry: Geometry, columns: Columns, bounds: IntArray, drafted: Drafted
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
                kind=GENERATE if generates else "loglikelihood",
                prompt_tokens=prompt,
                output_tokens=drafted.output_tokens(served) if generates else None,
                passes=tuple(served),
            )
        )
    return tuple(requests)


def _plain(values: Ints) -> Iterable[int]:
    numbers: list[int] = values.tolist()
    return numbers
