"""This package's own format: Parquet with all that a run records, or an unfinished run's stream."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.records.files import check_replaceable, replace
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.formats.base import Options, TraceFormat
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.recorder import TraceWriter
from lm_eval_moecache.trace.trace import Trace


class Parquet(TraceFormat):
    """This package's own, of `trace=DIR`: Parquet with all that a run records, or its stream."""

    suffixes = (".parquet", ".partial")
    holds = "weights, phases, requests, sizes; logits, predictions, drafts where recorded"
    says_sizes = True
    written = True

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return head.startswith((b"PAR1", b"\xff\xff\xff\xff"))

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        return read_trace(path, logits=options.logits, predicted=options.predicted)

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        """Write a trace without its logits and predictions. ValueError if it has no sizes."""
        if not trace.has_sizes:
            raise ValueError(f"trace {trace.name} says no sizes: give those of a model.")
        check_replaceable(path)
        header = Header(geometry=trace.geometry, seed=trace.seed, has_logits=False)
        columns, num_layers = trace.columns, trace.geometry.num_layers
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            writer = TraceWriter(Path(scratch), "trace", header)
            for event, (first, last) in enumerate(pairwise(trace.row_bounds.tolist())):
                pass_index, layer = divmod(event, num_layers)
                rows = slice(first, last)
                phase = PHASES[int(columns.phase[first])]
                owners, tokens = columns.request[rows], columns.token[rows]
                # Again for each layer: some engines route only the last token through the last.
                writer.begin_pass(
                    pass_index, phase, owners.astype(np.int64), tokens.astype(np.int64)
                )
                weights = None if columns.weights is None else columns.weights[rows]
                writer.add(layer, columns.experts[rows].astype(np.int64), weights, None, [])
            written = writer.close()
            assert written is not None, "a trace without passes"
            replace(written, path)
