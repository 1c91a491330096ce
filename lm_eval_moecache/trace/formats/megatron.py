"""Megatron's RouterTracer JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_moecache.trace.formats.base import JsonLines, Layers, Options, build, in_turn, objects
from lm_eval_moecache.trace.trace import Trace


class Megatron(JsonLines):
    """Megatron's RouterTracer: JSON lines of one record per (step, layer, rank).

    A step of several tokens reads a text (prefill); steps of one token decode it. The format does
    not say whose tokens a step has, so a step's tokens count as one text's; ids stand in ascending
    order. Records of multi-token prediction (`block: mtp`) are left out.
    """

    holds = "phases by the tokens of a step; no weights"
    fields = frozenset({"step", "layer", "top_indices"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        steps: dict[tuple[int, int], dict[int, Any]] = {}
        for number, record in objects(path):
            if record.get("block") == "mtp":
                continue
            match record:
                case {"step": int(step), "layer": int(layer), "top_indices": [_, *_] as ids}:
                    layers = steps.setdefault((int(record.get("rank", 0)), step), {})
                case _:
                    raise ValueError(
                        f"{what}: line {number} must hold step, layer and top_indices."
                    )
            if layer in layers:
                raise ValueError(f"{what}: line {number}: layer {layer} of the step again.")
            layers[layer] = [(of_token, None) for of_token in ids]
        texts: list[tuple[int, Layers]] = []
        request, before = -1, None
        for (rank, _), layers in sorted(steps.items()):
            request += len(layers[min(layers)]) > 1 or rank != before
            before = rank
            texts.append((request, layers))
        return build(path.name, path.stem, in_turn(texts), options)
