"""Makes a cell's record from its group's run: the speed is replayed, all else is the same."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.run_report import run_report
from lm_eval_moecache.sweep.identity import Planned
from lm_eval_moecache.sweep.sharing import SharedRun, is_offline
from lm_eval_moecache.sweep.speed_rows import replace_speed
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.stream import StreamedTrace, open_trace
from lm_eval_moecache.trace.trace import Trace


class NoSharedRunError(ValueError):
    """The run that a cell was to be replayed from is not there: no failure of the cell's own."""


def replayed(planned: Planned, folder: Path) -> tuple[dict[str, Any], str]:
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
    shared, trace = _read(str(files.results), str(files.trace), stat.st_mtime_ns)
    config, future = planned.config, None
    if is_offline(planned):
        trace = trace if isinstance(trace, Trace) else read_trace(files.trace, logits=True)
        future = Future(trace)
    setting = config.setting(trace.geometry)
    engine = replay(trace, setting, future=future, cache_reset=config.cache_reset)
    engine.check_integrity()
    requests = engine.ledger.requests
    recorded: dict[str, Any] = json.loads(shared)
    kept: dict[str, Any] = recorded["kept"]
    report = run_report(engine, config, requests, engine.peak_cache_bytes)
    kept["config"]["moecache"] = {**report, **(kept["config"]["moecache"] or {})}
    replace_speed(kept, requests, planned.cell)
    return kept, recorded["run_id"]


@lru_cache(maxsize=1)
def _read(results: str, trace: str, changed_ns: int) -> tuple[str, Trace | StreamedTrace]:
    """Keep the last trace read: cells of one group follow each other."""
    return Path(results).read_text(), open_trace(Path(trace), logits=True)
