"""colibri's `ROUTE_TRACE`: lines `call row layer id:gate id:gate ...`."""

from __future__ import annotations

import re
from pathlib import Path

from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.files import read_text
from lm_eval_moecache.trace.formats.base import Options, Pass, TraceFormat, build
from lm_eval_moecache.trace.trace import Trace

_PAIR = r"[0-9]+:[-+0-9.eE]+"
_LINE = re.compile(rf"([0-9]+)\s+([0-9]+)\s+([0-9]+)((?:\s+{_PAIR})+)\s*")
Rows = list[tuple[list[int], list[float]]]


class Colibri(TraceFormat):
    """A call of several rows is a prefill, of a new request where one has decoded before."""

    suffixes = (".txt", ".trace", ".log")
    holds = "gates of the chosen as weights, phases by the number of rows"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        lines = [line for line in head.decode("utf-8", "replace").splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("#")]
        return bool(lines) and _LINE.fullmatch(lines[0]) is not None

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name = path.name
        groups: dict[tuple[int, int], Rows] = {}
        for number, line in enumerate(read_text(path, f"trace {name}").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(
                    f"trace {name}: line {number} is not `call row layer id:gate ...`."
                )
            call, row, layer = (int(match[n]) for n in (1, 2, 3))
            rows = groups.setdefault((call, layer), [])
            if row != len(rows):
                raise ValueError(f"trace {name}: line {number}: row is {row}, not {len(rows)}.")
            pairs = [pair.split(":") for pair in match[4].split()]
            rows.append(([int(e) for e, _ in pairs], [float(g) for _, g in pairs]))
        return build(name, path.stem, _passes(groups), options)


def _passes(groups: dict[tuple[int, int], Rows]) -> list[Pass]:
    """Cut the calls into passes: each runs the layers upwards."""
    cut: list[list[Rows]] = []
    before = None
    for (_, layer), rows in groups.items():
        if before is None or layer <= before:
            cut.append([])
        cut[-1].append(rows)
        before = layer
    passes: list[Pass] = []
    request = done = 0
    for layers in cut:
        reads = len(layers[0]) > 1
        if reads and passes and passes[-1].phase == DECODE:
            request, done = request + 1, 0
        passes.append(
            Pass(
                experts=[[ids for ids, _ in rows] for rows in layers],
                weights=[[gates for _, gates in rows] for rows in layers],
                request=request,
                phase=PREFILL if reads else DECODE,
                first_token=done,
            )
        )
        done += len(layers[0])
    return passes
