"""The commands as functions, and what reads traces and runs: `api.NAME` is `moecache NAME`.

A function takes the command's options as keywords, and returns what `--json` prints, a mapping
whose `str` is the page. Every error that it raises for what it was given is a `MoECacheError`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.errors import as_moecache_error
from lm_eval_moecache.records.numbers import unknown_name_error

if TYPE_CHECKING:
    from lm_eval_moecache.cli.replay import replay as replay
    from lm_eval_moecache.records.command import Report
    from lm_eval_moecache.report.runs.columns import Runs
    from lm_eval_moecache.trace.trace import Trace

    plan: Callable[..., Report]

Place = str | PathLike[str]
_OURS = (
    *("cli.compare:compare", "cli.completion:completion", "cli.plot:plot"),
    *("cli.policies:policies", "cli.replay:replay", "cli.sweep:sweep", "cli.table:table"),
    *("cli.trace:trace_convert", "cli.trace:trace_formats", "cli.trace:trace_show"),
    *("cli.tune:tune", "cli.eval:eval_"),
    *("profiling.buddies:profile_buddies", "profiling.data_aware:profile_data_aware"),
    *("profiling.hardware:profile_hardware", "profiling.layer_sizes:profile_layer_sizes"),
    *("profiling.predictor:profile_predictor", "profiling.sensitivity:profile_sensitivity"),
    "profiling.use:profile_use",
)
GROUPS = {
    "profile": "Make offline artifacts: buddy lists, predictors, a profile of this machine, and "
    "others.",
    "trace": "Show what a routing trace contains, convert it, or list the formats that are read.",
}
"""Commands of several actions, each a function `COMMAND_ACTION`."""


def command_places() -> dict[str, str]:
    """Return name -> `module:function` of all commands, sorted: ours, and those of packages.

    Raises MoECacheError, naming the package, for a name that is taken.
    """
    found = {}
    for place in _OURS:
        group, _, action = place.partition(":")[2].rstrip("_").partition("_")
        found[f"{group} {action}".rstrip()] = f"lm_eval_moecache.{place}"
    for kind, lead in (("commands", ""), ("profile", "profile ")):
        own = [name.removeprefix(lead) for name in found if name.startswith(lead)]
        added = plugins.added(kind, own)
        found |= {f"{lead}{name}": point.value for name, point in added.items()}
    return dict(sorted(found.items()))


def command_names() -> list[str]:
    """Return the first words of all commands, sorted."""
    return sorted({name.partition(" ")[0] for name in command_places()})


def function_at(place: str) -> Callable[..., Any]:
    """Return the function at `module:name`."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a command as a function: `profile_use` for `moecache profile use`."""
    places = {each.replace(" ", "_"): place for each, place in command_places().items()}
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = function_at(places[name])
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        with as_moecache_error():
            for key in keywords if not takes_any else ():
                if not {key, f"{key}_"} & {*parameters}:
                    raise unknown_name_error(f"{name}: option", key, parameters)
            return function(*args, **keywords)

    globals()[name] = checked  # asked once
    return checked


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
    from lm_eval_moecache.trace import importers

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
