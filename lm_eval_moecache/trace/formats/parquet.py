"""This package's own: Parquet with all that a run can tell, and the stream of an unfinished one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lm_eval_moecache.trace.convert import save_trace
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.formats.base import Options, TraceFormat
from lm_eval_moecache.trace.trace import Trace


class Parquet(TraceFormat):
    """This package's own, of `trace=DIR`: Parquet with all that a run can tell, or its stream."""

    name = "parquet"
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
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            os.replace(save_trace(trace, Path(scratch), "trace"), path)
