"""colibri's `ROUTE_TRACE` lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lm_eval_moecache.trace.formats.base import (
    Options,
    TraceFormat,
    build,
    in_turn,
    numbered,
    told_apart,
)
from lm_eval_moecache.trace.trace import Trace


class Colibri(TraceFormat):
    """colibri's `ROUTE_TRACE`: lines `call row layer id:gate id:gate ...`.

    A call of several rows is a prefill; after a decode step it begins a new request.
    """

    suffixes = (".txt", ".trace", ".log")
    holds = "gates of the chosen as weights, phases by the number of rows"
    GATE = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    LINE = re.compile(rf"([0-9]+)\s+([0-9]+)\s+([0-9]+)((?:\s+[0-9]+:{GATE})+)\s*")

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        lines = (line for line in head.decode("utf-8", "replace").splitlines() if line.strip())
        first = next((line for line in lines if not line.startswith("#")), "")
        return cls.LINE.fullmatch(first) is not None

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        calls: dict[tuple[int, int], list[tuple[list[int], list[float]]]] = {}
        for number, line in numbered(path):
            if line.startswith("#"):
                continue
            match = cls.LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"{what}: line {number} is not `call row layer id:gate ...`.")
            call, row, layer = (int(match[n]) for n in (1, 2, 3))
            rows = calls.setdefault((call, layer), [])
            if row != len(rows):
                raise ValueError(f"{what}: line {number}: row is {row}, not {len(rows)}.")
            pairs = [pair.split(":") for pair in match[4].split()]
            rows.append(([int(e) for e, _ in pairs], [float(g) for _, g in pairs]))
        # Layers ascend within a pass: a lower or equal one begins the next.
        steps: list[dict[int, Any]] = []
        for (_, layer), rows in calls.items():
            if not steps or layer <= max(steps[-1]):
                steps.append({})
            steps[-1][layer] = rows
        return build(path.name, path.stem, in_turn(told_apart(steps)), options)
