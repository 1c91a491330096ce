"""Megatron's RouterTracer: JSON lines of one record per (step, layer, rank)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.trace.formats.base import (
    Options,
    Pass,
    TraceFormat,
    build,
    first_object,
    json_lines,
)
from lm_eval_moecache.trace.trace import Trace


class Megatron(TraceFormat):
    """A step of several tokens reads a text (prefill); steps of one token decode it.

    The format does not say whose tokens a step has, so a step's tokens count as one text's; ids
    stand in ascending order. Records of multi-token prediction (`block: mtp`) are left out.
    """

    suffixes = (".jsonl",)
    holds = "phases by the tokens of a step; no weights"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return {"step", "layer", "top_indices"} <= first_object(head).keys()

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name = path.name
        steps: dict[tuple[int, int], dict[int, Any]] = {}
        for number, record in json_lines(path, f"trace {name}"):
            if record.get("block") == "mtp":
                continue
            match record:
                case {"step": int(step), "layer": int(layer), "top_indices": [_, *_] as ids}:
                    layers = steps.setdefault((int(record.get("rank", 0)), step), {})
                case _:
                    raise ValueError(
                        f"trace {name}: line {number} must hold step, layer and top_indices."
                    )
            if layer in layers:
                raise ValueError(f"trace {name}: line {number}: layer {layer} of the step again.")
            layers[layer] = ids
        passes: list[Pass] = []
        request, done, before = -1, 0, None
        for (rank, _), layers in sorted(steps.items()):
            tokens = len(layers[min(layers)])
            if tokens > 1 or rank != before:
                request, done, before = request + 1, 0, rank
            passes.append(
                Pass(
                    experts=[layers[layer] for layer in sorted(layers)],
                    request=request,
                    phase=PREFILL if tokens > 1 else DECODE,
                    first_token=done,
                )
            )
            done += tokens
        return build(name, path.stem, passes, options)
