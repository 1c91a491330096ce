"""The base class of trace formats, their shared readers, and `build`: from passes to a trace."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import lines_of, parse_json, read_text
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import read_count, shown
from lm_eval_moecache.trace.trace import Columns, Refuse, Trace, build_trace, misfit_error

MOST_EXPERT = 2**15 - 1
"""Largest expert id: our own files store int16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Facts that the file lacks and the user supplies, and which large columns to read."""

    expert_bytes: int | None = None
    top_k: int | None = None
    logits: bool = False
    predicted: bool = False


class TraceFormat(ABC):
    """One trace format: detected by content (`sniff`), read, and in some cases written.

    `moecache trace formats` prints the first line of its docstring.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """File suffixes; the first is used for files we write."""
    holds: ClassVar[str]
    """Fields of the format besides the expert ids."""
    says_sizes: ClassVar[bool] = False
    """Whether files give the bytes of an expert, so that the user need not."""
    reads_folders: ClassVar[bool] = False
    """Whether a folder of such files, with one or more requests each, is one trace."""
    written: ClassVar[bool] = False
    """Whether traces can be written in this format."""

    @classmethod
    @abstractmethod
    def sniff(cls, head: bytes) -> bool:
        """Whether a file that begins with these bytes has this format."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path, options: Options) -> Trace:
        """Read a file; ValueError names the file and the place of a misfit."""

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        """Write a trace; ValueError where the format cannot hold all of it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward pass of one request. The last layer may hold only the last tokens."""

    experts: Sequence[Any]
    """Layer -> ids [tokens, top_k]."""
    weights: Sequence[Any] | None = None
    """Layer -> routing weights [tokens, top_k]."""
    request: int = 0
    phase: str = DECODE
    first_token: int = 0
    """Position of the pass' first token in the request's text."""


def build(
    name: str,
    model: str,
    passes: Sequence[Pass],
    options: Options,
    *,
    num_experts: int | None = None,
) -> Trace:
    """Build a trace from passes in execution order.

    Where there are weights, ids are sorted heaviest first. Without `num_experts` the largest id is
    the last expert. All experts have the size in `options`, by default one byte.
    """
    if not passes:
        raise ValueError(f"trace {name} has no rows.")
    num_layers = len(passes[0].experts)
    for index, pass_ in enumerate(passes):
        if len(pass_.experts) != num_layers:
            raise ValueError(
                f"trace {name}: pass {index} has {len(pass_.experts)} layers, pass 0 has "
                f"{num_layers}."
            )
    layers = [layer for pass_ in passes for layer in pass_.experts]
    experts, weights = _rows(layers), None
    is_whole = experts is not None and np.issubdtype(experts.dtype, np.integer)
    if experts is None or not is_whole or not experts.shape[1] or _has_bool(layers):
        raise _uneven_error(name, passes)
    sizes = np.asarray([len(layer) for layer in layers])
    event = np.repeat(np.arange(len(layers)), sizes)
    of_pass, of_layer = event // num_layers, event % num_layers
    # A layer with fewer tokens than the pass serves the last ones.
    ends = np.asarray([p.first_token + len(p.experts[0]) for p in passes])[of_pass]
    token = ends - (np.repeat(np.cumsum(sizes), sizes) - np.arange(len(event)))

    def where(row: int) -> str:
        return f"pass {of_pass[row]}, layer {of_layer[row]}, token {token[row]}"

    def refuse(bad: npt.ArrayLike, field: str, values: npt.NDArray[Any], rule: str) -> None:
        Refuse(name, where)(bad, field, lambda row: f"is {values[row].tolist()}, {rule}")

    outside = ((experts < 0) | (experts > MOST_EXPERT)).any(axis=1)
    refuse(outside, "experts", experts, f"must hold ids in 0..{MOST_EXPERT}")
    top_k = experts.shape[1]
    if all(pass_.weights is not None for pass_ in passes):
        listed = [layer for pass_ in passes for layer in pass_.weights or ()]
        weights = _rows(listed, np.float32)
        if weights is None or _has_bool(listed) or weights.shape != experts.shape:
            raise ValueError(f"trace {name}: must have one weight, a number, for each expert.")
        refuse((weights < 0).any(axis=1), "weights", weights, "must be 0 or more")
        order = np.argsort(-weights, axis=-1, kind="stable")
        experts = np.take_along_axis(experts, order, axis=-1)
        weights = np.take_along_axis(weights, order, axis=-1)
    columns = Columns(
        request=np.asarray([p.request for p in passes])[of_pass].astype(np.int32),
        pass_index=of_pass.astype(np.int32),
        phase=np.asarray([PHASES.index(p.phase) for p in passes])[of_pass].astype(np.int32),
        token=token.astype(np.int32),
        layer=of_layer.astype(np.int32),
        experts=experts.astype(np.int32),
        weights=weights,
    )
    geometry = Geometry(
        model=model,
        num_layers=num_layers,
        num_experts=max(int(experts.max(initial=0)) + 1, top_k)
        if num_experts is None
        else num_experts,
        top_k=top_k,
        expert_bytes=((options.expert_bytes or 1,),) * num_layers,
        dense_bytes=(0,) * num_layers,
        precision=("unknown",),
    )
    has_sizes = options.expert_bytes is not None
    return build_trace(name, geometry, columns, where=where, has_sizes=has_sizes)


def _uneven_error(name: str, passes: Sequence[Pass]) -> ValueError:
    """Return the error for the first token without as many integer ids as the very first token."""
    first = np.size(passes[0].experts[0][0]) or 1
    for number, pass_ in enumerate(passes):
        for layer, rows in enumerate(pass_.experts):
            for token, ids in enumerate(rows, start=pass_.first_token):
                listed = ids if isinstance(ids, (list, np.ndarray)) else []
                if [_is_whole(e) for e in listed] != [True] * first:
                    place = f"pass {number}, layer {layer}, token {token}"
                    problem = f"is {shown(ids)}, must hold {first} whole numbers, as the first does"
                    return misfit_error(name, place, "experts", problem)
    return ValueError(f"trace {name}: ids of experts must be lists of as many whole numbers.")


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _has_bool(layers: Sequence[Any]) -> bool:
    """Whether rows that were lists hold `true` or `false`, which numpy takes for 1 and 0."""
    rows = (row for layer in layers if isinstance(layer, list) for row in layer)
    return any(bool in map(type, row) for row in rows if isinstance(row, list))


def check_no_bool(what: str, value: Any) -> None:
    """Raise ValueError where nested lists hold `true` or `false`."""
    if isinstance(value, bool):
        raise ValueError(f"{what} holds {shown(value)}, must hold whole numbers.")
    for item in value if isinstance(value, list) else ():
        check_no_bool(what, item)


def _rows(layers: Sequence[Any], dtype: Any = None) -> npt.NDArray[Any] | None:
    """Concatenate the rows of all layers as [rows, top_k]; None where row lengths differ."""
    try:
        if isinstance(layers[0], np.ndarray):
            rows = np.concatenate(layers, dtype=dtype)
        else:
            # In one call: numpy is slow on many small lists.
            rows = np.asarray([row for layer in layers for row in layer], dtype)
    except (TypeError, ValueError):
        return None
    return rows if rows.ndim == 2 else None


def one_request(trace: Trace, what: str) -> None:
    """Raise ValueError for passes that batch several requests, which some formats cannot hold."""
    owners = trace.columns.request
    firsts = owners[trace.row_bounds[:-1][:: trace.geometry.num_layers]]
    if (firsts[trace.columns.pass_index] != owners).any():
        raise ValueError(
            f"{what}: passes of several requests at once cannot be written so. Allowed: one "
            "request, as --request 0."
        )


# --- line-based text formats ---

Layers = Mapping[int, Sequence[tuple[Any, Any]]]
"""Layer -> (ids, weights or None) of each token."""


reading: ContextVar[int | None] = ContextVar("reading", default=None)
"""Number of the line that `numbered` gave last, for the message where an importer breaks on it."""


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) for the lines that are not blank."""
    text = read_text(path, f"trace {path.name}")
    for number, line in enumerate(lines_of(text), start=1):
        if line.strip():
            reading.set(number)
            yield number, line
    reading.set(None)


def objects(path: Path, *counts: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for a JSON Lines file.

    ValueError for other JSON values, and where a field of `counts` is `true` or `false`, which
    Python takes for 1 and 0.
    """
    for number, line in numbered(path):
        record = parse_json(line, f"trace {path.name}: line {number}")
        if not isinstance(record, dict):
            raise ValueError(f"trace {path.name}: line {number} must hold an object.")
        for key in counts:
            if isinstance(record.get(key), bool):
                what = f"trace {path.name}: line {number}: {key}={record[key]}"
                raise ValueError(f"{what} must be a whole number.")
        yield number, record


def check_next(what: str, token: int, before: int) -> None:
    """Raise ValueError unless a text's token follows the one before it."""
    if token != before + 1:
        missing = ": one is missing" if token > before else ""
        raise ValueError(f"{what} is {token} after {before}{missing}.")


def pass_of(layers: Layers, request: int, phase: str, first_token: int) -> Pass:
    """Return a pass through these layers; it has weights if every row has them."""
    rows = [layers[layer] for layer in sorted(layers)]
    weighted = all(weights for layer in rows for _, weights in layer)
    return Pass(
        experts=[[ids for ids, _ in layer] for layer in rows],
        weights=[[weights for _, weights in layer] for layer in rows] if weighted else None,
        request=request,
        phase=phase,
        first_token=first_token,
    )


def told_apart(steps: Iterable[Layers], first: int = 0) -> Iterator[tuple[int, Layers]]:
    """Yield (request, layers): a pass of several tokens after a decode step is another request."""
    request, decodes = first, False
    for layers in steps:
        reads = len(layers[min(layers)]) > 1
        request += reads and decodes
        decodes = not reads
        yield request, layers


def in_turn(steps: Iterable[tuple[int, Layers]]) -> list[Pass]:
    """Return the passes of (request, layers), each continuing after its request's last token.

    A pass of several tokens is a prefill, a pass of one token a decode step.
    """
    passes, done = [], Counter[int]()
    for request, layers in steps:
        if not layers:
            raise ValueError(f"request {request}: a pass has no layer.")
        tokens = len(layers[min(layers)])
        phase = PREFILL if tokens > 1 else DECODE
        passes.append(pass_of(layers, request, phase, done[request]))
        done[request] += tokens
    return passes


class JsonLines(TraceFormat):
    """A JSON Lines format, detected by the fields of its first line."""

    suffixes = (".jsonl",)
    fields: ClassVar[frozenset[str]]

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return cls.fields <= first_object(head).keys()


def first_object(head: bytes) -> dict[str, Any]:
    """Return the JSON object on a file's first line, or an empty dict."""
    try:
        record = parse_json(head.lstrip().split(b"\n", 1)[0], "")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


# --- formats that store arrays of ids ---

ROUTED = "routed_experts"
MOST_BYTES = 1 << 32
"""Largest size of an unpacked array: a small file may expand to any number of zeros."""
UNREADABLE = (
    *(ValueError, OSError, EOFError, zlib.error),
    *(zipfile.BadZipFile, NotImplementedError, tokenize.TokenError),  # versions, broken headers
)
"""Exceptions that numpy raises for damaged arrays."""


def generation(prompt: Any, steps: Any, request: int, first_token: int = 0) -> Iterator[Pass]:
    """Yield the passes of one request: its prompt as one prefill, then one pass per step.

    `prompt` and `steps` are ids [tokens, layers, top_k].
    """
    if len(prompt):
        ids = list(np.moveaxis(prompt, 1, 0))
        yield Pass(experts=ids, request=request, phase=PREFILL, first_token=first_token)
    for token, step in enumerate(steps, start=first_token + len(prompt)):
        yield Pass(experts=list(step[:, None]), request=request, first_token=token)


def check_routed(what: str, routed: Any) -> None:
    """Raise ValueError unless the array is integer [tokens, layers, top_k] and not empty."""
    if routed.ndim != 3 or not routed.size or not np.issubdtype(routed.dtype, np.integer):
        raise ValueError(
            f"{what} is {routed.dtype} of shape {list(routed.shape)}, must be whole numbers of "
            "shape [tokens, layers, top_k] with none of them 0."
        )


def responses(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, response) of a file (one, a list, or one per line) or of a folder's JSON."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        what = f"trace {file.name}"
        text = read_text(file, what)
        try:
            records = parse_json(text, what)
        except ValueError:
            lines = [line for line in lines_of(text) if line.strip()]
            if len(lines) < 2:
                raise
            records = [parse_json(line, f"{what}: line {n}") for n, line in enumerate(lines, 1)]
        for number, record in enumerate(records if isinstance(records, list) else [records]):
            if not isinstance(record, dict):
                raise ValueError(f"{what}: response {number} must hold an object.")
            yield f"{what}: response {number}", record


def whole(what: str, value: Any, key: str, **bounds: int) -> int | None:
    """Return `value` as a count within the bounds of `read_count`, or None for None."""
    return None if value is None else read_count(f"{what}: {key}", value, **bounds)
