"""What the scripts share: cells that are kept between runs, and Markdown tables."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

TRACES = Path(__file__).resolve().parents[1] / "traces"
RESULTS = Path(__file__).resolve().parents[1] / "results"
Floats = npt.NDArray[np.float64]
Run = dict[str, Any]
"""What was measured, with the setting under `cell`."""


def shipped_traces() -> Iterator[tuple[str, Trace]]:
    for path in sorted(TRACES.glob("*.parquet")):
        yield path.stem, load_trace(str(path))


def setting_of(
    geometry: Geometry,
    capacity: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    policy: str = "on_demand",
    hardware: str = "a100-5GBps",
) -> Setting:
    return Setting(
        policy=load_policy(policy, overrides),
        capacity=parse_capacity(capacity, geometry),
        hardware=load_hardware(hardware),
    )


def load(file: Path) -> list[Run]:
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else []


def fill(
    file: Path,
    cells: Iterable[tuple[Run, Any]],
    measure: Callable[[Run, Any], Run],
    *,
    save_each: int = 20,
) -> list[Run]:
    """Measure the cells that the file lacks, each with what it means, and return all."""
    runs = load(file)
    known = {json.dumps(run["cell"], sort_keys=True) for run in runs}
    for cell, meaning in cells:
        if json.dumps(cell, sort_keys=True) not in known:
            runs.append({"cell": cell, **measure(cell, meaning)})
            if len(runs) % save_each == 0:
                _save(file, runs)
                sys.stderr.write(f"{file.parent.name}: {len(runs)} cells\n")
    _save(file, runs)
    return runs


def _save(file: Path, runs: list[Run]) -> None:
    text = "[\n" + ",\n".join(json.dumps(run, sort_keys=True) for run in runs) + "\n]\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def interval(values: Floats, form: str = "{:.1f}") -> str:
    """Write a figure and the 95% interval of its draws, which follow it."""
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return f"{form.format(values[0])} [{form.format(low)}, {form.format(high)}]"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    writer = MarkdownTableWriter()
    writer.headers, writer.value_matrix = [*headers], [list(row) for row in rows]
    return str(writer.dumps())


def text_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], first: str = "---", others: str = "---"
) -> str:
    """Return a Markdown table of cells as they are written, with how columns are aligned."""
    lines = [headers, [first, *[others] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def sections(parts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts)
