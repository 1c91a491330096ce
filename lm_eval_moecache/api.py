"""The functions of `lm_eval_moecache` itself: stable names over the commands of the same names.

Every error that they raise for their arguments is a `MoECacheError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.records.errors import as_moecache_error
from lm_eval_moecache.trace import importers
from lm_eval_moecache.trace.trace import Trace

if TYPE_CHECKING:
    from lm_eval_moecache.report.replay_report import ReplayReport
    from lm_eval_moecache.report.runs.columns import Runs

Place = str | PathLike[str]


def replay(
    trace: Place | Trace | Sequence[Place | Trace],
    *,
    policy: Any = "on_demand",
    capacity: Any = "25%",
    expert_bytes: int | None = None,
    bound: bool = True,
    jobs: int = 1,
    **settings: Any,
) -> ReplayReport:
    """Run routing traces through the emulated cache without a model, as `moecache replay` does.

    Args:
        trace: A trace, its file, or several; none of them is changed.
        policy: A composition's name, a YAML's path, or a mapping of its form.
        capacity: `5%` of all expert bytes, `2GiB`, `51experts`, or `30/layer`.
        expert_bytes: Bytes of one expert, for traces that do not give them.
        bound: Whether to add on-demand LRU's misses and the fewest possible.
        jobs: Processes to share the replays among.
        settings: The other options of the command: `eviction`, `hardware`, `seed` ..., and
            parameters as `**{"eviction.order": "fifo"}`. An algorithm may be a mapping of its name
            and parameters. A list of policies, algorithms, capacities, hardware or bandwidths runs
            every combination.

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
    # Imported late: the traces alone need neither engine nor schemas.
    from lm_eval_moecache.report.replay_report import ReplayReport
    from lm_eval_moecache.sweep.replay_grid import combinations, run_all

    given = [trace] if isinstance(trace, (str, PathLike, Trace)) else list(trace)
    with as_moecache_error():
        traces = [each if isinstance(each, Trace) else fspath(each) for each in given]
        configs = combinations({"policy": policy, "capacity": capacity, **settings})
        rows = run_all(traces, configs, expert_bytes=expert_bytes, bound=bound, jobs=jobs)
        return ReplayReport(rows)


def load_trace(
    file: Place,
    *,
    logits: bool = False,
    predicted: bool = False,
    expert_bytes: int | None = None,
    top_k: int | None = None,
) -> Trace:
    """Read a trace of any known format, detected from its content.

    Args:
        file: Its place.
        logits: Whether to read the routers' logits, which lossy rules need, where there are any.
        predicted: Whether to read the predictions that prefetchers need, where there are any.
        expert_bytes: Bytes of one expert, for formats without sizes; by default one.
        top_k: Experts per token, for formats that do not give them.
    """
    with as_moecache_error():
        return importers.load_trace(
            fspath(file),
            logits=logits,
            predicted=predicted,
            expert_bytes=expert_bytes,
            top_k=top_k,
        )


def load_runs(place: Place) -> Runs:
    """Load every run under a folder (or in one file) as two DataFrames, `runs` and `samples`.

    `runs` has a line a run, in order of experiment and run id, under the names of `moecache table`;
    `samples` one a run, task, document and metric. In a folder, files that hold no run are skipped,
    unreadable ones with a warning.
    """
    from lm_eval_moecache.report.runs import columns, files

    with as_moecache_error():
        return columns.as_frames(files.load_runs(Path(place)))


def plan(model: Place, **options: Any) -> Mapping[str, Any]:
    """Return what a machine can do with a model, as `moecache plan --json` prints it.

    Args:
        model: A name that the command lists, or a model's file (a config.json, a GGUF ...).
        options: The command's options by name: `hardware="rtx-4090-24gb"`, `context=4096` ...
    """
    from lm_eval_moecache.cli.main import command, parser_of
    from lm_eval_moecache.records.numbers import unknown_name_error

    # The forecaster's own: a registered command, as another package's would be.
    arguments = parser_of("plan").get_defaults()
    with as_moecache_error():
        for key in options:
            if key not in arguments or key == "model":
                raise unknown_name_error(
                    "plan: option", key, {*vars(arguments)} - {"config", "json", "model"}
                )
        for key, value in {**options, "model": fspath(model)}.items():
            arguments[key] = value
        found: Mapping[str, Any] = command("plan").find(arguments)
        return found
