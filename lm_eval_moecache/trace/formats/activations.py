"""llama.cpp's moe-trace CSV."""

from __future__ import annotations

import math
import re
from itertools import groupby
from pathlib import Path

from lm_eval_moecache.trace.formats.base import (
    Layers,
    Options,
    TraceFormat,
    build,
    in_turn,
    numbered,
    told_apart,
)
from lm_eval_moecache.trace.trace import Trace


class Activations(TraceFormat):
    """`layer,expert` CSV of llama.cpp's moe-trace: a row for each expert that ran, in its order.

    Consecutive rows of one layer are one batch of (rows / top-k) tokens. The top-k is `top_k`, or
    else the smallest batch: one decoded token. Batches of several tokens are prefill. In
    concatenated files a header line begins another request, or where there are none, as the tool
    writes them, a prefill after a decode step.
    """

    suffixes = (".csv",)
    holds = "phases by the size of a batch"
    HEADER = "layer,expert"

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        first = head.split(b"\n", 1)[0].strip().replace(b" ", b"")
        return first == cls.HEADER.encode() or re.fullmatch(rb"[0-9]+,[0-9]+", first) is not None

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        texts: list[list[tuple[int, int]]] = []
        for number, line in numbered(path):
            plain = line.replace(" ", "")
            if plain == cls.HEADER:
                texts.append([])
                continue
            if not texts:
                texts.append([])
            layer, _, expert = plain.partition(",")
            if not (plain.isascii() and layer.isdigit() and expert.isdigit()):
                raise ValueError(f"{what}: line {number} is not `layer,expert`.")
            texts[-1].append((int(layer), int(expert)))
        batches = [
            [(layer, [e for _, e in rows]) for layer, rows in groupby(text, lambda row: row[0])]
            for text in texts
            if text
        ]
        sizes = [len(ids) for text in batches for _, ids in text]
        if not sizes:
            raise ValueError(f"{what} has no rows.")
        top_k = options.top_k or min(sizes)
        if math.gcd(*sizes, top_k) != top_k:
            raise ValueError(
                f"{what}: batches of {min(sizes)} to {max(sizes)} rows are not all multiples of "
                f"the top-k {top_k}. Give it: `moecache trace convert IN OUT --top_k 8`."
            )
        layers = sorted({layer for text in batches for layer, _ in text})
        steps: list[tuple[int, Layers]] = []
        for number, text in enumerate(batches):
            passes: list[Layers] = []
            for begin in range(0, len(text), len(layers)):
                step = text[begin : begin + len(layers)]
                if [layer for layer, _ in step] != layers:
                    raise ValueError(
                        f"{what}: request {number}: the batch from layer {step[0][0]} on does "
                        f"not run the layers {layers[0]} to {layers[-1]} in order."
                    )
                rows = {
                    layer: [(ids[n : n + top_k], None) for n in range(0, len(ids), top_k)]
                    for layer, ids in step
                }
                passes.append(rows)
            steps += told_apart(passes, steps[-1][0] + 1 if steps else 0)
        return build(path.name, path.stem, in_turn(steps), options)
