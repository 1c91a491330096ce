"""moe-cache-lab's routing JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.trace.formats.base import (
    MOST_EXPERT,
    JsonLines,
    Options,
    Pass,
    build,
    check_next,
    first_object,
    objects,
    one_request,
    pass_of,
    whole,
)
from lm_eval_moecache.trace.trace import Trace


class CacheLab(JsonLines):
    """moe-cache-lab routing JSONL, version 1: one text, its prompt and what was generated.

    Selections are in execution order: the prompt layer by layer, then token by token.
    """

    holds = "probabilities of the chosen as weights, phases"
    written = True
    FORMAT = "moe-cache-lab.routing-jsonl"
    NAMES: ClassVar = {"prompt": PREFILL, "generated": DECODE}

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return first_object(head).get("format") == cls.FORMAT

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what, lines = f"trace {path.name}", objects(path, "token_position", "layer")
        _, metadata = next(lines)
        if metadata.get("format_version") != 1:
            raise ValueError(
                f"{what}: format_version={metadata.get('format_version')!r} of {cls.FORMAT} is not "
                "read. Allowed: 1."
            )
        texts: dict[tuple[str, int], dict[int, list[tuple[int, Any, Any]]]] = {}
        for number, record in lines:
            match record:
                case {
                    "record_type": "routing_selection",
                    "phase": "prompt" | "generated" as phase,
                    "token_position": int(token),
                    "layer": int(layer),
                    "selected_experts": [_, *_] as ids,
                }:
                    layers = texts.setdefault((phase, 0 if phase == "prompt" else token), {})
                    row = (token, ids, record.get("selected_probabilities"))
                    layers.setdefault(layer, []).append(row)
                case _:
                    raise ValueError(f"{what}: line {number} is not a routing selection.")
        passes: list[Pass] = []
        end = -1  # position of the last token so far
        for (phase, _), layers in texts.items():
            first = min(layers)
            begin, served = layers[first][0][0], [token for token, _, _ in layers[first]]
            if served != list(range(begin, begin + len(served))):
                raise ValueError(f"{what}: the prompt's tokens of layer {first} have gaps.")
            if passes:
                check_next(f"{what}: token_position", begin, end)
            end = served[-1]
            for layer in sorted(layers):
                if [token for token, _, _ in layers[layer]] != served[-len(layers[layer]) :]:
                    raise ValueError(f"{what}: layer {layer} serves other tokens.")
            rows = {layer: [row[1:] for row in selections] for layer, selections in layers.items()}
            passes.append(pass_of(rows, 0, cls.NAMES[phase], begin))
        count = metadata.get("num_experts")
        count = whole(what, count, "num_experts", least=1, most=MOST_EXPERT + 1)
        model = str(metadata.get("model_id"))
        return build(path.name, model, passes, options, num_experts=count)

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        what, columns = f"out={str(path)!r}", trace.columns
        one_request(trace, what)
        if len({*columns.request.tolist()}) > 1:
            raise ValueError(
                f"{what}: this format holds one request, and trace {trace.name} has "
                f"{len(trace.requests)}. Allowed: --request NUMBER."
            )
        names = {PHASES.index(phase): name for name, phase in cls.NAMES.items()}
        if not set(columns.phase.tolist()) <= set(names):
            raise ValueError(f"{what}: this format has no passes that verify drafts.")
        metadata = {
            "record_type": "metadata",
            "format": cls.FORMAT,
            "format_version": 1,
            "model_id": trace.geometry.model or trace.name,
            "num_experts": trace.geometry.num_experts,
            "experts_per_token": trace.geometry.top_k,
            "capture_method": f"lm-eval-moecache, from {trace.name}",
        }
        weights = None if columns.weights is None else columns.weights.tolist()
        if weights is not None and any(not 0 <= w <= 1 for row in weights for w in row):
            raise ValueError(f"{what}: weights outside of 0..1 are not probabilities.")
        selections = (
            {
                "record_type": "routing_selection",
                "phase": names[int(columns.phase[row])],
                "token_position": int(columns.token[row]),
                "layer": int(columns.layer[row]),
                "selected_experts": experts,
                "selected_probabilities": [] if weights is None else weights[row],
            }
            for row, experts in enumerate(columns.experts.tolist())
        )
        lines = (
            json.dumps(line, sort_keys=True, separators=(",", ":"))
            for line in (metadata, *selections)
        )
        write_whole(path, "\n".join(lines) + "\n")
