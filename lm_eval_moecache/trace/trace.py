"""Routing traces in memory: a run's router choices, checked before use.

Rows are (pass, layer, token) in execution order. `file` (Parquet) and `formats` (all others) read
the files and end in `build_trace`. Shapes of drafts: F forwards of the draft before one pass, B
layers of the draft, C of them that predict a layer of the model, N experts kept per prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.geometry import NO_TARGET, Draft, Geometry
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.records.real_model import RealModel

Ints = npt.NDArray[np.int32]
Halves = npt.NDArray[np.float16]
NO_REQUEST = -1
"""Request number of a row that belongs to no harness request."""
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

    def at(self, rows: Any) -> Columns:
        """Return these rows: a slice, a mask or their numbers."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: Any = {name: None if a is None else a[rows] for name, a in every.items()}
        return Columns(**picked)


class Refuse(NamedTuple):
    """Refuses rows of a trace; `where` names a row by its place in the source file."""

    name: str
    where: Callable[[int], str] = "row {}".format

    def __call__(
        self, bad: npt.ArrayLike, field: str, problem: str | Callable[[int], str], first: int = 0
    ) -> None:
        """Raise ValueError for the first row that is bad; `bad[0]` is row number `first`."""
        if np.any(bad):
            row = first + int(np.argmax(bad))
            text = problem if isinstance(problem, str) else problem(row)
            raise ValueError(f"trace {self.name}: {self.where(row)}: {field} {text}.")


def check_rows(geometry: Geometry, columns: Columns, refuse: Refuse) -> IntArray:
    """Check all rows; return event bounds [events + 1]. ValueError names the row and the field."""
    if not len(columns.layer):
        raise ValueError(f"trace {refuse.name} has no rows.")
    _check_values(geometry, columns, refuse)
    bounds = _check_order(geometry.num_layers - 1, columns, refuse)
    _check_tokens(geometry.num_layers, columns, bounds, refuse)
    return bounds


def _check_values(geometry: Geometry, columns: Columns, refuse: Refuse) -> None:
    """Check the values of each row."""

    def check(bad: npt.NDArray[np.bool_], name: str, rule: str) -> None:
        values = getattr(columns, name)
        in_row = bad.any(axis=-1) if bad.ndim > 1 else bad
        refuse(in_row, name, lambda row: f"is {values[row].tolist()}, {rule}")

    experts, weights, layer = columns.experts, columns.weights, columns.layer
    rule = f"must lie in 0..{geometry.num_experts - 1}"
    check((experts < 0) | (experts >= geometry.num_experts), "experts", rule)
    ordered = np.sort(experts, axis=-1)
    check(ordered[:, 1:] == ordered[:, :-1], "experts", "names one twice")
    if weights is not None:
        check(~np.isfinite(weights), "weights", "must be finite")
        check(weights[:, 1:] > weights[:, :-1], "weights", "must come heaviest first")
    check(columns.token < 0, "token", "must be 0 or more")
    check(columns.request < NO_REQUEST, "request", "must be -1 or more")
    rule = f"must lie in 0..{geometry.num_layers - 1}"
    check((layer < 0) | (layer >= geometry.num_layers), "layer", rule)


def _check_order(last: int, columns: Columns, refuse: Refuse) -> IntArray:
    """Check that passes follow one another and each runs all layers; return the event bounds."""
    passes, layers = columns.pass_index, columns.layer
    refuse(passes[:1] != 0, "pass", f"is {passes[0]}, must begin at 0")
    step = np.diff(passes, prepend=passes[:1])

    def skips(row: int) -> str:
        return f"is {passes[row]} after {passes[row - 1]}, must count up"

    refuse((step != 0) & (step != 1), "pass", skips)
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
    refuse(changes & (step == 0), "phase", "changes within a pass")
    starts = np.flatnonzero(begins | (advance == 1))
    return np.append(starts, len(layers)).astype(np.int64)


def _check_tokens(num_layers: int, columns: Columns, bounds: IntArray, refuse: Refuse) -> None:
    """Check that the layers of a pass serve the same tokens in the same order.

    The last layer may serve only the last tokens of the pass' sequences, as in engines that need no
    other output; no layer serves more tokens, other tokens, or in another order.
    """
    sizes = np.diff(bounds)
    of_first = np.repeat(sizes[::num_layers], num_layers)
    is_full = np.repeat(sizes == of_first, sizes)
    first = np.repeat(np.repeat(bounds[:-1][::num_layers], num_layers), sizes)
    twin = first + np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    twin = np.minimum(twin, bounds[-1] - 1)
    for name, values in (("request", columns.request), ("token", columns.token)):

        def differs(row: int, values: Ints = values) -> str:
            return f"is {values[row]}, layer 0 has {values[twin[row]]} there"

        refuse((values != values[twin]) & is_full, name, differs)
    ends = _check_sequences(columns, refuse)
    pairs = np.stack([columns.request, columns.token], axis=-1)
    for event in np.flatnonzero(sizes != of_first).tolist():
        base, begin = event - event % num_layers, int(bounds[event])
        counts = f"has {sizes[event]} rows in this pass, layer 0 has {sizes[base]}"
        is_last = event == base + num_layers - 1
        refuse([not is_last or sizes[event] > sizes[base]], "layer", counts, begin)
        served = slice(bounds[base], bounds[base + 1])
        last = iter(pairs[served][ends[served]].tolist())
        others = [pair not in last for pair in pairs[begin : bounds[event + 1]].tolist()]
        problem = "is not the last of a sequence of layer 0, and not all of them are here"
        refuse(others, "token", problem, begin)


def _check_sequences(columns: Columns, refuse: Refuse) -> BoolArray:
    """Check that a prefill has each token once; return which rows end a sequence [rows].

    A row continues its request's text by one token or begins another. Decode passes have one row
    per sequence, several per request under beam search.
    """
    token = columns.token
    of_row = np.stack([columns.request, columns.pass_index, columns.layer])
    same = (np.diff(of_row) == 0).all(axis=0)
    step = np.diff(token)
    goes_on = same & (step == 1)
    reads = same & (columns.phase[1:] != _DECODE)
    neighbour = np.append(False, goes_on[:-1]) | np.append(goes_on[1:], False)

    def problem(row: int) -> str:
        before = token[row - 1]
        if token[row] == before:
            return "appears twice"
        return f"is {token[row]} after {before}: one is missing"

    refuse(reads & ((step > 1) | ((step == 0) & neighbour)), "token", problem, 1)
    return np.append(~goes_on, True)


# --- the draft model's work before the passes that verify its tokens ---

TOKENS, EXPERTS, RANKED = DRAFT_COLUMNS = ("draft_tokens", "draft_experts", "draft_ranked")
"""List columns filled in a pass' first row: token count of each forward [F]; number of unique
experts in each layer of the draft [F, B]; the model's predicted experts, likeliest first [F, C, N].
"""


class Lists(NamedTuple):
    """One list per pass or event: list n is `values[bounds[n]:bounds[n + 1]]`."""

    values: Any
    bounds: IntArray

    def at(self, index: int) -> Ints:
        """Return the list of pass or event `index`."""
        values: Ints = self.values[self.bounds[index] : self.bounds[index + 1]]
        return values

    def between(self, first: int, last: int) -> Lists:
        """Return the lists `first` to `last` (excluded)."""
        bounds = self.bounds[first : last + 1]
        return Lists(self.values[bounds[0] : bounds[-1]], bounds - bounds[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted:
    """All drafting of a recorded run. `draft` is None where drafts were copied from the prompt."""

    draft: Draft | None = None
    ranked: int = 0
    """Number of experts kept per prediction, likeliest first."""
    tokens: Lists | None = None
    experts: Lists | None = None
    ranks: Lists | None = None
    settled: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Pass -> (drafted tokens, accepted tokens)."""

    @property
    def predicted_layers(self) -> tuple[int, ...]:
        """Layers of the model that each forward of the draft predicts [C]."""
        targets = () if self.draft is None or not self.ranked else self.draft.targets
        return tuple(target for target in targets if target != NO_TARGET)

    def output_tokens(self, passes: Iterable[int]) -> int:
        """Return how many tokens these passes generated: one each, plus accepted drafts."""
        return sum(1 + self.settled.get(index, (0, 0))[1] for index in passes)


# --- the trace ---

_CHUNK_EVENTS = 65536


class TracedRequest(NamedTuple):
    """One harness request: its ledger entry and the passes that served it.

    A trace's metadata lists requests with their fields in this order.
    """

    task: str
    kind: str
    prompt_tokens: int
    output_tokens: int | None
    passes: tuple[int, ...]
    document: int | None = None
    place: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Logits predicted from a row's input for the next `depth` layers.

    Row r of layer l holds min(depth, num_layers - 1 - l) * num_experts values, nearest layer
    first, at `values[offsets[r]:offsets[r + 1]]`. Where `by` is a trained predictor's digest
    instead of empty (the gates), the last layer's rows of a decode pass hold num_experts values for
    layer 0 of the next pass.
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
    proposed: Mapping[str, Lists] = field(default_factory=dict)
    """Prefetcher (`recorder.identity`) -> the keys it proposed at each event of the recorded run,
    most wanted first."""
    scans: tuple[tuple[int, int], ...] = ()
    """(First pass, number of passes) of each text routed layer by layer and, within a layer, token
    by token (`scoring=scan`): a replay keeps that order."""
    first_pass: int = 0
    """Number in the run of the first pass; above 0 in later parts of a streamed trace."""
    drafted: Drafted = field(default_factory=Drafted)
    """The drafting before each pass, and how many drafts it accepted."""
    has_sizes: bool = True
    """False where the file gives no expert sizes, so that bytes mean nothing."""

    @property
    def num_passes(self) -> int:
        """Number of passes in this trace or part."""
        return (len(self.row_bounds) - 1) // self.geometry.num_layers

    def parts(self) -> Iterator[Trace]:
        """Yield the parts that a replay serves in turn: a trace in memory is one part."""
        yield self

    def between(self, first: int, last: int, first_pass: int) -> Trace:
        """Return passes `first` to `last` (excluded) of this part, numbered from `first_pass`."""
        num_layers, drafted = self.geometry.num_layers, self.drafted
        events = slice(first * num_layers, last * num_layers + 1)
        row_bounds, key_bounds = self.row_bounds[events], self.key_bounds[events]
        rows, keys = slice(row_bounds[0], row_bounds[-1]), slice(key_bounds[0], key_bounds[-1])
        predicted = self.predicted
        if predicted is not None:
            values, offsets = Lists(predicted.values, predicted.offsets).between(
                rows.start, rows.stop
            )
            predicted = replace(predicted, values=values, offsets=offsets)
        lists: dict[str, Any] = {
            name: None if (each := getattr(drafted, name)) is None else each.between(first, last)
            for name in ("tokens", "experts", "ranks")
        }
        shift = first_pass - (self.first_pass + first)
        settled = {index + shift: counts for index, counts in drafted.settled.items()}
        return replace(
            self,
            columns=self.columns.at(rows),
            row_bounds=row_bounds - row_bounds[0],
            keys=self.keys[keys],
            key_bounds=key_bounds - key_bounds[0],
            logits=None if self.logits is None else self.logits[rows],
            predicted=predicted,
            proposed={
                name: each.between(events.start, events.stop - 1)
                for name, each in self.proposed.items()
            },
            scans=tuple((f - first, n) for f, n in self.scans if first <= f < last),
            first_pass=first_pass,
            drafted=replace(drafted, settled=settled, **lists),
        )

    def starts_sequence(self, pass_index: int) -> bool:
        """Whether a text, or a window of one, begins in this pass."""
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
    drafted: Drafted | None = None,
    **more: Any,
) -> Trace:
    """Check the rows and index their events. Raises ValueError naming the row and the field.

    `where` names a row by its place in the source file. Without `requests`, they are inferred from
    the rows: a request with decode passes generated one token per prompt (consecutive prefills: one
    prompt read in chunks), one in each other pass that served it, and one more per accepted draft.
    `more` are further fields of the trace.
    """
    bounds = check_rows(geometry, columns, Refuse(name, where))
    keys, key_bounds = _unique_keys(geometry, columns, bounds)
    drafted = drafted or Drafted()
    if requests is None:
        requests = _tell_requests(geometry, columns, bounds, drafted)
    fields = {"row_bounds": bounds, "keys": keys, "key_bounds": key_bounds, "seed": seed, **more}
    return Trace(
        name=name, geometry=geometry, columns=columns, requests=requests, drafted=drafted, **fields
    )


def with_sizes(trace: Trace, model: RealModel) -> Trace:
    """Return the trace with the expert and dense sizes of `model`."""
    geometry = replace(model.emulated_by(trace.geometry), model=model.name, emulates="")
    if not trace.has_sizes and model.num_experts > geometry.num_experts:
        # A file without sizes lacks the number of experts too: the reader took the largest id.
        layers, experts = np.divmod(trace.keys, geometry.num_experts)
        trace = replace(trace, keys=(layers * model.num_experts + experts).astype(np.int32))
        geometry = replace(geometry, num_experts=model.num_experts)
    return replace(trace, geometry=geometry, has_sizes=True)


def _unique_keys(geometry: Geometry, columns: Columns, bounds: IntArray) -> tuple[Ints, IntArray]:
    """Return each event's unique keys in order of first need, and event bounds [events + 1]."""
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
        events = event_of[places // geometry.top_k]
        counts.append(np.bincount(events, minlength=stop - start).astype(np.int64))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts))])
    return np.concatenate(parts), offsets


def _tell_requests(
    geometry: Geometry, columns: Columns, bounds: IntArray, drafted: Drafted
) -> tuple[TracedRequest, ...]:
    phases = columns.phase[bounds[:-1][:: geometry.num_layers]]
    of_first = (columns.layer == 0) & (columns.request != NO_REQUEST)
    pairs = columns.request[of_first] * np.int64(len(phases)) + columns.pass_index[of_first]
    unique_pairs, tokens = np.unique(pairs, return_counts=True)
    owners, passes = np.divmod(unique_pairs, len(phases))
    requests = []
    for rows in np.split(np.arange(len(unique_pairs)), np.flatnonzero(np.diff(owners)) + 1):
        if not len(rows):
            continue
        served: list[int] = passes[rows].tolist()
        reads = phases[served] == 0
        generates = not reads.all()
        # A prompt gives one token, in its last chunk.
        goes_on = reads & np.append(reads[1:], False)
        yields: list[int] = passes[rows][~goes_on].tolist()
        request = TracedRequest(
            task="trace",
            kind=GENERATE if generates else "loglikelihood",
            prompt_tokens=int(tokens[rows][reads].sum()),
            output_tokens=drafted.output_tokens(yields) if generates else None,
            passes=tuple(served),
        )
        requests.append(request)
    return tuple(requests)
