"""moe-cache-lab routing JSONL, version 1: one text, its prompt and what was generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.trace.formats.base import (
    Options,
    Pass,
    TraceFormat,
    build,
    first_object,
    json_lines,
    one_request,
)
from lm_eval_moecache.trace.trace import Trace

FORMAT = "moe-cache-lab.routing-jsonl"
_PHASES = {"prompt": PREFILL, "generated": DECODE}


class CacheLab(TraceFormat):
    """Selections in the order of need: the prompt layer by layer, then token by token."""

    suffixes = (".jsonl",)
    holds = "probabilities of the chosen as weights, phases"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return first_object(head).get("format") == FORMAT

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name = path.name
        lines = json_lines(path, f"trace {name}")
        _, about = next(lines)
        if about.get("format") != FORMAT or about.get("format_version") != 1:
            raise ValueError(
                f"trace {name}: format_version={about.get('format_version')!r} of {FORMAT} is not "
                "read. Allowed: 1."
            )
        texts: dict[tuple[str, int], dict[int, list[dict[str, Any]]]] = {}
        for number, record in lines:
            match record:
                case {
                    "record_type": "routing_selection",
                    "phase": "prompt" | "generated" as phase,
                    "token_position": int(token),
                    "layer": int(layer),
                    "selected_experts": [_, *_],
                }:
                    key = (phase, 0 if phase == "prompt" else token)
                    texts.setdefault(key, {}).setdefault(layer, []).append(record)
                case _:
                    raise ValueError(f"trace {name}: line {number} is no routing selection.")
        passes = [_pass(name, phase, layers) for (phase, _), layers in texts.items()]
        count = about.get("num_experts")
        model = str(about.get("model_id"))
        return build(name, model, passes, options, num_experts=count)

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        what, columns = f"out={str(path)!r}", trace.columns
        one_request(trace, what)
        if len({*columns.request.tolist()}) > 1:
            raise ValueError(
                f"{what}: this format holds one request, and trace {trace.name} has "
                f"{len(trace.requests)}. Allowed: --request NUMBER."
            )
        names = {PHASES.index(ours): theirs for theirs, ours in _PHASES.items()}
        if not set(columns.phase.tolist()) <= set(names):
            raise ValueError(f"{what}: this format has no passes that verify drafts.")
        records: list[dict[str, Any]] = [
            {
                "record_type": "metadata",
                "format": FORMAT,
                "format_version": 1,
                "model_id": trace.geometry.model or trace.name,
                "num_experts": trace.geometry.num_experts,
                "experts_per_token": trace.geometry.top_k,
                "capture_method": f"lm-eval-moecache, from {trace.name}",
            }
        ]
        weights = None if columns.weights is None else columns.weights.tolist()
        for row, experts in enumerate(columns.experts.tolist()):
            records.append(
                {
                    "record_type": "routing_selection",
                    "phase": names[int(columns.phase[row])],
                    "token_position": int(columns.token[row]),
                    "layer": int(columns.layer[row]),
                    "selected_experts": experts,
                    "selected_probabilities": [] if weights is None else weights[row],
                }
            )
        if any(not 0 <= w <= 1 for r in records[1:] for w in r["selected_probabilities"]):
            raise ValueError(f"{what}: weights outside of 0..1 are no probabilities.")
        dumped = (json.dumps(each, sort_keys=True, separators=(",", ":")) for each in records)
        write_whole(path, "\n".join(dumped) + "\n")


def _pass(name: str, phase: str, layers: dict[int, list[dict[str, Any]]]) -> Pass:
    own = [layers[layer] for layer in sorted(layers)]
    positions = [record["token_position"] for record in own[0]]
    if positions != list(range(positions[0], positions[0] + len(positions))):
        raise ValueError(f"trace {name}: the prompt's tokens of layer {min(layers)} have gaps.")
    for records in own:
        if [r["token_position"] for r in records] != positions[len(positions) - len(records) :]:
            raise ValueError(f"trace {name}: layer {records[0]['layer']} serves other tokens.")
    has_weights = all(r.get("selected_probabilities") for records in own for r in records)
    return Pass(
        experts=[[r["selected_experts"] for r in records] for records in own],
        weights=[[r["selected_probabilities"] for r in records] for records in own]
        if has_weights
        else None,
        phase=_PHASES[phase],
        first_token=positions[0],
    )
