"""Recordings of generated requests that are left, interrupted or killed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.recorder import TraceWriter
from tests.engine import traces


def start(folder: Path) -> TraceWriter:
    return TraceWriter(folder, "run", Header(geometry=traces.GEOMETRY, seed=0, predicted_depth=1))


def requests(writer: TraceWriter, count: int = 3, num_passes: int = 6) -> Iterator[int]:
    """Record requests; yield the number of each when its last pass is recorded."""
    for event, request in traces.events(0, num_requests=count, num_decodes=num_passes - 1):
        if event.layer == 0:
            place = event.pass_index % num_passes
            begin = 4 + place if place else 0
            tokens = np.arange(begin, begin + event.num_tokens)
            owners = np.full(event.num_tokens, request)
            writer.begin_pass(event.pass_index, event.phase, owners, tokens)
        predicted = list(event.predicted.values())
        writer.add(event.layer, event.experts, event.weights, event.logits, predicted)
        is_last = event.layer == traces.GEOMETRY.num_layers - 1
        if is_last and event.pass_index % num_passes == num_passes - 1:
            yield request


def half_a_recording(folder: Path, *, keep_until: int) -> TraceWriter:
    """Record requests and keep those before `keep_until`; the others are unfinished."""
    writer = start(folder)
    for number in requests(writer):
        if number < keep_until:
            writer.keep()
    return writer
