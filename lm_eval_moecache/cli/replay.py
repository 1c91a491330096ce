"""Run routing traces through the emulated cache without a model: any policies, any capacities.

Policies, axes, capacities, hardware and bandwidth may be lists (a,b,c): every combination is run.

The policy is `on_demand` unless another is chosen, and not `specmd` as in a live run: any trace can
be replayed with it, while specmd's prefetcher needs predictions, which only .parquet traces hold;
and it is what the two bounds, LRU and Belady, are made of.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import Policy, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.setting import LINKS, PRIORITY
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import parse_yaml, read_yaml
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware
from lm_eval_moecache.records.numbers import read_count, shown
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.report.replay_sweep import SweepSetting, run_sweep
from lm_eval_moecache.report.replay_table import as_json, as_table
from lm_eval_moecache.trace.use import load_use


def run_raw(argv: list[str]) -> int:
    """Replay; `--AXIS.PARAMETER=VALUE` is taken out first, as no parser knows all parameters."""
    arguments, overrides = _read_options(argv)
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
        expert_bytes=_expert_bytes(arguments.expert_bytes),
        bound=arguments.bound,
        link=arguments.link,
        emulate=None if arguments.emulate is None else load_real_model(arguments.emulate),
        warm=None if arguments.warm is None else load_use(arguments.warm),
    )
    rows = run_sweep(arguments.traces, setting, show_progress=sys.stderr.isatty())
    if arguments.plot is not None:
        # matplotlib is an optional extra, and slow to import.
        from lm_eval_moecache.report.replay_plot import plot_miss_rates

        plot_miss_rates(rows, arguments.plot)
    output = json.dumps(as_json(rows), indent=2) if arguments.json else as_table(rows)
    sys.stdout.write(output + "\n")
    return 0


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


def parser(needs_traces: bool = True) -> ArgumentParser:
    made = ArgumentParser(
        prog="moecache replay",
        description=__doc__,
        epilog="Parameters of an axis: --eviction.order=fifo. See `moecache policies` for all.",
    )
    made.add_argument("--config", action="config", help="read options from a YAML file")
    made.add_argument("--json", action="store_true", help="print machine-readable output")
    count = "+" if needs_traces else "*"
    made.add_argument(
        "traces", nargs=count, type=str, help="trace files: .parquet, .csv, .jsonl, .npz"
    )
    made.add_argument(
        "--policy", type=str, default="on_demand", help="composition, or YAML (default: on_demand)"
    )
    for axis in AXES:
        made.add_argument(f"--{axis}", type=str | None, help=f"replace the policy's {axis}; a,b,c")
    made.add_argument("--phases", type=str | None, help="all, or decode, for lossy algorithms")
    made.add_argument(
        "--capacity",
        type=str,
        default="25%",
        help="'5%%', '2GiB', '51', '30/layer'; a,b,c for many",
    )
    _add_machine(made)
    _add_start(made)
    made.add_argument("--seed", type=int | None, help="default: the recorded run's")
    made.add_argument(
        "--expert_bytes",
        type=str | None,
        help="size of one expert, for .jsonl and .npz traces: '12MiB'",
    )
    made.add_argument(
        "--bound",
        type=bool,
        default=True,
        help="also replay on-demand LRU and Belady, for `closeness` and the plot's Belady line",
    )
    made.add_argument("--plot", type=str | None, help="miss rate against capacity: .svg, .png")
    return made


def _add_machine(parser: ArgumentParser) -> None:
    """Add what says how long things take."""
    parser.add_argument(
        "--link",
        choices=list(LINKS),
        default=PRIORITY,
        help="demands first (default), or fifo: nothing is overtaken or withdrawn",
    )
    parser.add_argument("--hardware", type=str, default=DEFAULT_PROFILE, help="profile, or YAML")
    parser.add_argument("--bandwidth", type=str | None, help="replaces the profile's: '5GB/s'; a,b")
    parser.add_argument(
        "--emulate",
        type=str | None,
        help="charge each layer as one of this model: a name, a folder, or a YAML",
    )


def _add_start(parser: ArgumentParser) -> None:
    """Add what says how the cache begins."""
    parser.add_argument(
        "--warm",
        type=str | None,
        help="fill it before the first request: a trace, or a JSON of `moecache profile use`",
    )
    parser.add_argument("--cache_reset", choices=["never", "request"], default="never")


def _read_options(argv: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """Return the options, and what they change in the policy.

    The options of `--config` files come before those of the command line; who names an algorithm
    drops the parameters that were given to it before.
    """
    files, words = _split_configs(argv)
    traces: list[str] = []
    rest: list[str] = []
    parameters: dict[str, Any] = {}
    layers = []
    for file in files:
        options = _read_file(file)
        traces = _as_list(options.pop("traces", traces))
        layers.append(_split_options(options))
    for plain, new in [*layers, _split_parameters(words)]:
        named = {word[2:].partition("=")[0] for word in plain if word.startswith("--")}
        kept = {k: v for k, v in parameters.items() if k.partition(".")[0] not in named}
        parameters = kept | new
        rest += plain
    arguments = parser(needs_traces=not traces).parse_args(rest)
    arguments.traces = arguments.traces or traces
    given = {key: arguments[key] for key in (*AXES, "phases") if arguments[key] is not None}
    return arguments, given | parameters


def _split_configs(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take every `--config FILE` out of the words."""
    files: list[str] = []
    rest: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise ValueError("--config needs a file: --config FILE.")
            value = queue.pop(0)
        files.append(value)
    return files, rest


def _read_file(file: str) -> dict[str, Any]:
    """Read a `--config` file; an axis may be a mapping, as in a policy's file."""
    found = read_yaml(file, f"config={file!r}")
    if not isinstance(found, dict):
        raise ValueError(f"config={file!r} must hold a mapping of options.")
    known = set(vars(parser().get_defaults())) - {"config"}
    options: dict[str, Any] = {}
    for key, value in found.items():
        axis, dot, _ = str(key).partition(".")
        if key not in known and not (dot and axis in AXES):
            raise unknown(f"config file {Path(file).name}: option", key, known)
        if key in AXES and isinstance(value, dict):
            inner = dict(value)
            options[key] = inner.pop("name", None)
            options |= {f"{key}.{parameter}": chosen for parameter, chosen in inner.items()}
        else:
            options[key] = value
    return options


def _split_options(options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Do for the options of a file what `_split_parameters` does for words."""
    words: list[str] = []
    for key, value in options.items():
        if "." in key or value is None:
            continue
        if key == "json":
            words += ["--json"] if value else []
        else:
            text = ",".join(map(str, _as_list(value)))
            words.append(f"--{key}={text.lower() if isinstance(value, bool) else text}")
    return words, {key: value for key, value in options.items() if "." in key}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split_parameters(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take `--AXIS.PARAMETER=VALUE` out of the words."""
    rest: list[str] = []
    parameters: dict[str, Any] = {}
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name.partition(".")[0] not in AXES or "." not in name:
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise ValueError(f"{word} needs a value: {word}=VALUE.")
            value = queue.pop(0)
        parameters[name] = parse_yaml(value, f"--{name}={shown(value)}")
    return rest, parameters


def _expert_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_bytes(text, "expert_bytes")
    if size < 1:
        raise ValueError(f"expert_bytes={text!r} must be above 0.")
    return size
