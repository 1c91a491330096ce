"""What a format of traces is, and how its passes become a checked trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import Columns
from lm_eval_moecache.trace.trace import Trace, build_trace

MOST_EXPERT = 2**15 - 1
"""Ids are int16 in our own files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a user adds to a file that does not say it, and which large columns are wanted."""

    expert_bytes: int | None = None
    top_k: int | None = None
    logits: bool = False
    predicted: bool = False


class TraceFormat(ABC):
    """One format: told by its content (`sniff`), read, and for some written.

    The first line of its module's docstring is what `moecache trace formats` says of it.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Of its files; the first is that of files we write."""
    holds: ClassVar[str]
    """What it has beside the ids of experts."""
    says_sizes: ClassVar[bool] = False
    """Whether files say how many bytes an expert has: then a user need not."""
    reads_folders: ClassVar[bool] = False
    """Whether a folder of such files is one trace, a request or more in each."""

    @classmethod
    @abstractmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        """Whether a file that begins with these bytes is of this format."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path, options: Options) -> Trace:
        """Read a file; ValueError names it, and the place of what does not fit."""

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        """Write a trace; ValueError says what of it the format cannot hold."""
        raise NotImplementedError

    @classmethod
    def is_written(cls) -> bool:
        """Whether traces can be written in this format."""
        return cls.write.__func__ is not TraceFormat.write.__func__  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward pass of one request. The last layer may have the last tokens only."""

    experts: Sequence[Any]
    """Layer -> ids [tokens, top_k]."""
    weights: Sequence[Any] | None = None
    """Layer -> routing weights of them."""
    request: int = 0
    phase: str = DECODE
    first_token: int = 0
    """Position of its first token in the request's text."""


def build(
    name: str,
    model: str,
    passes: Sequence[Pass],
    options: Options,
    *,
    num_experts: int | None = None,
    where: Callable[[int], str] | None = None,
) -> Trace:
    """Build the trace of passes in the order in which they ran.

    Ids go heaviest first where there are weights. Without `num_experts` the largest id seen is the
    last expert. All experts are equally large: one byte, where `options` does not say it.
    """
    if not passes:
        raise ValueError(f"trace {name} holds no rows.")
    num_layers = len(passes[0].experts)
    uneven = [p for p, each in enumerate(passes) if len(each.experts) != num_layers]
    if uneven:
        raise ValueError(
            f"trace {name}: pass {uneven[0]} has {len(passes[uneven[0]].experts)} layers, "
            f"pass 0 has {num_layers}."
        )
    arrays = [ids_of(name, layer) for each in passes for layer in each.experts]
    top_k = arrays[0].shape[1]
    if any(array.shape[1] != top_k for array in arrays):
        raise ValueError(f"trace {name}: not all tokens have {top_k} experts, as the first has.")
    sizes = np.asarray([len(array) for array in arrays])
    firsts = np.asarray([[p.first_token + len(p.experts[0])] * num_layers for p in passes]).ravel()
    event = np.repeat(np.arange(len(arrays)), sizes)
    place = np.arange(len(event)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    experts, weights = np.concatenate(arrays), None
    if all(each.weights is not None for each in passes):
        weights = _weights(name, passes, experts)
        order = np.argsort(-weights, axis=-1, kind="stable")
        experts = np.take_along_axis(experts, order, axis=-1)
        weights = np.take_along_axis(weights, order, axis=-1)
    most = int(experts.max(initial=0))
    owners = np.asarray([p.request for p in passes])
    phases = np.asarray([PHASES.index(p.phase) for p in passes])
    columns = Columns(
        request=owners[event // num_layers].astype(np.int32),
        pass_index=(event // num_layers).astype(np.int32),
        phase=phases[event // num_layers].astype(np.int32),
        token=((firsts - sizes)[event] + place).astype(np.int32),
        layer=(event % num_layers).astype(np.int32),
        experts=experts.astype(np.int32),
        weights=weights,
    )
    geometry = Geometry(
        model=model,
        num_layers=num_layers,
        num_experts=max(most + 1, top_k) if num_experts is None else num_experts,
        top_k=top_k,
        expert_bytes=((options.expert_bytes or 1,),) * num_layers,
        dense_bytes=(0,) * num_layers,
        precision=("unknown",),
    )

    def usual(row: int) -> str:
        place = columns.pass_index[row], columns.layer[row], columns.token[row]
        return "pass {}, layer {}, token {}".format(*place)

    has_sizes = options.expert_bytes is not None
    return build_trace(name, geometry, columns, where=where or usual, has_sizes=has_sizes)


def ids_of(name: str, values: Any) -> IntArray:
    """Return ids [tokens, top_k]. ValueError where they are none."""
    try:
        found = np.asarray(values)
        whole = np.issubdtype(found.dtype, np.integer)
    except ValueError:
        whole = False
    if not whole or found.ndim != 2 or not found.shape[1]:
        raise ValueError(f"trace {name}: ids of experts must be lists of as many whole numbers.")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) <= MOST_EXPERT:
        low, high = int(found.min()), int(found.max())
        raise ValueError(
            f"trace {name}: has ids from {low} to {high}, must be in 0..{MOST_EXPERT}."
        )
    return found.astype(np.int64)


def _weights(name: str, passes: Sequence[Pass], experts: IntArray) -> FloatArray:
    try:
        parts = [np.asarray(w, dtype=np.float32) for p in passes for w in p.weights or ()]
        found: FloatArray = np.concatenate(parts)
    except (TypeError, ValueError):
        found = np.zeros((0, 0), dtype=np.float32)
    if found.shape != experts.shape:
        raise ValueError(f"trace {name}: must have one weight, a number, for each expert.")
    return found


def generation(
    prompt: Any | None, steps: Any, request: int, first_token: int = 0
) -> Iterator[Pass]:
    """Yield the passes of one request: its prompt's tokens at once, then one for each other.

    `prompt` and `steps` are ids [tokens, layers, top_k].
    """
    done = first_token
    if prompt is not None and len(prompt):
        yield Pass(
            experts=list(np.moveaxis(prompt, 1, 0)),
            request=request,
            phase=PREFILL,
            first_token=done,
        )
        done += len(prompt)
    for number, step in enumerate(steps):
        yield Pass(experts=list(step[:, None]), request=request, first_token=done + number)


def json_lines(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines with their line numbers, from 1."""
    for number, line in enumerate(read_text(path, what).splitlines(), start=1):
        if line.strip():
            record = parse_json(line, f"{what}: line {number}")
            if not isinstance(record, dict):
                raise ValueError(f"{what}: line {number} must hold an object.")
            yield number, record


def first_object(head: bytes) -> dict[str, Any]:
    """Return the JSON object on a file's first line; empty where there is none."""
    try:
        found = parse_json(head.lstrip().split(b"\n", 1)[0], "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def one_request(trace: Trace, what: str) -> None:
    """Refuse passes that serve several requests at once, which a format cannot hold."""
    owners = trace.columns.request
    firsts = owners[trace.row_bounds[:-1][:: trace.geometry.num_layers]]
    if (firsts[trace.columns.pass_index] != owners).any():
        raise ValueError(f"{what}: passes of several requests at once cannot be written so.")
