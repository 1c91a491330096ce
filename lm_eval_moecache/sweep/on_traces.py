"""Cells that replay a recorded trace: a sweep over `traces` in place of a model and its tasks.

They need no model, and so may hold what knows the future (`eviction=belady`, `prefetch=oracle`).
A lossy policy is replayed open-loop: the trace keeps the routing that was recorded.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.run_report import run_report
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.sweep.identity import Planned, plan
from lm_eval_moecache.sweep.sharing import is_offline
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.stream import StreamedTrace, open_any
from lm_eval_moecache.trace.trace import Trace

KEYS = (
    *("policy", *AXES, "phases", "capacity", "hardware", "bandwidth", "link", "emulate", "warm"),
    *("execute", "reads_per_expert", "attention", "cache_reset", "seed", "expert_bytes"),
)


def check_trace_cell(cell: Cell) -> Planned:
    """Return the cell with its identity, of which the trace's content is part.

    Raises ValueError naming the key, or the trace, that does not fit.
    """
    given = _arguments(cell)
    ours = {key: value for key, value in given.items() if key != "expert_bytes"}
    trace = _load(cell.pretrained, given.get("expert_bytes"))
    config = read_config({"seed": trace.seed, **ours}, replayed=True)
    capacity = config.setting(trace.geometry).capacity
    is_size = not (capacity.text.endswith(("%", "/layer")) or capacity.text.isdigit())
    if is_size and not trace.has_sizes and config.emulate is None:
        raise ValueError(
            f"capacity={capacity.text!r}: trace {trace.name} does not say how large an expert is. "
            "Give expert_bytes, or a capacity as a share, a number of experts or N/layer."
        )
    return plan(cell, config, {"content": _digest(cell.pretrained, _state(cell.pretrained))})


def replayed_trace(planned: Planned) -> dict[str, Any]:
    """Return what the record of a cell keeps: the figures of speed, and no scores."""
    config, given = planned.config, _arguments(planned.cell)
    trace, future = _load(planned.cell.pretrained, given.get("expert_bytes")), None
    if is_offline(planned):
        if not isinstance(trace, Trace):
            trace = load_trace(planned.cell.pretrained, logits=True, predicted=True)
        future = Future(trace)
    setting = config.setting(trace.geometry)
    engine = replay(trace, setting, future=future, cache_reset=config.cache_reset)
    engine.check_integrity()
    requests = engine.ledger.requests
    report = run_report(engine, config, requests, engine.peak_cache_bytes)
    return {"results": {}, "config": {"moecache": report}, "scores": {}}


def _arguments(cell: Cell) -> dict[str, Any]:
    for key in cell.arguments:
        axis, dot, _ = key.partition(".")
        if key not in KEYS and not (dot and axis in AXES):
            raise unknown("of a sweep over traces, the key", key, KEYS)
    return {"policy": "on_demand", **cell.arguments}


def _load(file: str, expert_bytes: object) -> Trace | StreamedTrace:
    size = None if expert_bytes is None else parse_bytes(str(expert_bytes), "expert_bytes")
    return _read(file, size, _state(file))


@lru_cache(maxsize=1)
def _read(file: str, expert_bytes: int | None, state: tuple[int, int]) -> Trace | StreamedTrace:
    """Keep the last trace read: cells of one trace follow each other."""
    return open_any(file, logits=True, predicted=True, expert_bytes=expert_bytes)


def _state(file: str) -> tuple[int, int]:
    path = Path(file)
    if not path.is_file():
        return (0, 0)
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=64)
def _digest(file: str, state: tuple[int, int]) -> str:
    found = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            found.update(block)
    return found.hexdigest()[:16]
