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
from lm_eval_moecache.records.files import lines_of, read_text, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.formats.base import Options, TraceFormat, one_request
from lm_eval_moecache.trace.trace import Columns, Refuse, Trace, build_trace

MARK = "# route_trace v1"
OF_TOKEN = ("turn", "phase", "step", "layer")
READ = (*OF_TOKEN, "slot", "expert", "weight")
WRITTEN = (*READ, "residency", "expert_bytes")
# The traced files are 4-bit GGUFs: 4.5 bits a weight with the scales of a block, as in Q4_K.
ELEMENT_BYTES = 4.5 / 8
CODES = np.asarray([PHASES.index(PREFILL), PHASES.index(DECODE)], dtype=np.int32)
"""Our phase indices of the format's phases 0 and 1."""


class RouteTrace(TraceFormat):
    """BigMoeOnEdge's `route_trace v1` CSV: a line per (token, layer, slot), sizes in its comments.

    A turn's prefill is one pass, each decode step another. The recorded run's residency (columns
    `residency`, `expert_bytes`) is not read; a written file lists every expert as a miss with its
    layer's expert size.
    """

    suffixes = (".csv",)
    holds = "weights, phases, turns, sizes of each layer"
    says_sizes = True
    written = True

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return head.startswith(b"# route_trace")

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name, text = path.name, read_text(path, f"trace {path.name}")
        mark = text.split("\n", 1)[0].strip()
        if mark != MARK:
            raise ValueError(f"trace {name}: line 1 is {mark[:40]!r}, must be {MARK!r}.")
        comments = [line for line in lines_of(text) if line.startswith("#")]
        geometry = _geometry(name, comments)
        values = _values(name, text, len(comments))
        top_k, first_line = geometry.top_k, len(comments) + 2

        def where(row: int) -> str:
            return f"line {first_line + row * top_k}"

        refuse = Refuse(name, lambda row: f"line {first_line + row}")
        # Each (token, layer) is a group of top_k lines that differ only in slot, expert and weight.
        slots = values["slot"]
        firsts = np.arange(len(slots)) // top_k * top_k
        bad = slots != np.arange(len(slots)) % top_k
        for column in OF_TOKEN:
            bad |= values[column] != values[column][firsts]
        # The last group's end is missing where the last line does not close it.
        bad = np.append(bad, len(slots) % top_k > 0)
        refuse(bad, "slot", f"does not count 0..{top_k - 1} for each token")
        turns, decodes, steps, layers = (values[column][::top_k] for column in OF_TOKEN)
        bad = ~np.isin(values["phase"], (0, 1))
        refuse(bad, "phase", lambda row: f"is {values['phase'][row]}, must be 0 or 1")
        bad = values["weight"] < 0
        refuse(bad, "weight", lambda row: f"is {values['weight'][row]}, must be 0 or more")
        labels = np.stack([turns, decodes, steps * decodes])
        changes = (np.diff(labels, axis=1) != 0).any(axis=0)
        columns = Columns(
            request=turns,
            pass_index=np.concatenate([[0], np.cumsum(changes)]).astype(np.int32),
            phase=CODES[decodes],
            token=steps,
            layer=layers,
            experts=values["expert"].reshape(-1, top_k),
            weights=values["weight"].reshape(-1, top_k),
        )
        return build_trace(name, geometry, columns, where=where)

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        what, columns, geometry = f"out={str(path)!r}", trace.columns, trace.geometry
        one_request(trace, what)
        if columns.weights is None:
            raise ValueError(f"{what}: this format has weights, and trace {trace.name} has none.")
        if not np.isin(columns.phase, CODES).all():
            raise ValueError(f"{what}: this format has no passes that verify drafts.")
        sizes = [levels[0] for levels in geometry.expert_bytes]
        lines = [
            MARK,
            f"# model={geometry.model or trace.name} arch=unknown n_layer={geometry.num_layers} "
            f"n_expert={geometry.num_experts} n_expert_used={geometry.top_k}",
        ]
        for layer, (size, dense) in enumerate(zip(sizes, geometry.dense_bytes, strict=True)):
            lines.append(f"# layer={layer} expert_bytes={size} dense_bytes={dense}")
        lines.append(",".join(WRITTEN))
        decodes = (columns.phase == CODES[1]).astype(int)
        heads = np.stack([columns.request, decodes, columns.token, columns.layer], axis=-1)
        for head, ids, weights in zip(
            heads.tolist(), columns.experts.tolist(), columns.weights.tolist(), strict=True
        ):
            prefix, size = ",".join(map(str, head)), sizes[head[-1]]
            for slot, (expert, weight) in enumerate(zip(ids, weights, strict=True)):
                lines.append(f"{prefix},{slot},{expert},{weight!r},0,{size}")
        write_whole(path, "\n".join(lines) + "\n")


def _geometry(name: str, comments: list[str]) -> Geometry:
    parsed = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in comments[1:]]
    fields = parsed[0] if parsed else {}
    try:
        sizes = {int(layer["layer"]): layer for layer in parsed[1:]}
        num_layers = int(fields["n_layer"])
        return Geometry(
            model=Path(fields["model"]).stem,
            num_layers=num_layers,
            num_experts=int(fields["n_expert"]),
            top_k=int(fields["n_expert_used"]),
            expert_bytes=tuple((int(sizes[i]["expert_bytes"]),) for i in range(num_layers)),
            dense_bytes=tuple(int(sizes[i]["dense_bytes"]) for i in range(num_layers)),
            precision=("4bit",),
            element_bytes=ELEMENT_BYTES,
        )
    except KeyError as error:
        raise ValueError(f"trace {name}: its comments lack {error.args[0]!r}.") from None
    except ValueError as error:
        raise ValueError(f"trace {name}: its comments: {error}") from None


def _values(name: str, text: str, skip: int) -> dict[str, Any]:
    kinds = {c: pa.float32() if c == "weight" else pa.int32() for c in READ}
    try:
        table = pa.csv.read_csv(
            io.BytesIO(text.encode()),
            read_options=pa.csv.ReadOptions(skip_rows=skip, use_threads=False),
            convert_options=pa.csv.ConvertOptions(
                column_types=kinds, include_columns=list(READ), null_values=[]
            ),
        )
    except (pa.ArrowException, KeyError) as error:
        # pyarrow counts rows behind the column names, from 1 for the names themselves.
        reason = str(error).replace("Row #", f"{skip} comment lines, then row #")
        raise ValueError(f"trace {name}: {reason}") from error
    if not table.num_rows:
        raise ValueError(f"trace {name} has no rows.")
    return {c: table[c].to_numpy() for c in READ}
