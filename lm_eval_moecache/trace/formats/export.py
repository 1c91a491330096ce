"""Writes traces in the formats that other simulators read, and as Parquet."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.files import check_replaceable, write_whole
from lm_eval_moecache.trace.formats.lines import (
    CACHE_LAB,
    CACHE_LAB_PHASES,
    ROUTE_TRACE,
    ROUTE_TRACE_COLUMNS,
    ROUTE_TRACE_PHASES,
)
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.trace import Trace


def write_route_trace(trace: Trace, path: Path) -> None:
    """Write `route_trace v1`: every expert is a miss of its layer's size.

    ValueError for a trace without weights, with drafts, or with passes of several requests at once.
    """
    what, columns, geometry = f"out={str(path)!r}", trace.columns, trace.geometry
    _check_one_request(trace, what)
    if columns.weights is None:
        raise ValueError(f"{what}: this format has weights, and trace {trace.name} has none.")
    if not np.isin(columns.phase, ROUTE_TRACE_PHASES).all():
        raise ValueError(f"{what}: this format has no passes that verify drafts.")
    sizes = [levels[0] for levels in geometry.expert_bytes]
    lines = [
        ROUTE_TRACE,
        f"# model={geometry.model or trace.name} arch=unknown n_layer={geometry.num_layers} "
        f"n_expert={geometry.num_experts} n_expert_used={geometry.top_k}",
    ]
    for layer, (size, dense) in enumerate(zip(sizes, geometry.dense_bytes, strict=True)):
        lines.append(f"# layer={layer} expert_bytes={size} dense_bytes={dense}")
    lines.append(",".join((*ROUTE_TRACE_COLUMNS, "residency", "expert_bytes")))
    decodes = (columns.phase == ROUTE_TRACE_PHASES[1]).astype(int)
    heads = np.stack([columns.request, decodes, columns.token, columns.layer], axis=-1)
    for head, ids, weights in zip(
        heads.tolist(), columns.experts.tolist(), columns.weights.tolist(), strict=True
    ):
        prefix, size = ",".join(map(str, head)), sizes[head[-1]]
        for slot, (expert, weight) in enumerate(zip(ids, weights, strict=True)):
            lines.append(f"{prefix},{slot},{expert},{weight!r},0,{size}")
    write_whole(path, "\n".join(lines) + "\n")


def write_cache_lab(trace: Trace, path: Path) -> None:
    """Write moe-cache-lab's JSON lines.

    ValueError for a trace of several requests, with drafts, or whose weights are no probabilities.
    """
    what, columns = f"out={str(path)!r}", trace.columns
    _check_one_request(trace, what)
    if len({*columns.request.tolist()}) > 1:
        raise ValueError(
            f"{what}: this format holds one request, and trace {trace.name} has "
            f"{len(trace.requests)}. Allowed: --request NUMBER."
        )
    names = {phase: name for name, phase in CACHE_LAB_PHASES.items()}
    if not set(columns.phase.tolist()) <= set(names):
        raise ValueError(f"{what}: this format has no passes that verify drafts.")
    weights = None if columns.weights is None else columns.weights.tolist()
    if weights is not None and any(not 0 <= w <= 1 for row in weights for w in row):
        raise ValueError(f"{what}: weights outside of 0..1 are not probabilities.")
    metadata = {
        "record_type": "metadata",
        "format": CACHE_LAB,
        "format_version": 1,
        "model_id": trace.geometry.model or trace.name,
        "num_experts": trace.geometry.num_experts,
        "experts_per_token": trace.geometry.top_k,
        "capture_method": f"lm-eval-moecache, from {trace.name}",
    }
    selections = (
        {
            "record_type": "routing_selection",
            "phase": names[int(columns.phase[row])],
            "token_position": int(columns.token[row]),
            "layer": int(columns.layer[row]),
            "selected_experts": experts,
            "selected_probabilities": [] if weights is None else weights[row],
        }
        for row, experts in enumerate(columns.experts.tolist())
    )
    lines = (
        json.dumps(line, sort_keys=True, separators=(",", ":")) for line in (metadata, *selections)
    )
    write_whole(path, "\n".join(lines) + "\n")


def _check_one_request(trace: Trace, what: str) -> None:
    """Raise ValueError for passes that batch several requests."""
    owners = trace.columns.request
    firsts = owners[trace.row_bounds[:-1][:: trace.geometry.num_layers]]
    if (firsts[trace.columns.pass_index] != owners).any():
        raise ValueError(
            f"{what}: passes of several requests at once cannot be written so. Allowed: one "
            "request, as --request 0."
        )


def write_parquet(trace: Trace, path: Path) -> None:
    """Write a trace without its logits and predictions. ValueError if it has no sizes."""
    # Imported late: pyarrow is slow to import, and most runs write no trace.
    from lm_eval_moecache.trace import file

    if not trace.has_sizes:
        raise ValueError(f"trace {trace.name} says no sizes: give those of a model.")
    check_replaceable(path)
    header = Header(geometry=trace.geometry, seed=trace.seed, has_logits=False)
    columns = {field.name: getattr(trace.columns, field.name) for field in fields(trace.columns)}
    batch = file.batch_of(file.schema_of(header), [{**columns, "pass": columns["pass_index"]}])
    file.write_parquet(path, batch.schema, [batch], len(batch), {})
