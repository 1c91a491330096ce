"""Cells that are replayed, and run no model: on a trace that was there, or on their group's run.

A sweep over `traces` has cells of the first kind, which may hold what knows the future
(`eviction=belady`, `prefetch=oracle`); a lossy policy is replayed open-loop there, as the trace
keeps the routing that was recorded. Of the second kind are cells whose outputs are those of the run
that their group shares: only their speed is their own.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.run_report import run_report
from lm_eval_moecache.harness.tasks import document_figures, speed_row
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.sizes import check_sized, parse_bytes
from lm_eval_moecache.report.results import SPEED_FILTER
from lm_eval_moecache.sweep.evaluation import KEPT_SPEED, loadable, six_digits
from lm_eval_moecache.sweep.identity import ResolvedCell, plan
from lm_eval_moecache.sweep.sharing import SharedRun, is_offline
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.trace.file import StreamedTrace, open_trace, read_trace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace, open_any
from lm_eval_moecache.trace.trace import Trace

# What a cell of a trace may say.
KEYS = (
    *("policy", *AXES, "phases", "capacity", "hardware", "bandwidth", "link", "emulate", "warm"),
    *("execute", "reads_per_expert", "attention", "cache_reset", "seed", "expert_bytes"),
)
_SUFFIX = f",{SPEED_FILTER}"


class NoSharedRunError(ValueError):
    """The run that a cell was to be replayed from is not there: no failure of the cell's own."""


def _replay(
    planned: ResolvedCell, trace: Trace | StreamedTrace, read_whole: Callable[[], Trace]
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Return a replay's report and its requests; who knows the future needs the whole trace."""
    config, future = planned.config, None
    if is_offline(planned):
        trace = trace if isinstance(trace, Trace) else read_whole()
        future = Future(trace)
    setting = config.setting(trace.geometry)
    engine = replay(trace, setting, future=future, cache_reset=config.cache_reset)
    engine.check_integrity()
    requests = engine.ledger.requests
    return run_report(engine, config, requests, engine.peak_cache_bytes), requests


# --- on a trace that was there before the sweep ---


def check_trace_cell(cell: Cell) -> ResolvedCell:
    """Return the cell with its identity, of which the trace's content is part.

    Raises ValueError naming the key, or the trace, that does not fit.
    """
    for key in cell.arguments:
        axis, dot, _ = key.partition(".")
        if key not in KEYS and not (dot and axis in AXES):
            raise unknown("of a sweep over traces, the key", key, KEYS)
    trace = _load(cell)
    ours = {key: value for key, value in cell.arguments.items() if key != "expert_bytes"}
    config = read_config({"policy": "on_demand", "seed": trace.seed, **ours}, replayed=True)
    capacity = config.setting(trace.geometry).capacity
    if not trace.has_sizes and config.emulate is None:
        check_sized(capacity.text, trace.name, "expert_bytes")
    return plan(cell, config, {"content": _digest(cell.pretrained, _state(cell.pretrained))})


def replayed_trace(planned: ResolvedCell) -> dict[str, Any]:
    """Return what the record of a cell keeps: the figures of speed, and no scores."""
    file = planned.cell.pretrained
    read_whole = functools.partial(load_trace, file, logits=True, predicted=True)
    report, _ = _replay(planned, _load(planned.cell), read_whole)
    return {"results": {}, "config": {"moecache": report}, "scores": {}}


def _load(cell: Cell) -> Trace | StreamedTrace:
    size = cell.arguments.get("expert_bytes")
    expert_bytes = None if size is None else parse_bytes(str(size), "expert_bytes")
    return _open(cell.pretrained, expert_bytes, _state(cell.pretrained))


@lru_cache(maxsize=1)
def _open(file: str, expert_bytes: int | None, state: tuple[int, int]) -> Trace | StreamedTrace:
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


# --- on the run that a group of cells shares ---


def replayed(planned: ResolvedCell, folder: Path) -> tuple[dict[str, Any], str]:
    """Return what a run of the cell would keep, and the id of the run it was replayed from.

    Raises NoSharedRunError where the shared run has failed, ValueError where its trace lacks what
    the cell needs.
    """
    assert planned.share is not None, "a cell that shares no run"
    files = SharedRun(folder, planned.share.name)
    if not (files.results.is_file() and files.trace.is_file()):
        raise NoSharedRunError(
            f"the run that was to record {files.trace.name} for this cell has failed; the same "
            "command tries another one."
        )
    stat = files.results.stat()
    shared, trace = _read_shared(str(files.results), str(files.trace), stat.st_mtime_ns)
    report, requests = _replay(planned, trace, lambda: read_trace(files.trace, logits=True))
    recorded: dict[str, Any] = json.loads(shared)
    kept: dict[str, Any] = recorded["kept"]
    kept["config"]["moecache"] = {**report, **(kept["config"]["moecache"] or {})}
    _replace_speed(kept, requests, planned.cell)
    return kept, recorded["run_id"]


@lru_cache(maxsize=1)
def _read_shared(results: str, trace: str, changed_ns: int) -> tuple[str, Trace | StreamedTrace]:
    """Keep the last trace read: cells of one group follow each other."""
    return Path(results).read_text(), open_trace(Path(trace), logits=True)


def _replace_speed(kept: dict[str, Any], requests: Sequence[RequestRecord], cell: Cell) -> None:
    """Replace the speed rows of `kept` by those of these requests.

    Raises ValueError where the figures are not of the same kinds: a device on which everything is
    free, for example, has no tokens per second.
    """
    results: dict[str, dict[str, Any]] = kept["results"]
    if not any(key.endswith(_SUFFIX) for row in results.values() for key in row):
        return
    for task, documents in document_figures(requests).items():
        row = results.get(task, {})
        names = [key for key in row if key.endswith(_SUFFIX)]
        if not names:
            continue
        found = speed_row(documents.values())
        if set(found) != set(names):
            raise ValueError(
                f"task {task}: the recorded run has the speed figures {', '.join(names)}, this "
                f"cell has {', '.join(found)}. Run it with `moecache sweep --live`."
            )
        row.update(found)
        # What `evaluation.scores` keeps of a live run's documents.
        kept_speed: dict[str, dict[str, float]] = {}
        for document, figures in documents.items():
            for name in (name for name in KEPT_SPEED if name in figures):
                by_document = kept_speed.setdefault(name + _SUFFIX, {})
                by_document[str(document)] = six_digits(figures[name])
        kept["scores"].setdefault(task, {}).update(kept_speed)
    for name, group in _groups(cell.tasks, cell.include_path).items():
        aggregated = group.aggregate(results)
        for shown in (results.get(name), kept.get("groups", {}).get(name)):
            if shown is not None:
                shown.update({key: aggregated[key] for key in shown if key.endswith(_SUFFIX)})


@lru_cache(maxsize=2)
def _groups(tasks: tuple[str, ...], include_path: tuple[str, ...]) -> Mapping[str, Any]:
    groups: Mapping[str, Any] = loadable(tasks, include_path).load(list(tasks))["groups"]
    return groups
