"""Megatron's RouterTracer JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_moecache.trace.formats.base import JsonLines, Layers, Options, build, in_turn, objects
from lm_eval_moecache.trace.trace import Trace


class Megatron(JsonLines):
    """Megatron's RouterTracer: JSON lines of one record per (step, layer, rank).

    A step of several tokens is a prefill, a step of one token a decode step. The format does not
    assign tokens to requests, so all tokens of a step count as one text; ids are in ascending
    order. Records of multi-token prediction (`block: mtp`) are skipped.
    """

    holds = "phases by the tokens of a step; no weights"
    fields = frozenset({"step", "layer", "top_indices"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        steps: dict[tuple[int, int], dict[int, Any]] = {}
        for number, record in objects(path, "step", "layer", "rank"):
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
        request, last_rank = -1, None
        for (rank, _), layers in sorted(steps.items()):
            request += len(layers[min(layers)]) > 1 or rank != last_rank
            last_rank = rank
            texts.append((request, layers))
        return build(path.name, path.stem, in_turn(texts), options)
