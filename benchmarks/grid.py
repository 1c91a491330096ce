"""What the grids of replays share: cells that are kept between runs, and Markdown tables."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pytablewriter import MarkdownTableWriter

TRACES = Path(__file__).resolve().parents[1] / "traces"
RESULTS = Path(__file__).resolve().parents[1] / "results"
Run = dict[str, Any]
"""What was measured, with the setting under `cell`."""


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


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    writer = MarkdownTableWriter()
    writer.headers, writer.value_matrix = [*headers], [list(row) for row in rows]
    return str(writer.dumps())


def sections(parts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts)
