"""Run routing traces through the emulated cache without a model: any policies, any capacities.

Policies, axes, capacities, hardware and bandwidth may be lists (a,b,c): every combination is run.

The default policy is `on_demand`, not `specmd` as in a live run: it replays any trace, while
specmd's prefetcher needs predictions, which only .parquet traces hold. LRU and the bound on misses
are computed with `on_demand`, too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.cli.main import make_parser, print_result
from lm_eval_moecache.harness.arguments import CHOICES, Config, ModelArguments
from lm_eval_moecache.records.files import check_writable, parse_yaml, read_yaml, write_whole
from lm_eval_moecache.records.numbers import finite, shown, unknown_name_error
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.report.replay_report import ReplayReport, Timeline, as_table
from lm_eval_moecache.sweep.pool import read_jobs
from lm_eval_moecache.sweep.replay_grid import LISTS, SETTINGS, Replays, combinations, run_all

_MEANING = {
    "policy": "a name that moecache policies lists, or a YAML file",
    "seed": "seed of randomised algorithms (default: the recorded run's)",
}
"""Help of the keys that mean something else here than in a live run."""


def run_raw(argv: list[str]) -> int:
    """Replay; `--AXIS.PARAMETER=VALUE` is taken out first: no parser lists all parameters."""
    arguments, parameters = _read_options(argv)
    options: dict[str, Any] = {"expert_bytes": None, "bound": arguments.bound}
    if arguments.expert_bytes is not None:
        options["expert_bytes"] = parse_bytes(arguments.expert_bytes, "expert_bytes")
        if options["expert_bytes"] < 1:
            raise ValueError(f"expert_bytes={arguments.expert_bytes!r} must be above 0.")
    if arguments.timeline is not None:
        check_writable(Path(arguments.timeline))
    settings = {key: arguments[key] for key in SETTINGS if arguments[key] is not None}
    lists = {key: _split(text) for key, text in settings.items() if key in LISTS}
    configs = combinations({**settings, **lists, **parameters})
    if arguments.timeline is not None:
        _write_timeline(arguments.traces, configs, options, arguments.timeline)
    jobs, is_shown = read_jobs(arguments.jobs), sys.stderr.isatty()
    rows = run_all(arguments.traces, configs, **options, jobs=jobs, show_progress=is_shown)
    text = as_table(rows, in_full=arguments.all) + "\n"
    return print_result(arguments.json, ReplayReport(rows).as_dict(), text)


def _write_timeline(
    files: Sequence[str], configs: Sequence[Config], options: Mapping[str, Any], path: str
) -> None:
    """Write the timeline of a single replay. Raises ValueError where there are several."""
    if len(files) != 1 or len(configs) != 1:
        raise ValueError(
            "timeline: a timeline is of one replay. Give one trace, policy, capacity and hardware."
        )
    timeline, replays = Timeline(), Replays(files[0], configs, options["expert_bytes"], bound=False)
    engine = replays.replay(replays.setting(configs[0]), on_engine=timeline.watch)
    write_whole(Path(path), json.dumps(finite(timeline.as_dict(engine)), allow_nan=False))


def parser(needs_traces: bool = True) -> ArgumentParser:
    """Return the parser of all options but the algorithms' parameters."""
    epilog = "Parameters of an axis: --eviction.order=fifo; see `moecache policies NAME`."
    replay_parser = make_parser("moecache replay", __doc__, epilog)
    traces = "trace files: .parquet, .csv, .jsonl, .npz"
    replay_parser.add_argument("traces", nargs="+" if needs_traces else "*", type=str, help=traces)
    for key in SETTINGS:
        field = ModelArguments.model_fields[key]
        text = _MEANING.get(key, str(field.description)).replace("`", "")
        text += "; a,b,c" if key in LISTS else ""
        default = {"policy": "on_demand", "seed": None}.get(key, field.default)
        kind = {"choices": list(CHOICES[key])} if key in CHOICES else {"type": str | None}
        default = None if default is None else str(default)
        replay_parser.add_argument(f"--{key}", default=default, help=text, **kind)
    size = "size of one expert, for .jsonl and .npz traces: 12MiB"
    replay_parser.add_argument("--expert_bytes", type=str | None, help=size)
    what = "write what compute, link and host did, for Perfetto: .json"
    replay_parser.add_argument("--timeline", type=str | None, help=what)
    bounds = "also report on-demand LRU's misses and the lower bound of any eviction"
    replay_parser.add_argument("--bound", type=bool, default=True, help=bounds)
    replay_parser.add_argument(
        "--jobs", type=int, default=1, help="parallel replays, one process each"
    )
    replay_parser.add_argument("--all", action="store_true", help="all columns of the table")
    return replay_parser


def _read_options(argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return the options, and the parameters of algorithms.

    The command line overrides `--config` files; naming an algorithm drops the parameters given
    before for its axis.
    """
    files, parser_words, parameters = _split_words(argv)
    options: dict[str, Any] = {}
    named = {word[2:].partition("=")[0] for word in parser_words if word.startswith("--")}
    for new, names in [
        *((config, config) for config in map(_of_file, files)),
        (parameters, named),
    ]:
        dropped = [key for key in options if "." in key and key.partition(".")[0] in names]
        options = {key: value for key, value in options.items() if key not in dropped} | new
    traces = options.pop("traces", [])
    words = []
    for key, value in options.items():
        # As the option would be written on the command line.
        if key in ("json", "all"):
            words += [f"--{key}"] if value else []
        elif "." not in key:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"--{key}={text.lower() if isinstance(value, bool) else text}")
    arguments = parser(needs_traces=not traces).parse_args([*words, *parser_words])
    arguments.traces = arguments.traces or (traces if isinstance(traces, list) else [traces])
    return arguments, {key: value for key, value in options.items() if "." in key}


def _is_parameter(key: object) -> bool:
    axis, dot, _ = str(key).partition(".")
    return bool(dot) and axis in AXES


def _split_words(argv: Sequence[str]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return the files of `--config`, the parser's words, and every `--AXIS.PARAMETER=VALUE`."""
    files: list[str] = []
    rest: list[str] = []
    parameters: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not (name == "config" or _is_parameter(name)):
            rest.append(word)
            continue
        if not (value or (not equals and (value := next(words, "")))):
            raise ValueError(f"--{name} needs a value: --{name}=VALUE.")
        if name == "config":
            files.append(value)
        else:
            parameters[name] = parse_yaml(value, f"--{name}={shown(value)}")
    return files, rest, parameters


def _of_file(file: str) -> dict[str, Any]:
    """Read a `--config` file; an axis may be a mapping, as in a policy's file."""
    entries = read_yaml(file, f"config={file!r}")
    if not isinstance(entries, dict):
        raise ValueError(f"config={file!r} must hold a mapping of options.")
    option_names = set(vars(parser(needs_traces=False).get_defaults())) - {"config"}
    options: dict[str, Any] = {}
    for key, value in entries.items():
        if key not in option_names and not _is_parameter(key):
            raise unknown_name_error(f"config file {Path(file).name}: option", key, option_names)
        if key in AXES and isinstance(value, dict):
            options |= {key if k == "name" else f"{key}.{k}": v for k, v in value.items()}
        elif value is not None:
            options[key] = value
    return options


def _split(text: Any) -> list[Any]:
    """Split a list at its commas, but not at those in brackets: `[12,10]/layer`, `{name: lru}`."""
    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", str(text))]
    return [parse_yaml(part, shown(part)) if part.startswith("{") else part for part in parts]
