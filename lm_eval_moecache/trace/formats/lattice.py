"""lattice's JSON lines `{layer_idx, token_idx, selected_ids, gate_weights}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_moecache.trace.formats.base import (
    Options,
    Pass,
    TraceFormat,
    build,
    first_object,
    json_lines,
)
from lm_eval_moecache.trace.trace import Trace

_KEYS = {"layer_idx", "token_idx", "selected_ids"}


class Lattice(TraceFormat):
    """Every token is a decode step: the format says no phases. A token seen again begins a text."""

    suffixes = (".jsonl",)
    holds = "gate weights of the chosen; no phases"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return first_object(head).keys() >= _KEYS

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name = path.name
        seen: dict[tuple[int, int], int] = {}
        steps: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        for number, record in json_lines(path, f"trace {name}"):
            match record:
                case {
                    "layer_idx": int(layer),
                    "token_idx": int(token),
                    "selected_ids": [_, *_],
                }:
                    pass
                case _:
                    raise ValueError(
                        f"trace {name}: line {number} must hold {', '.join(sorted(_KEYS))}."
                    )
            text = seen.get((layer, token), 0)
            seen[layer, token] = text + 1
            steps.setdefault((text, token), {})[layer] = record
        passes = []
        for (text, token), layers in sorted(steps.items()):
            own = [layers[layer] for layer in sorted(layers)]
            has_weights = all(r.get("gate_weights") for r in own)
            passes.append(
                Pass(
                    experts=[[r["selected_ids"]] for r in own],
                    weights=[[r["gate_weights"]] for r in own] if has_weights else None,
                    request=text,
                    first_token=token,
                )
            )
        return build(name, path.stem, passes, options)
