"""Reads traces that are lines of JSON, of CSV, or of words."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.files import lines_of, read_text
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.formats.base import (
    DECODES,
    MOST_EXPERT,
    READS,
    Options,
    Rows,
    check_counts,
    numbered,
    objects,
    whole,
)
from lm_eval_moecache.trace.trace import Refuse, Trace

_GATE = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
CALL = re.compile(rf"([0-9]{{1,9}})\s+([0-9]{{1,9}})\s+([0-9]{{1,9}})((?:\s+[0-9]+:{_GATE})+)\s*")
"""A line of colibri's `ROUTE_TRACE`."""
CACHE_LAB = "moe-cache-lab.routing-jsonl"
CACHE_LAB_PHASES = {"prompt": READS, "generated": DECODES}
ACTIVATIONS = "layer,expert"
_ACTIVATION = re.compile(r"([0-9]{1,9}),([0-9]{1,9})")
ROUTE_TRACE = "# route_trace v1"
ROUTE_TRACE_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
ROUTE_TRACE_PHASES = (READS, DECODES)
"""Our phases of the format's phases 0 and 1."""
# The traced files are 4-bit GGUFs: 4.5 bits a weight with the scales of a block, as in Q4_K.
_ELEMENT_BYTES = 4.5 / 8


def read_token_jsonl(path: Path, options: Options) -> Trace:
    """Read `{"tok": n, "layers": [[ids] ...]}` lines (warp, moe-stream): a decode step each."""
    rows = Rows(path)
    for number, record in objects(path, "tok"):
        layers = record.get("layers")
        if not isinstance(layers, list) or record.keys() != {"tok", "layers"}:
            raise ValueError(
                f"{rows.what}: line {number} must hold a number `tok` and a list of lists `layers`."
            )
        for layer, ids in enumerate(layers):
            rows.add(ids, layer=layer, step=number, token=record["tok"])
    return rows.trace(options)


def read_lattice(path: Path, options: Options) -> Trace:
    """Read lattice's lines, of one token at one layer each.

    Every token is a decode step. A repeated token of a layer begins another text.
    """
    rows, seen = Rows(path), Counter[tuple[int, int]]()
    for _, record in objects(path, "layer_idx", "token_idx"):
        layer, token = record["layer_idx"], record["token_idx"]
        text = seen[layer, token]
        seen[layer, token] += 1
        rows.add(
            record.get("selected_ids"),
            layer=layer,
            step=(text << 31) + token,
            request=text,
            token=token,
            weights=record.get("gate_weights"),
        )
    return rows.trace(options)


def read_megatron(path: Path, options: Options) -> Trace:
    """Read RouterTracer's lines, of one step, layer and rank each.

    A step of several tokens is a prefill, a step of one token a decode step. The format does not
    assign tokens to requests, so all tokens of a step count as one text; ids are in ascending
    order. Records of multi-token prediction (`block: mtp`) are skipped.
    """
    rows, steps = Rows(path), dict[tuple[int, int], dict[int, tuple[int, list[Any]]]]()
    for number, record in objects(path, "step", "layer"):
        if record.get("block") == "mtp":
            continue
        rank = whole(f"{rows.what}: line {number}", record.get("rank"), "rank") or 0
        layers = steps.setdefault((rank, record["step"]), {})
        if record["layer"] in layers:
            raise ValueError(
                f"{rows.what}: line {number}: layer {record['layer']} of the step again."
            )
        ids = record.get("top_indices")
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{rows.what}: line {number} must hold step, layer and top_indices.")
        layers[record["layer"]] = number, ids
    request, last_rank = -1, None
    for step, ((rank, _), layers) in enumerate(sorted(steps.items())):
        request += len(layers[min(layers)][1]) > 1 or rank != last_rank
        last_rank = rank
        for layer, (number, ids) in layers.items():
            for of_token in ids:
                rows.add(of_token, layer=layer, step=step, request=request, line=number)
    return rows.trace(options)


def read_cache_lab(path: Path, options: Options) -> Trace:
    """Read moe-cache-lab's routing JSONL, version 1: one text, its prompt and what was generated.

    Selections are in execution order: the prompt layer by layer, then token by token.
    """
    rows, lines = Rows(path), objects(path)
    _, about = next(lines)
    if about.get("format_version") != 1:
        raise ValueError(
            f"{rows.what}: format_version={about.get('format_version')!r} of {CACHE_LAB} is not "
            "read. Allowed: 1."
        )
    for number, record in lines:
        phase = CACHE_LAB_PHASES.get(str(record.get("phase")))
        if record.get("record_type") != "routing_selection" or phase is None:
            raise ValueError(f"{rows.what}: line {number} is not a routing selection.")
        check_counts(f"{rows.what}: line {number}", record, "token_position", "layer")
        token = record["token_position"]
        rows.add(
            record.get("selected_experts"),
            layer=record["layer"],
            step=-1 if phase == READS else token,
            token=token,
            phase=phase,
            weights=record.get("selected_probabilities"),
        )
    count = whole(rows.what, about.get("num_experts"), "num_experts", least=1, most=MOST_EXPERT + 1)
    return rows.trace(options, model=str(about.get("model_id")), num_experts=count)


def read_colibri(path: Path, options: Options) -> Trace:
    """Read colibri's `ROUTE_TRACE`: lines `call row layer id:gate id:gate ...`.

    A call of several rows is a prefill; after a decode step it begins a new request.
    """
    rows, step, last, count = Rows(path), 0, (-1, -1), 0
    for number, line in numbered(path):
        if line.startswith("#"):
            continue
        match = CALL.fullmatch(line)
        if match is None:
            raise ValueError(f"{rows.what}: line {number} is not `call row layer id:gate ...`.")
        call, row, layer = (int(match[n]) for n in (1, 2, 3))
        if (call, layer) != last:
            # Layers ascend within a pass: a lower or equal one begins the next.
            step, last, count = step + (layer <= last[1]), (call, layer), 0
        if row != count:
            raise ValueError(f"{rows.what}: line {number}: row is {row}, not {count}.")
        count += 1
        pairs = [pair.split(":") for pair in match[4].split()]
        weights = [float(gate) for _, gate in pairs]
        rows.add([int(e) for e, _ in pairs], layer=layer, step=step, weights=weights)
    return rows.trace(options, tells_requests=True)


def read_activations(path: Path, options: Options) -> Trace:
    """Read `layer,expert` CSV of llama.cpp's moe-trace: a row for each expert that ran, in order.

    Consecutive rows of one layer are one batch of (rows / top-k) tokens. The top-k is `top_k`, or
    else the smallest of batches that differ in size: one decoded token. Batches of several tokens
    are prefill. In concatenated files a header line begins another request, or where there are
    none, as the tool writes them, a prefill after a decode step.
    """
    rows, text = Rows(path), 0
    batches: list[tuple[int, int, int, list[int]]] = []
    for number, line in numbered(path):
        plain = line.replace(" ", "")
        if plain == ACTIVATIONS:
            text += 1
            continue
        match = _ACTIVATION.fullmatch(plain)
        if match is None:
            raise ValueError(f"{rows.what}: line {number} is not `layer,expert`.")
        layer, expert = int(match[1]), int(match[2])
        if not batches or batches[-1][:2] != (text, layer):
            batches.append((text, layer, number, []))
        batches[-1][-1].append(expert)
    top_k = options.top_k or _smallest(rows.what, [len(ids) for *_, ids in batches])
    step, last = 0, (0, -1)
    for text, layer, number, ids in batches:
        step += text != last[0] or layer <= last[1]
        last = text, layer
        for place in range(0, len(ids), top_k):
            chosen = ids[place : place + top_k]
            rows.add(chosen, layer=layer, step=step, request=text, line=number + place)
    return rows.trace(options, tells_requests=True)


def _smallest(what: str, sizes: Sequence[int]) -> int:
    """Return the rows of the smallest batch: the top-k, if a larger batch holds several tokens."""
    least = min(sizes, default=0)
    if sizes and least == max(sizes):
        raise ValueError(
            f"{what}: all batches have {least} rows, so that nothing tells how many tokens they "
            "hold. Give the top-k: `moecache trace convert IN OUT --top_k 8`."
        )
    if sizes and math.gcd(*sizes) != least:
        raise ValueError(
            f"{what}: batches of {least} to {max(sizes)} rows are not all multiples of the top-k "
            f"{least}. Give it: `moecache trace convert IN OUT --top_k 8`."
        )
    return least or 1


def read_route_trace(path: Path, options: Options) -> Trace:
    """Read BigMoeOnEdge's `route_trace v1` CSV: a line per (token, layer, slot).

    A turn's prefill is one pass, each decode step another. Sizes stand in its comments. The
    recorded run's residency (columns `residency`, `expert_bytes`) is not read.
    """
    rows = Rows(path)
    text = read_text(path, rows.what)
    comments = [*takewhile(lambda line: line.startswith("#"), lines_of(text))]
    mark = (comments or [""])[0].strip()
    if mark != ROUTE_TRACE:
        raise ValueError(f"{rows.what}: line 1 is {mark[:40]!r}, must be {ROUTE_TRACE!r}.")
    geometry = _route_geometry(rows.what, comments[1:])
    values, top_k = _route_values(rows.what, text, len(comments)), geometry.top_k
    first = len(comments) + 2
    refuse = Refuse(path.name, lambda row: f"line {first + row}")
    # Each (token, layer) is a group of top_k lines that differ only in slot, expert and weight.
    slots = values["slot"]
    firsts = np.arange(len(slots)) // top_k * top_k
    bad = slots != np.arange(len(slots)) % top_k
    for column in ("turn", "phase", "step", "layer"):
        bad |= values[column] != values[column][firsts]
    # The last group's end is missing where the last line does not close it.
    bad = np.append(bad, len(slots) % top_k > 0)
    refuse(bad, "slot", f"does not count 0..{top_k - 1} for each token")
    bad = ~np.isin(values["phase"], (0, 1))
    refuse(bad, "phase", lambda row: f"is {values['phase'][row]}, must be 0 or 1")
    turn, decodes, token, layer = (values[name][::top_k] for name in ROUTE_TRACE_COLUMNS[:4])
    labels = np.stack([turn, decodes, token * decodes])
    changes = (np.diff(labels, axis=1) != 0).any(axis=0)
    rows.add_arrays(
        values["expert"].reshape(-1, top_k),
        values["weight"].reshape(-1, top_k),
        layer=layer,
        step=np.append(0, np.cumsum(changes)),
        request=turn,
        token=token,
        phase=np.asarray(ROUTE_TRACE_PHASES)[decodes],
        line=first + np.arange(len(turn)) * top_k,
    )
    return rows.trace(options, geometry=geometry)


def _route_geometry(what: str, comments: Sequence[str]) -> Geometry:
    parsed = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in comments]
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
            element_bytes=_ELEMENT_BYTES,
        )
    except KeyError as error:
        raise ValueError(f"{what}: its comments lack {error.args[0]!r}.") from None
    except ValueError as error:
        raise ValueError(f"{what}: its comments: {error}") from None


def _route_values(what: str, text: str, skip: int) -> dict[str, Any]:
    """Return the columns [rows] of the table behind the comments."""
    # Imported late: pyarrow is slow to import, and most runs read no trace.
    import pyarrow as pa
    import pyarrow.csv

    kinds = {c: pa.float32() if c == "weight" else pa.int32() for c in ROUTE_TRACE_COLUMNS}
    try:
        table = pa.csv.read_csv(
            io.BytesIO(text.encode()),
            read_options=pa.csv.ReadOptions(skip_rows=skip, use_threads=False),
            convert_options=pa.csv.ConvertOptions(
                column_types=kinds, include_columns=list(kinds), null_values=[]
            ),
        )
    except (pa.ArrowException, KeyError) as error:
        # pyarrow counts rows behind the column names, from 1 for the names themselves.
        reason = str(error).replace("Row #", f"{skip} comment lines, then row #")
        raise ValueError(f"{what}: {reason}") from error
    if not table.num_rows:
        raise ValueError(f"{what} has no rows.")
    return {name: table[name].to_numpy() for name in kinds}
