"""Writes a trace of any format as one of ours: smaller, and with the sizes it is to be timed by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.writer import TraceWriter, prepare_folder


def save_trace(trace: Trace, folder: Path, stem: str) -> Path:
    """Write a trace's rows as Parquet; return the file.

    Logits and predictions are left out. ValueError where the trace says no sizes.
    """
    if not trace.has_sizes:
        raise ValueError(f"trace {trace.name} says no sizes: give those of a model.")
    geometry = trace.geometry
    prepare_folder(str(folder))
    writer = TraceWriter(folder, stem, Header(geometry=geometry, seed=trace.seed, has_logits=False))
    columns, num_layers = trace.columns, geometry.num_layers
    for event, (first, last) in enumerate(
        zip(trace.row_bounds[:-1].tolist(), trace.row_bounds[1:].tolist(), strict=True)
    ):
        pass_index, layer = divmod(event, num_layers)
        rows = slice(first, last)
        # For each layer anew: engines route the last token alone through the last layer's prefill.
        phase = PHASES[int(columns.phase[first])]
        owners, tokens = columns.request[rows], columns.token[rows]
        writer.begin_pass(pass_index, phase, owners.astype(np.int64), tokens.astype(np.int64))
        weights = None if columns.weights is None else columns.weights[rows]
        writer.add(layer, np.asarray(columns.experts[rows]), weights, None, [])
    path = writer.close()
    assert path is not None, "a trace without passes"
    return path


def with_sizes(trace: Trace, model: RealModel) -> Trace:
    """Return a trace whose layers are charged as a model's."""
    geometry = replace(model.emulated_by(trace.geometry), model=model.name, emulates="")
    if not trace.has_sizes and model.num_experts > geometry.num_experts:
        # Such a file does not say the number of experts either: the largest id was taken.
        geometry = replace(geometry, num_experts=model.num_experts)
        keys = trace.keys % trace.geometry.num_experts
        layers = trace.keys // trace.geometry.num_experts
        trace = replace(trace, keys=(layers * model.num_experts + keys).astype(np.int32))
    return replace(trace, geometry=geometry, has_sizes=True)
