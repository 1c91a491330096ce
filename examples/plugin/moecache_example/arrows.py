"""A trace format: lines `request> layer 0's ids | layer 1's ids | ...`, a decode step each."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache import TraceFormat
from lm_eval_moecache.trace.formats.base import Options, Rows, numbered
from lm_eval_moecache.trace.trace import Trace


def sniff(head: bytes) -> bool:
    return head.split(b">", 1)[0].strip().isdigit() and b"|" in head.split(b"\n", 1)[0]


def read(path: Path, options: Options) -> Trace:
    rows = Rows(path)
    for number, line in numbered(path):
        request, _, layers = line.partition(">")
        for layer, part in enumerate(layers.split("|")):
            ids = [int(word) for word in part.split()]
            rows.add(ids, layer=layer, step=number, request=int(request))
    # Checks the ids, counts layers and experts, and takes the sizes from the options.
    return rows.trace(options)


ARROWS = TraceFormat(
    about="Lines as `0> 3 1 | 2 0`: the request, then each layer's experts, heaviest first.",
    suffixes=(".arrows",),
    holds="nothing more: every line is a decode step",
    sniff=sniff,
    read=read,
)
