"""Shared by the scripts: options, settings, traces, cells kept on disk, and tables."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pandas import DataFrame

from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Columns, Predicted, Trace, build_trace

TRACES = Path(__file__).resolve().parents[1] / "traces"
RESULTS = Path(__file__).resolve().parents[1] / "results"
Floats = npt.NDArray[np.float64]
Run = dict[str, Any]
"""The measurements, with their setting under `cell`."""


def arguments(doc: str, *files: str, **defaults: Any) -> argparse.Namespace:
    """Read the command line: positional `files`, and an option of each default's type.

    A tuple lists the allowed values, the default first; a list takes several values, at once or one
    by one.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in files:
        parser.add_argument(name, type=Path)
    for name, default in defaults.items():
        first = default[0] if isinstance(default, tuple) else default
        option: dict[str, Any] = {"type": str if first is None else type(first), "default": first}
        if isinstance(default, bool):
            option = {"action": "store_true"}
        elif isinstance(default, tuple):
            option["choices"] = default
        elif isinstance(default, list):
            option = {"action": "extend", "nargs": "+", "type": type((default or [""])[0])}
        parser.add_argument(f"--{name}", **option)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    return argparse.Namespace(**{**defaults, **given})


def shipped_trace(name: str) -> Trace:
    return load_trace(str(TRACES / f"{name}.parquet"))


def shipped_traces() -> dict[str, Trace]:
    return {path.stem: shipped_trace(path.stem) for path in sorted(TRACES.glob("*.parquet"))}


def decode_trace(
    experts_TLK: Any,
    weights_TLK: Any,
    num_experts: int,
    *,
    expert_bytes: int = 1,
    dense_bytes: int = 1,
    predicted: Predicted | None = None,
) -> Trace:
    """Return a trace of single-token decode passes, each layer's best expert first."""
    num_tokens, num_layers, top_k = experts_TLK.shape
    passes = np.repeat(np.arange(num_tokens, dtype=np.int32), num_layers)
    geometry = Geometry(
        model="generated",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=((expert_bytes,),) * num_layers,
        dense_bytes=(dense_bytes,) * num_layers,
    )
    columns = Columns(
        request=np.zeros_like(passes),
        pass_index=passes,
        phase=np.full_like(passes, PHASES.index(DECODE)),
        token=passes,
        layer=np.tile(np.arange(num_layers, dtype=np.int32), num_tokens),
        experts=experts_TLK.reshape(-1, top_k).astype(np.int32),
        weights=weights_TLK.reshape(-1, top_k),
    )
    return build_trace("generated", geometry, columns, predicted=predicted)


def setting_of(
    geometry: Geometry, capacity: str, overrides: Mapping[str, Any] | None = None, **more: str
) -> Setting:
    """Return a replay's setting from the keys of `moecache replay`; the default is on demand."""
    keys = {"policy": "on_demand", "capacity": capacity, **(overrides or {}), **more}
    return read_config(keys, replayed=True).setting(geometry)


def load(file: Path) -> list[Run]:
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else []


def fill(
    file: Path,
    cells: Iterable[tuple[Run, Any]],
    measure: Callable[[Run, Any], Run],
    *,
    save_each: int = 20,
) -> list[Run]:
    """Measure the cells, each with its inputs, that the file lacks, and return all."""
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


def frame(runs: Iterable[Run]) -> DataFrame:
    """Return one row per run: its setting and its measurements."""
    return DataFrame([{**run["cell"], **run} for run in runs])


def _save(file: Path, runs: list[Run]) -> None:
    text = "[\n" + ",\n".join(json.dumps(run, sort_keys=True) for run in runs) + "\n]\n"
    write_whole(file, gzip.compress(text.encode(), mtime=0))


@cache
def draws(num_units: int) -> npt.NDArray[np.int64]:
    """Return each unit's count per sample: the original (all 1) first, then 2000 draws."""
    samples = np.random.default_rng(0).integers(0, num_units, (2000, num_units))
    counts = [np.bincount(sample, minlength=num_units) for sample in samples]
    return np.vstack([np.ones(num_units, dtype=np.int64), *counts])


def interval(values: Floats, form: str = "{:.1f}") -> str:
    """Format a figure and the 95% interval of its draws; `values` has the figure first."""
    low, high = bounds(values)
    return f"{form.format(values[0])} [{form.format(low)}, {form.format(high)}]"


def bounds(values: Floats) -> Floats:
    """Return the ends of the 95% interval over `values[1:]`, the draws of `values[0]`."""
    return np.nanpercentile(values[1:], [2.5, 97.5])


def text_table(headers: Sequence[str], rows: Iterable[Sequence[str]], others: str = "---") -> str:
    """Return a Markdown table without padding; `others` aligns all columns but the first."""
    lines = [headers, ["---", *[others] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def sections(parts: Mapping[str, str]) -> str:
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts.items())
