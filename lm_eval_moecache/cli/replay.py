"""Run routing traces through the emulated cache without a model: any policies, any capacities.

Policies, axes, capacities, hardware and bandwidth may be lists (a,b,c): every combination is run.

The policy is `on_demand` unless another is chosen, and not `specmd` as in a live run: any trace can
be replayed with it, while specmd's prefetcher needs predictions, which only .parquet traces hold;
and LRU and the bound on misses are of it.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from tqdm import tqdm

from lm_eval_moecache.algorithms.policy import Policy, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.cli.main import make_parser, print_result
from lm_eval_moecache.engine.setting import (
    ATTENTIONS,
    EXECUTIONS,
    FLAT,
    LINKS,
    MOST_READS,
    PRIORITY,
    TOGETHER,
)
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.files import parse_yaml, read_yaml
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware
from lm_eval_moecache.records.numbers import read_count, shown, unknown
from lm_eval_moecache.records.schemas.inputs import read_jobs
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.report.replays import (
    Row,
    SweepSetting,
    as_json,
    as_table,
    cells_of,
    plot_miss_rates,
    run_cells,
)
from lm_eval_moecache.sweep.pool import local_pool, submit
from lm_eval_moecache.trace.use import load_use

# Option -> its help; each takes text, and is none unless given.
_TEXTS = {
    **{axis: f"replace the policy's {axis}; a,b,c" for axis in AXES},
    "phases": "all, or decode: lossy algorithms act only while decoding",
    "bandwidth": "link bandwidth, overrides the profile's: 5GB/s; a,b,c",
    "emulate": "charge each layer as a layer of this model: a name, a folder, or a YAML",
    "warm": "fill the cache first: a trace, or a JSON of `moecache profile use`",
    "seed": "seed of randomised algorithms; default: the recorded run's",
    "expert_bytes": "size of one expert, for .jsonl and .npz traces: 12MiB",
    "plot": "draw miss rate against capacity: .svg, .png",
    "timeline": "write what compute, link and host did, for Perfetto: .json",
}


def run_raw(argv: list[str]) -> int:
    """Replay; `--AXIS.PARAMETER=VALUE` is taken out first, as no parser knows all parameters."""
    arguments, overrides = _read_options(argv)
    size = None
    if arguments.expert_bytes is not None:
        size = parse_bytes(arguments.expert_bytes, "expert_bytes")
        if size < 1:
            raise ValueError(f"expert_bytes={arguments.expert_bytes!r} must be above 0.")
    setting = SweepSetting(
        policies=_policies(arguments.policy, overrides),
        capacities=_split(arguments.capacity),
        hardwares=[
            load_hardware(name, bandwidth)
            for name in _split(arguments.hardware)
            for bandwidth in _split(arguments.bandwidth)
        ],
        cache_reset=arguments.cache_reset,
        seed=None if arguments.seed is None else read_count("seed", arguments.seed),
        expert_bytes=size,
        bound=arguments.bound,
        link=arguments.link,
        execute=arguments.execute,
        reads_per_expert=read_count(
            "reads_per_expert", arguments.reads_per_expert, least=1, most=MOST_READS
        ),
        attention=arguments.attention,
        emulate=None if arguments.emulate is None else load_real_model(arguments.emulate),
        warm=None if arguments.warm is None else load_use(arguments.warm),
    )
    if arguments.timeline is not None:
        from lm_eval_moecache.report.replays import write_timeline

        write_timeline(arguments.traces, setting, arguments.timeline)
    rows = _rows(arguments.traces, setting, read_jobs(arguments.jobs))
    if arguments.plot is not None:
        plot_miss_rates(rows, arguments.plot)
    text = as_table(rows, in_full=arguments.all) + "\n"
    return print_result(arguments.json, as_json(rows), text)


def _rows(files: Sequence[str], setting: SweepSetting, jobs: int) -> list[Row]:
    """Replay here, or in processes that each read a trace once for all its cells there."""
    cells, is_quiet = cells_of(setting), not sys.stderr.isatty()
    jobs = min(jobs, len(files) * len(cells))
    if jobs == 1:
        return [row for file in files for row in run_cells(file, setting, cells, not is_quiet)]
    # Cells of one capacity share their bounds, and so go together while there are others.
    width, number = len(setting.capacities), range(len(cells))
    slices = -(-jobs // (len(files) * width))
    parts = [
        (file, own)
        for file in files
        for capacity in range(width)
        for turn in range(slices)
        if (own := [i for i in number if i % width == capacity and i // width % slices == turn])
    ]
    found: dict[tuple[str, int], Row] = {}
    with local_pool(jobs) as pool:
        futures = submit(pool, _run_part, parts, setting)
        done = tqdm(as_completed(futures), total=len(parts), unit="part", disable=is_quiet)
        for future in done:
            file, own = futures[future]
            found |= {(file, i): row for i, row in zip(own, future.result(), strict=True)}
    return [found[file, i] for file in files for i in number]


def _run_part(part: tuple[str, Sequence[int]], setting: SweepSetting) -> list[Row]:
    (file, own), cells = part, cells_of(setting)
    return run_cells(file, setting, [cells[i] for i in own])


def parser(needs_traces: bool = True) -> ArgumentParser:
    """Return the parser of what is no parameter of an algorithm."""
    epilog = "Parameters of an axis: --eviction.order=fifo; see `moecache policies NAME`."
    made = make_parser("moecache replay", __doc__, epilog)
    traces = "trace files: .parquet, .csv, .jsonl, .npz"
    made.add_argument("traces", nargs="+" if needs_traces else "*", type=str, help=traces)
    made.add_argument("--policy", type=str, default="on_demand", help="composition, or YAML; a,b,c")
    sizes = "5%, 2GiB, 51 (experts), 30/layer; a,b,c"
    made.add_argument("--capacity", type=str, default="25%", help=sizes)
    made.add_argument("--hardware", type=str, default=DEFAULT_PROFILE, help="profile, or YAML")
    for name, text in _TEXTS.items():
        made.add_argument(f"--{name}", type=str | None, help=text)
    order = "demands first, or fifo: nothing is overtaken or cancelled"
    made.add_argument("--link", choices=list(LINKS), default=PRIORITY, help=order)
    order = "run an event's experts together once all have arrived, or resident ones first"
    made.add_argument("--execute", choices=list(EXECUTIONS), default=TOGETHER, help=order)
    reads = "read requests per expert (its projections), for links with several lanes"
    made.add_argument("--reads_per_expert", type=str, default="1", help=reads)
    context = "context: charge attention over it and its KV cache by the configuration of --emulate"
    made.add_argument("--attention", choices=list(ATTENTIONS), default=FLAT, help=context)
    reset = "request: each starts with the first one's initial cache"
    made.add_argument("--cache_reset", choices=["never", "request"], default="never", help=reset)
    bounds = "also what LRU on demand misses, and the fewest misses that there can be"
    made.add_argument("--bound", type=bool, default=True, help=bounds)
    made.add_argument("--jobs", type=int, default=1, help="parallel replays, one process each")
    made.add_argument("--all", action="store_true", help="all columns of the table")
    return made


def _read_options(argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return the options, and what they change in the policy.

    The options of `--config` files come before those of the command line; who names an algorithm
    drops the parameters that were given to it before.
    """
    files, plain, own = _split_words(argv)
    known = set(vars(parser(needs_traces=False).get_defaults())) - {"config"}
    traces: Any = []
    rest: list[str] = []
    parameters: dict[str, Any] = {}
    for options in [_of_file(file, known) for file in files]:
        traces = options.pop("traces", traces)
        new = {key: value for key, value in options.items() if "." in key}
        parameters = _over(parameters, set(options), new)
        for key, value in options.items():
            # As it would stand on the command line.
            if key in ("json", "all"):
                rest += [f"--{key}"] if value else []
            elif "." not in key:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                rest.append(f"--{key}={text.lower() if isinstance(value, bool) else text}")
    named = {word[2:].partition("=")[0] for word in plain if word.startswith("--")}
    arguments = parser(needs_traces=not traces).parse_args([*rest, *plain])
    arguments.traces = arguments.traces or (traces if isinstance(traces, list) else [traces])
    chosen = {key: arguments[key] for key in (*AXES, "phases") if arguments[key] is not None}
    return arguments, chosen | _over(parameters, named, own)


def _over(before: Mapping[str, Any], named: set[str], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters where those of an axis that is named anew are dropped."""
    return {k: v for k, v in before.items() if k.partition(".")[0] not in named} | dict(new)


def _split_words(argv: Sequence[str]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return the files of `--config`, the parser's words, and every `--AXIS.PARAMETER=VALUE`."""
    files: list[str] = []
    rest: list[str] = []
    parameters: dict[str, Any] = {}
    words = iter(argv)
    value: str | None
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        axis, dot, _ = name.partition(".")
        if not word.startswith("--") or (name != "config" and not (dot and axis in AXES)):
            rest.append(word)
            continue
        if not equals:
            value = next(words, None)
            if value is None:
                raise ValueError(f"{word} needs a value: {word}=VALUE.")
        if name == "config":
            files.append(value)
        else:
            parameters[name] = parse_yaml(value, f"--{name}={shown(value)}")
    return files, rest, parameters


def _of_file(file: str, known: set[str]) -> dict[str, Any]:
    """Read a `--config` file; an axis may be a mapping, as in a policy's file."""
    found = read_yaml(file, f"config={file!r}")
    if not isinstance(found, dict):
        raise ValueError(f"config={file!r} must hold a mapping of options.")
    options: dict[str, Any] = {}
    for key, value in found.items():
        axis, dot, _ = str(key).partition(".")
        if key not in known and not (dot and axis in AXES):
            raise unknown(f"config file {Path(file).name}: option", key, known)
        if key in AXES and isinstance(value, dict):
            options |= {key if k == "name" else f"{key}.{k}": v for k, v in value.items()}
        elif value is not None:
            options[key] = value
    return options


def _split(text: Any) -> list[Any]:
    """Divide a list at its commas, those within brackets (`[12,10]/layer`) left out."""
    if text is None:
        return [None]
    return [part.strip() for part in re.split(r",(?![^\[]*\])", str(text))]


def _policies(names: str, overrides: Mapping[str, Any]) -> list[Policy]:
    """Return every combination of the listed policies and algorithms, those alike once."""
    lists = {key: _split(overrides[key]) for key in AXES if key in overrides}
    found: dict[str, Policy] = {}
    for name, *chosen in itertools.product(_split(names), *lists.values()):
        policy = load_policy(name, {**overrides, **dict(zip(lists, chosen, strict=True))})
        found.setdefault(str(policy.as_dict()), policy)
    return list(found.values())
