"""Reads routing traces that others recorded: `route_trace v1` CSV, JSON lines and arrays of ids."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import is_file
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import Columns, misfit
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.steps import MOST_EXPERT, decode_steps, read_npz
from lm_eval_moecache.trace.trace import Trace, build_trace

CSV_MARK = "# route_trace v1"
SUFFIXES = (".parquet", ".csv", ".jsonl", ".npz", ".partial")
_TOKEN_COLUMNS = ("turn", "phase", "step", "layer")
_CSV_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency")
# The traced files are 4-bit GGUFs: 4.5 bits a weight with the scales of a block, as in Q4_K.
_CSV_ELEMENT_BYTES = 4.5 / 8
_CODES = {PREFILL: PHASES.index(PREFILL), DECODE: PHASES.index(DECODE)}


def load_trace(
    file: str, *, logits: bool = False, predicted: bool = False, expert_bytes: int | None = None
) -> Trace:
    """Read a trace of any known format, told by its suffix.

    `expert_bytes` is the size of one expert for formats that do not say it; without it each
    counts one byte. Raises ValueError for a file that is missing or does not fit.
    """
    path = Path(file)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"trace {file!r}: the suffix {path.suffix!r} is not known. Allowed: "
            f"{', '.join(SUFFIXES)}."
        )
    if not is_file(path):
        raise ValueError(f"trace {file!r}: there is no such file.")
    if path.suffix == ".jsonl":
        return read_jsonl(path, expert_bytes)
    if path.suffix == ".npz":
        return read_npz(path, expert_bytes)
    if expert_bytes is not None:
        raise ValueError(
            f"expert_bytes={expert_bytes}: trace {path.name} says itself how large experts are."
        )
    if path.suffix == ".csv":
        return read_route_csv(path)
    return read_trace(path, logits=logits, predicted=predicted)


def read_route_csv(path: Path) -> Trace:
    """Read `route_trace v1`: one line per (token, layer, slot), sizes in the comments.

    A turn's prefill is one pass, each decode step another. Which experts were resident in the
    recorded run (`residency`, `expert_bytes`) is its own affair and not read.
    """
    name, text = path.name, _read_text(path)
    mark = text.split("\n", 1)[0].strip()
    if mark != CSV_MARK:
        raise ValueError(f"trace {name}: line 1 is {mark[:40]!r}, must be {CSV_MARK!r}.")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    geometry = _csv_geometry(name, comments)
    table = _csv_table(name, text, len(comments))
    values = {c: table[c].to_numpy() for c in _CSV_COLUMNS}
    top_k = geometry.top_k
    first_line = len(comments) + 2

    def where(row: int) -> str:
        return f"line {first_line + row * top_k}"

    head = _csv_tokens(name, values, top_k, first_line)
    decodes = head["phase"]
    labels = np.stack([head["turn"], decodes, head["step"] * decodes])
    changes = (np.diff(labels, axis=1) != 0).any(axis=0)
    columns = Columns(
        request=head["turn"],
        pass_index=np.concatenate([[0], np.cumsum(changes)]).astype(np.int32),
        phase=np.where(decodes == 0, _CODES[PREFILL], _CODES[DECODE]).astype(np.int32),
        token=head["step"],
        layer=head["layer"],
        experts=values["expert"].reshape(-1, top_k),
        weights=values["weight"].reshape(-1, top_k),
    )
    return build_trace(name, geometry, columns, where=where)


def _csv_tokens(name: str, values: dict[str, Any], top_k: int, first_line: int) -> dict[str, Any]:
    """Check that slots come in groups of `top_k`; return what the lines of a group share."""
    slots = values["slot"]
    firsts = np.arange(len(slots)) // top_k * top_k
    bad = slots != np.arange(len(slots)) % top_k
    for column in _TOKEN_COLUMNS:
        bad |= values[column] != values[column][firsts]
    if bad.any() or len(slots) % top_k:
        line = first_line + (int(bad.argmax()) if bad.any() else len(slots))
        raise misfit(name, f"line {line}", "slot", f"does not count 0..{top_k - 1} for each token")
    head = {c: values[c][::top_k] for c in _TOKEN_COLUMNS}
    bad = (head["phase"] != 0) & (head["phase"] != 1)
    if bad.any():
        row = int(bad.argmax())
        line = first_line + row * top_k
        raise misfit(name, f"line {line}", "phase", f"is {head['phase'][row]}, must be 0 or 1")
    return head


def _csv_geometry(name: str, comments: list[str]) -> Geometry:
    fields = dict(re.findall(r"(\w+)=(\S+)", comments[1] if len(comments) > 1 else ""))
    layers = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in comments[2:]]
    try:
        sizes = {int(found["layer"]): found for found in layers}
        count = int(fields["n_layer"])
        return Geometry(
            model=Path(fields["model"]).stem,
            num_layers=count,
            num_experts=int(fields["n_expert"]),
            top_k=int(fields["n_expert_used"]),
            expert_bytes=tuple((int(sizes[i]["expert_bytes"]),) for i in range(count)),
            dense_bytes=tuple(int(sizes[i]["dense_bytes"]) for i in range(count)),
            precision=("4bit",),
            element_bytes=_CSV_ELEMENT_BYTES,
        )
    except KeyError as error:
        raise ValueError(f"trace {name}: its comments lack {error.args[0]!r}.") from None
    except ValueError as error:
        raise ValueError(f"trace {name}: its comments: {error}") from None


def _csv_table(name: str, text: str, skip: int) -> Any:
    kinds = {c: pa.float32() if c == "weight" else pa.int32() for c in _CSV_COLUMNS}
    convert = pyarrow.csv.ConvertOptions(
        column_types=kinds, include_columns=list(_CSV_COLUMNS), null_values=[]
    )
    read = pyarrow.csv.ReadOptions(skip_rows=skip, use_threads=False)
    try:
        table = pyarrow.csv.read_csv(
            io.BytesIO(text.encode()), read_options=read, convert_options=convert
        )
    except (pa.ArrowException, KeyError) as error:
        # pyarrow counts rows behind the column names, from 1 for the names themselves.
        reason = str(error).replace("Row #", f"{skip} comment lines, then row #")
        raise ValueError(f"trace {name}: {reason}") from error
    if not table.num_rows:
        raise ValueError(f"trace {name} holds no rows.")
    return table


def read_jsonl(path: Path, expert_bytes: int | None = None) -> Trace:
    """Read JSON lines `{"tok": n, "layers": [[expert ids] ...]}`, one decode step each.

    The format gives neither weights nor sizes nor the number of experts: ids are sorted, so the
    order of need inside a step is by id; all experts are equally large; the largest id seen is
    the last expert.
    """
    name = path.name
    tokens, steps = _jsonl_steps(name, _read_text(path))
    experts = np.asarray(steps, dtype=np.int32)
    layers = experts.shape[1]
    return decode_steps(
        path,
        experts,
        np.asarray(tokens, dtype=np.int32),
        expert_bytes,
        lambda row: f"line {row // layers + 1}, layer {row % layers}",
    )


def _jsonl_steps(name: str, text: str) -> tuple[list[int], list[list[list[int]]]]:
    """Return the token numbers and, for each, the ids of every layer: all of one shape."""
    steps: list[list[list[int]]] = []
    tokens: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        token, layers = _jsonl_step(name, number, line)
        if tokens and token <= tokens[-1]:
            raise misfit(name, f"line {number}", "tok", f"is {token} after {tokens[-1]}")
        tokens.append(token)
        steps.append(layers)
        shape = [len(layer) for layer in layers]
        if shape != [len(layer) for layer in steps[0]] or len(set(shape)) > 1:
            raise misfit(
                name, f"line {number}", "layers", "must hold as many lists of as many ids as line 1"
            )
    if not steps:
        raise ValueError(f"trace {name} holds no rows.")
    return tokens, steps


def _jsonl_step(name: str, number: int, line: str) -> tuple[int, list[list[int]]]:
    try:
        step = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"trace {name}: line {number} is not JSON: {error}.") from None
    match step:
        case {"tok": int(token), "layers": [[_, *_], *_] as layers, **rest} if not rest:
            for index, layer in enumerate(layers):
                if not isinstance(layer, list) or not all(
                    type(e) is int and 0 <= e <= MOST_EXPERT for e in layer
                ):
                    raise misfit(
                        name,
                        f"line {number}",
                        "layers",
                        f"[{index}] is {layer!r}, must hold ids in 0..{MOST_EXPERT}",
                    )
            return token, layers
    raise ValueError(
        f"trace {name}: line {number} must hold a number `tok` and a list of lists `layers`."
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"trace {path.name} is not text: {error}.") from None
