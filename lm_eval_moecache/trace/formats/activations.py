"""`layer,expert` CSV of llama.cpp's moe-trace: a row for each expert that ran, in its order."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.files import read_text
from lm_eval_moecache.trace.formats.base import Options, Pass, TraceFormat, build
from lm_eval_moecache.trace.trace import Trace

_HEADER = "layer,expert"


class Activations(TraceFormat):
    """Rows of one layer in a row are one batch: as many tokens as it holds top-k's.

    The top-k is `top_k`, or else the least batch: one decoded token. Batches of more tokens are
    prefill; the header line again begins another request, as in files that were joined.
    """

    suffixes = (".csv",)
    holds = "phases by the size of a batch"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return head.split(b"\n", 1)[0].strip().replace(b" ", b"") == _HEADER.encode()

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name, texts = path.name, _texts(path)
        sizes = [len(ids) for text in texts for _, ids in text]
        if not sizes:
            raise ValueError(f"trace {name} holds no rows.")
        top_k = options.top_k or min(sizes)
        if math.gcd(*sizes, top_k) != top_k:
            raise ValueError(
                f"trace {name}: batches of {min(sizes)} to {max(sizes)} rows are not all multiples "
                f"of the top-k {top_k}. Give it: `moecache trace convert IN OUT --top_k 8`."
            )
        layers = sorted({layer for text in texts for layer, _ in text})
        passes: list[Pass] = []
        for request, text in enumerate(texts):
            done = 0
            for begin in range(0, len(text), len(layers)):
                batch = text[begin : begin + len(layers)]
                if [layer for layer, _ in batch] != layers:
                    raise ValueError(
                        f"trace {name}: request {request}: the batch from layer {batch[0][0]} on "
                        f"does not run the layers {layers[0]} to {layers[-1]} in order."
                    )
                experts = [np.reshape(ids, (-1, top_k)) for _, ids in batch]
                passes.append(
                    Pass(
                        experts=experts,
                        request=request,
                        phase=PREFILL if len(experts[0]) > 1 else DECODE,
                        first_token=done,
                    )
                )
                done += len(experts[0])
        return build(name, path.stem, passes, options)


def _texts(path: Path) -> list[list[tuple[int, list[int]]]]:
    """Return for each request its batches: the layer, and the ids in order."""
    texts: list[list[tuple[int, int]]] = []
    for number, line in enumerate(read_text(path, f"trace {path.name}").splitlines(), start=1):
        plain = line.replace(" ", "")
        if plain == _HEADER:
            texts.append([])
        elif plain:
            layer, _, expert = plain.partition(",")
            if not (layer.isascii() and layer.isdigit() and expert.isascii() and expert.isdigit()):
                raise ValueError(f"trace {path.name}: line {number} is not `layer,expert`.")
            texts[-1].append((int(layer), int(expert)))
    return [
        [(layer, [e for _, e in rows]) for layer, rows in groupby(text, lambda row: row[0])]
        for text in texts
        if text
    ]
