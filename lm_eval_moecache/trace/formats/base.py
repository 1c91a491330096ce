"""What the readers of trace formats share: `Rows`, from which a trace is made, and text's lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import lines_of, parse_json, read_text
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import read_count, shown
from lm_eval_moecache.trace.trace import Columns, Refuse, Trace, build_trace

MOST_EXPERT = 2**15 - 1
"""Largest expert id: our own files store int16."""
UNSAID = -1
"""In `Rows`: a token, phase or line that the file does not give."""
READS, DECODES = PHASES.index(PREFILL), PHASES.index(DECODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Facts that the file lacks and the user supplies, and which large columns to read."""

    expert_bytes: int | None = None
    top_k: int | None = None
    num_layers: int | None = None
    logits: bool = False
    predicted: bool = False


class TraceFormat(NamedTuple):
    """A trace format: told by a file's first bytes, read, and maybe written.

    Another package adds one by an entry point `lm_eval_moecache.formats` that names it.
    """

    about: str
    """One line that `moecache trace formats` prints."""
    suffixes: tuple[str, ...]
    """File suffixes; the first is used for files we write."""
    holds: str
    """Fields of the format besides the expert ids."""
    sniff: Callable[[bytes], bool]
    """Whether a file that begins with these bytes has this format."""
    read: Callable[[Path, Options], Trace]
    """Reads a file; ValueError names the file and the place of a misfit."""
    write: Callable[[Trace, Path], None] | None = None
    """Writes a trace; ValueError where the format cannot hold all of it."""
    says_sizes: bool = False
    """Whether files give the bytes of an expert, so that the user need not."""
    reads_folders: bool = False
    """Whether a folder of such files, with one or more requests each, is one trace."""


# --- rows ---


class Rows:
    """Collects the rows of a file, in any order, and makes a trace of them.

    A row is one token at one layer. `step` numbers its pass, in execution order; `layer` is its
    number in the file, where dense layers may count. Where a token's position is not given, a pass
    continues its request's text; where a phase is not given, a pass of several tokens is a prefill.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.what = path, f"trace {path.name}"
        self._top_k = 0
        self._lines: list[tuple[int, ...]] = []
        self._ids: list[list[int]] = []
        self._weights: list[Any] = []
        self._blocks: list[tuple[IntArray, Any, Any]] = []

    def add(
        self,
        experts: Any,
        *,
        layer: int,
        step: int,
        request: int = 0,
        token: int = UNSAID,
        phase: int = UNSAID,
        weights: Any = None,
        line: int | None = None,
    ) -> None:
        """Add a row of a line of text: a list of ids, and of as many weights or none.

        ValueError names the line (the one that is read) where these are no ids, or not as many as
        in the first row.
        """
        line = line or reading.get() or UNSAID
        ids = experts if isinstance(experts, list) else []
        self._top_k = self._top_k or len(ids)
        every = [True] * self._top_k
        if not ids or [type(e) is int and 0 <= e <= MOST_EXPERT for e in ids] != every:
            raise ValueError(
                f"{self.what}: line {line}: experts is {shown(experts)}, must hold "
                f"{self._top_k or 'some'} whole numbers in 0..{MOST_EXPERT}, as the first row does."
            )
        if weights and [type(weight) in (int, float) for weight in weights] != every:
            raise ValueError(
                f"{self.what}: line {line}: weights is {shown(weights)}, must have one weight, a "
                "number, for each expert."
            )
        self._lines.append((step, layer, request, token, phase, line))
        self._ids.append(ids)
        self._weights.append(weights or None)

    def add_arrays(
        self,
        experts: Any,
        weights: Any = None,
        *,
        layer: Any,
        step: Any,
        request: Any = 0,
        token: Any = UNSAID,
        phase: Any = UNSAID,
        line: Any = UNSAID,
    ) -> None:
        """Add many rows: ids (and weights) [rows, top_k], all else numbers or arrays [rows]."""
        numbers = np.empty((len(experts), 6), np.int64)
        for place, column in enumerate((step, layer, request, token, phase, line)):
            numbers[:, place] = column
        self._blocks.append((numbers, experts, weights))

    def add_text(
        self, routed: Any, num_prompt: int, *, request: int = 0, start: int = 0, weights: Any = None
    ) -> None:
        """Add one request: ids (and weights) [tokens, layers, top_k], its prompt one prefill pass.

        `start` is the position of its first token in the text.
        """
        num_tokens, num_layers, top_k = routed.shape
        before = self._blocks[-1][0][-1, 0] + 1 if self._blocks else 0
        token, layer = np.divmod(np.arange(num_tokens * num_layers), num_layers)
        self.add_arrays(
            routed.reshape(-1, top_k),
            None if weights is None else weights.reshape(-1, top_k),
            layer=layer,
            step=before + np.maximum(token - max(num_prompt - 1, 0), 0),
            request=request,
            token=start + token,
            phase=np.where(token < num_prompt, READS, DECODES),
        )

    def trace(
        self,
        options: Options,
        *,
        model: str = "",
        num_experts: int | None = None,
        geometry: Geometry | None = None,
        tells_requests: bool = False,
    ) -> Trace:
        """Return the trace. ValueError names the place of a misfit in the file.

        Where all rows have weights, ids are sorted heaviest first. Without `num_experts` the
        largest id is the last expert; without `geometry` all experts have the size in `options`, by
        default one byte. With `tells_requests`, a prefill after a decode step is another request.
        """
        numbers, experts, weights = self._sorted()
        step, layer, request, token, phase, line = numbers.T
        pass_index = np.unique(step, return_inverse=True)[1]
        layer = np.unique(layer, return_inverse=True)[1]
        num_layers, top_k = int(layer.max()) + 1, experts.shape[1]
        is_first = layer == 0
        sizes = np.bincount(pass_index[is_first], minlength=pass_index[-1] + 1)
        if tells_requests:
            owners = request[np.searchsorted(pass_index, np.arange(len(sizes)))]
            begins = (np.diff(owners) != 0) | (sizes[1:] > 1) & (sizes[:-1] == 1)
            request = np.append(0, np.cumsum(begins))[pass_index]
        if phase[0] == UNSAID:
            phase = np.where(sizes > 1, READS, DECODES)[pass_index]
        if token[0] == UNSAID:
            token = _positions(pass_index * num_layers + layer, request, sizes, num_layers)

        def where(row: int) -> str:
            place = f"layer {layer[row]}, token {token[row]}"
            start = f"pass {pass_index[row]}" if line[row] == UNSAID else f"line {line[row]}"
            return f"{start}, {place}"

        refuse = Refuse(self.path.name, where)
        if weights is not None:
            told = weights.astype(float).round(6)
            bad = (weights < 0).any(axis=1)
            refuse(bad, "weights", lambda row: f"is {told[row].tolist()}, must be 0 or more")
            heaviest = np.argsort(-weights, axis=-1, kind="stable")
            experts = np.take_along_axis(experts, heaviest, axis=-1)
            weights = np.take_along_axis(weights, heaviest, axis=-1)
        _check_texts(np.flatnonzero(is_first), request, token, refuse)
        names = ("request", "pass_index", "phase", "token", "layer", "experts")
        arrays = (request, pass_index, phase, token, layer, experts)
        columns = {name: array.astype(np.int32) for name, array in zip(names, arrays, strict=True)}
        own = Geometry(
            model=model or self.path.stem,
            num_layers=num_layers,
            num_experts=num_experts or min(max(int(experts.max()) + 1, top_k), MOST_EXPERT + 1),
            top_k=top_k,
            expert_bytes=((options.expert_bytes or 1,),) * num_layers,
            dense_bytes=(0,) * num_layers,
            precision=("unknown",),
        )
        return build_trace(
            self.path.name,
            geometry or own,
            Columns(**columns, weights=weights),
            where=where,
            has_sizes=geometry is not None or options.expert_bytes is not None,
        )

    def _sorted(self) -> tuple[IntArray, Any, Any]:
        """Return the rows by pass and layer, and within a layer as they came."""
        blocks = list(self._blocks)
        if self._lines:
            is_weighted = all(weights is not None for weights in self._weights)
            weights = np.array(self._weights, np.float32) if is_weighted else None
            blocks.append((np.array(self._lines), np.array(self._ids), weights))
        if not blocks:
            raise ValueError(f"{self.what} has no rows.")
        numbers, experts, weighed = zip(*blocks, strict=True)
        if len({block.shape[1] for block in experts}) > 1:
            widths = sorted({block.shape[1] for block in experts})
            raise ValueError(f"{self.what} has requests of {widths} experts a token.")
        joined, ids = np.concatenate(numbers), np.concatenate(experts)
        order = np.lexsort((joined[:, 1], joined[:, 0]))
        is_weighted = all(block is not None for block in weighed)
        weights = np.concatenate(weighed, dtype=np.float32)[order] if is_weighted else None
        return joined[order], ids[order], weights


def _positions(event: IntArray, request: IntArray, sizes: IntArray, num_layers: int) -> IntArray:
    """Return each row's token where every pass continues its request's text.

    `sizes` are the tokens of each pass. A layer with fewer rows than the pass serves the last ones.
    """
    rows_before = np.searchsorted(event, np.arange(len(sizes)) * num_layers)
    done, ends = Counter[int](), np.zeros(len(sizes), np.int64)
    for index, (owner, size) in enumerate(np.stack([request[rows_before], sizes], 1).tolist()):
        done[owner] += size
        ends[index] = done[owner]
    counts = np.bincount(event)
    return ends[event // num_layers] - (np.cumsum(counts)[event] - np.arange(len(event)))


def _check_texts(rows: IntArray, request: IntArray, token: IntArray, refuse: Refuse) -> None:
    """Check that over the passes of a request its tokens, at the first layer, count up by one."""
    rows = rows[np.argsort(request[rows], kind="stable")]
    goes_on = request[rows[1:]] == request[rows[:-1]]
    bad = np.zeros(len(token), bool)
    bad[rows[1:]] = goes_on & (np.diff(token[rows]) != 1)
    before = (
        dict(zip(rows[1:].tolist(), token[rows[:-1]].tolist(), strict=True)) if bad.any() else {}
    )

    def problem(row: int) -> str:
        missing = ": one is missing" if token[row] > before[row] else ""
        return f"is {token[row]} after {before[row]}{missing}"

    refuse(bad, "token", problem)


# --- arrays of ids [tokens, layers, top_k] ---

LEAST_ROWS = 16
"""Fewest rows in which a slot that never changes is taken for a shared expert's."""


def checked_ids(what: str, routed: Any, options: Options) -> Any:
    """Return the ids [tokens, layers, top_k] of an array, without the slots of shared experts.

    Engines that fuse shared experts with the routed ones give them a slot that holds one number
    in every row. ValueError where the array is empty or of another form, and where it has such
    slots and `options.top_k` is not the number of the others.
    """
    if routed.ndim != 3 or not routed.size or not np.issubdtype(routed.dtype, np.integer):
        raise ValueError(
            f"{what} is {routed.dtype} of shape {list(routed.shape)}, must be whole numbers of "
            "shape [tokens, layers, top_k] with none of them 0."
        )
    rows = routed.reshape(-1, routed.shape[-1])
    constant = (rows == rows[0]).all(axis=0)
    if len(rows) < LEAST_ROWS or routed.shape[1] == 1 or not constant.any():
        return routed
    num_routed = int((~constant).sum())
    if num_routed != options.top_k:
        slots = ", ".join(f"{slot} ({rows[0, slot]})" for slot in np.flatnonzero(constant))
        raise ValueError(
            f"{what}: of {len(constant)} slots these hold one number in every row, as those of "
            f"shared experts do, which no router chooses: {slots}. Give the model's experts per "
            f"token: `moecache trace convert IN OUT --top_k {num_routed}`, or --model NAME."
        )
    return routed[..., ~constant]


def check_no_bool(what: str, value: Any) -> None:
    """Raise ValueError where nested lists hold `true` or `false`, which numpy takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{what} holds {shown(value)}, must hold whole numbers.")
    for item in value if isinstance(value, list) else ():
        check_no_bool(what, item)


# --- lines of text ---

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
    """Yield (line number, object) for a JSON Lines file whose objects have these counts.

    ValueError for other JSON values, and where a count is absent or no count.
    """
    for number, line in numbered(path):
        what = f"trace {path.name}: line {number}"
        record = parse_json(line, what)
        if not isinstance(record, dict):
            raise ValueError(f"{what} must hold an object.")
        check_counts(what, record, *counts)
        yield number, record


def check_counts(what: str, record: dict[str, Any], *counts: str) -> None:
    """Make these fields of a JSON object whole numbers; ValueError where one is none."""
    for key in counts:
        if key not in record:
            raise ValueError(f"{what} lacks {key!r}.")
        record[key] = read_count(f"{what}: {key}", record[key])


def whole(what: str, value: Any, key: str, **bounds: int) -> int | None:
    """Return `value` as a count within the bounds of `read_count`, or None for None."""
    return None if value is None else read_count(f"{what}: {key}", value, **bounds)
