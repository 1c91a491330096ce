"""JSON lines of one token each."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache.trace.formats.base import (
    JsonLines,
    Options,
    Pass,
    build,
    check_next,
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
        for number, record in objects(path, "tok"):
            line = f"trace {path.name}: line {number}"
            match record:
                case {"tok": int(token), "layers": [[_, *_], *_] as layers, **rest} if not rest:
                    pass
                case _:
                    raise ValueError(
                        f"{line} must hold a number `tok` and a list of lists `layers`."
                    )
            if steps:
                check_next(f"{line}: tok", token, steps[-1].first_token)
            steps.append(Pass(experts=[[ids] for ids in layers], first_token=token))
        return build(path.name, path.stem, steps, options)
