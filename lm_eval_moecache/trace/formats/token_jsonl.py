"""JSON lines of one token each."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache.trace.formats.base import (
    MOST_EXPERT,
    JsonLines,
    Options,
    Pass,
    build,
    objects,
)
from lm_eval_moecache.trace.trace import Trace


class TokenJsonl(JsonLines):
    """JSON lines `{"tok": n, "layers": [[ids] ...]}`, one decode step each (warp, moe-stream).

    The format gives neither weights nor sizes nor the number of experts.
    """

    holds = "nothing more: every token is a decode step"
    fields = frozenset({"tok", "layers"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        steps: list[Pass] = []
        lines: list[int] = []
        shape: list[int] = []
        for number, record in objects(path):
            line = f"trace {path.name}: line {number}"
            match record:
                case {"tok": int(token), "layers": [[_, *_], *_] as layers, **rest} if not rest:
                    pass
                case _:
                    raise ValueError(
                        f"{line} must hold a number `tok` and a list of lists `layers`."
                    )
            for index, ids in enumerate(layers):
                if not isinstance(ids, list) or not all(
                    type(e) is int and 0 <= e <= MOST_EXPERT for e in ids
                ):
                    raise ValueError(
                        f"{line}: layers [{index}] is {ids!r}, must hold ids in 0..{MOST_EXPERT}."
                    )
            own = [len(ids) for ids in layers]
            shape = shape or own
            if len(set(own)) > 1 or own != shape:
                raise ValueError(
                    f"{line}: layers must hold as many lists of as many ids as line 1."
                )
            if steps and token <= steps[-1].first_token:
                raise ValueError(f"{line}: tok is {token} after {steps[-1].first_token}.")
            steps.append(Pass(experts=[[ids] for ids in layers], first_token=token))
            lines.append(number)

        def where(row: int) -> str:
            return f"line {lines[row // len(shape)]}, layer {row % len(shape)}"

        return build(path.name, path.stem, steps, options, where=where)
