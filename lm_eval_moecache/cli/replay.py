"""What `moecache replay` runs and prints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.command import with_options
from lm_eval_moecache.records.files import parse_yaml, write_whole
from lm_eval_moecache.records.numbers import finite, shown
from lm_eval_moecache.records.schemas.keys import options_of
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.report.replay_report import ReplayReport, Timeline
from lm_eval_moecache.sweep.pool import read_jobs
from lm_eval_moecache.sweep.replay_grid import LISTS, SETTINGS, Replays, combinations, run_all
from lm_eval_moecache.trace.trace import Trace

Place = str | PathLike[str]


@with_options(options_of(SETTINGS), policy="on_demand", seed=None)
def replay(
    traces: Place | Trace | Sequence[Place | Trace],
    *,
    expert_bytes: str | int | None = None,
    timeline: str | None = None,
    bound: bool = True,
    jobs: int = 1,
    all: bool = False,
    **parameters: Any,
) -> ReplayReport:
    """Run routing traces through the emulated cache without a model: any policies, any capacities.

    Policies, axes, capacities, hardware and bandwidth may be lists (a,b,c): every combination is
    run. Parameters of an axis: --eviction.order=fifo; see `moecache policies NAME`.

    The default policy is `on_demand`, not `specmd` as in a live run: it replays any trace, while
    specmd's prefetcher needs predictions, which only .parquet traces hold. LRU and the bound on
    misses are computed with `on_demand`, too.

    Args:
        traces: trace files: .parquet, .csv, .jsonl, .npz; from Python also traces, which are not
            changed
        expert_bytes: size of one expert, for .jsonl and .npz traces: 12MiB
        timeline: write what compute, link and host did, for Perfetto: .json
        bound: also report on-demand LRU's misses and the lower bound of any eviction
        jobs: parallel replays, one process each
        all: all columns of the table

    Example:
        >>> from lm_eval_moecache import replay
        >>> from lm_eval_moecache.records.files import traces_dir
        >>> rules = ["lru", {"name": "lfu"}]
        >>> report = replay(traces_dir() / "olmoe-1b-7b.parquet", eviction=rules, bound=False)
        >>> report.to_dataframe()[["eviction", "miss_rate"]].round(2)
          eviction  miss_rate
        0      lru       0.51
        1      lfu       0.52
    """
    given = [traces] if isinstance(traces, (str, PathLike, Trace)) else list(traces)
    files = [each if isinstance(each, Trace) else fspath(each) for each in given]
    size = None if expert_bytes is None else parse_bytes(expert_bytes, "expert_bytes")
    if size is not None and size < 1:
        raise ValueError(f"expert_bytes={expert_bytes!r} must be above 0.")
    said = {key: value for key, value in parameters.items() if value is not None}
    lists = {key: _split(said[key]) for key in LISTS if isinstance(said.get(key), str)}
    configs = combinations({**said, **lists})
    if timeline is not None:
        if len(files) != 1 or len(configs) != 1:
            raise ValueError(
                "timeline: a timeline is of one replay. Give one trace, policy, capacity and "
                "hardware."
            )
        watched, replays = Timeline(), Replays(files[0], configs, size, bound=False)
        engine = replays.replay(replays.setting(configs[0]), on_engine=watched.watch)
        write_whole(Path(timeline), json.dumps(finite(watched.as_dict(engine)), allow_nan=False))
    is_shown = sys.stderr.isatty()
    rows = run_all(
        files, configs, expert_bytes=size, bound=bound, jobs=read_jobs(jobs), show_progress=is_shown
    )
    return ReplayReport(rows, in_full=all)


def _split(text: str) -> list[Any]:
    """Split a list at its commas, but not at those in brackets: `[12,10]/layer`, `{name: lru}`."""
    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text)]
    return [parse_yaml(part, shown(part)) if part.startswith("{") else part for part in parts]
