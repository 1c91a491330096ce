"""JSON lines of one token and layer each."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.trace.formats.base import (
    JsonLines,
    Options,
    build,
    check_next,
    objects,
    pass_of,
)
from lm_eval_moecache.trace.trace import Trace


class Lattice(JsonLines):
    """lattice's JSON lines `{layer_idx, token_idx, selected_ids, gate_weights}`.

    Every token is a decode step, as the format has no phases. A repeated token index begins another
    text.
    """

    holds = "gate weights of the chosen; no phases"
    fields = frozenset({"layer_idx", "token_idx", "selected_ids"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        occurrences = Counter[tuple[int, int]]()
        steps: dict[tuple[int, int], dict[int, list[tuple[Any, Any]]]] = {}
        for number, record in objects(path, "layer_idx", "token_idx"):
            match record:
                case {"layer_idx": int(layer), "token_idx": int(token), "selected_ids": [_, *_]}:
                    text = occurrences[layer, token]
                    occurrences[layer, token] += 1
                    row = (record["selected_ids"], record.get("gate_weights"))
                    steps.setdefault((text, token), {})[layer] = [row]
                case _:
                    fields = ", ".join(sorted(cls.fields))
                    raise ValueError(f"trace {path.name}: line {number} must hold {fields}.")
        for (text, before), (next_text, token) in pairwise(sorted(steps)):
            if text == next_text:
                check_next(f"trace {path.name}: text {text}: token_idx", token, before)
        passes = [
            pass_of(layers, text, DECODE, token) for (text, token), layers in sorted(steps.items())
        ]
        return build(path.name, path.stem, passes, options)
