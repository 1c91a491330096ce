"""JSON lines `{"tok": n, "layers": [[ids] ...]}`, one decode step each (warp, moe-stream)."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache.trace.formats.base import (
    MOST_EXPERT,
    Options,
    Pass,
    TraceFormat,
    build,
    first_object,
    json_lines,
)
from lm_eval_moecache.trace.trace import Trace


class TokenJsonl(TraceFormat):
    """The format gives neither weights nor sizes nor the number of experts."""

    suffixes = (".jsonl",)
    holds = "nothing more: every token is a decode step"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return {"tok", "layers"} <= first_object(head).keys()

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name = path.name
        steps: list[Pass] = []
        lines = []
        for number, record in json_lines(path, f"trace {path.name}"):
            line = f"trace {name}: line {number}"
            match record:
                case {"tok": int(token), "layers": [[_, *_], *_] as layers, **rest} if not rest:
                    pass
                case _:
                    raise ValueError(
                        f"{line} must hold a number `tok` and a list of lists `layers`."
                    )
            for index, layer in enumerate(layers):
                if not isinstance(layer, list) or not all(
                    type(e) is int and 0 <= e <= MOST_EXPERT for e in layer
                ):
                    raise ValueError(
                        f"{line}: layers [{index}] is {layer!r}, must hold ids in 0..{MOST_EXPERT}."
                    )
            shape = [len(layer) for layer in layers]
            first = [len(ids) for [ids] in steps[0].experts] if steps else shape
            if len(set(shape)) > 1 or shape != first:
                raise ValueError(
                    f"{line}: layers must hold as many lists of as many ids as line 1."
                )
            if steps and token <= steps[-1].first_token:
                raise ValueError(f"{line}: tok is {token} after {steps[-1].first_token}.")
            steps.append(Pass(experts=[[layer] for layer in layers], first_token=token))
            lines.append(number)
        count = len(steps[0].experts) if steps else 1
        return build(
            name,
            path.stem,
            steps,
            options,
            where=lambda row: f"line {lines[row // count]}, layer {row % count}",
        )
