"""BigMoeOnEdge's `route_trace v1` CSV: one line per (token, layer, slot), sizes in its comments."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import read_text, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import Columns, misfit
from lm_eval_moecache.trace.formats.base import Options, TraceFormat, one_request
from lm_eval_moecache.trace.trace import Trace, build_trace

CSV_MARK = "# route_trace v1"
_TOKEN_COLUMNS = ("turn", "phase", "step", "layer")
_CSV_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency")
_READ = _CSV_COLUMNS[:-1]
# The traced files are 4-bit GGUFs: 4.5 bits a weight with the scales of a block, as in Q4_K.
_CSV_ELEMENT_BYTES = 4.5 / 8
_CODES = {PREFILL: PHASES.index(PREFILL), DECODE: PHASES.index(DECODE)}


class RouteTrace(TraceFormat):
    """A turn's prefill is one pass, each decode step another.

    Which experts were resident in the recorded run (`residency`, `expert_bytes`) is its own affair
    and not read; a written file says that each was a miss of the size its layer's experts have.
    """

    suffixes = (".csv",)
    holds = "weights, phases, turns, sizes of each layer"
    says_sizes = True

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return head.startswith(b"# route_trace")

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        return _read(path)

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        what, columns, geometry = f"out={str(path)!r}", trace.columns, trace.geometry
        one_request(trace, what)
        if columns.weights is None:
            raise ValueError(f"{what}: this format has weights, and trace {trace.name} has none.")
        if not set(columns.phase.tolist()) <= set(_CODES.values()):
            raise ValueError(f"{what}: this format has no passes that verify drafts.")
        sizes = [levels[0] for levels in geometry.expert_bytes]
        lines = [
            CSV_MARK,
            f"# model={geometry.model or trace.name} arch=unknown n_layer={geometry.num_layers} "
            f"n_expert={geometry.num_experts} n_expert_used={geometry.top_k}",
            *(
                f"# layer={layer} expert_bytes={size} dense_bytes={dense}"
                for layer, (size, dense) in enumerate(zip(sizes, geometry.dense_bytes, strict=True))
            ),
            ",".join((*_CSV_COLUMNS, "expert_bytes")),
        ]
        phases = [int(code == _CODES[DECODE]) for code in columns.phase.tolist()]
        heads = zip(
            columns.request.tolist(),
            phases,
            columns.token.tolist(),
            columns.layer.tolist(),
            strict=True,
        )
        ids, weights = columns.experts.tolist(), columns.weights.tolist()
        for row, (turn, phase, step, layer) in enumerate(heads):
            lines += [
                f"{turn},{phase},{step},{layer},{slot},{expert},{weight!r},0,{sizes[layer]}"
                for slot, (expert, weight) in enumerate(zip(ids[row], weights[row], strict=True))
            ]
        write_whole(path, "\n".join(lines) + "\n")


def _read(path: Path) -> Trace:
    name, text = path.name, read_text(path, f"trace {path.name}")
    mark = text.split("\n", 1)[0].strip()
    if mark != CSV_MARK:
        raise ValueError(f"trace {name}: line 1 is {mark[:40]!r}, must be {CSV_MARK!r}.")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    geometry = _csv_geometry(name, comments)
    table = _csv_table(name, text, len(comments))
    values = {c: table[c].to_numpy() for c in _READ}
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
    kinds = {c: pa.float32() if c == "weight" else pa.int32() for c in _READ}
    convert = pyarrow.csv.ConvertOptions(
        column_types=kinds, include_columns=list(_READ), null_values=[]
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
