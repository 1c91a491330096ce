"""Run routing traces through the emulated cache without a model: any policy, any capacity."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.core.hardware import load_hardware
from lm_eval_moecache.core.sizes import parse_bytes
from lm_eval_moecache.policy import load_policy
from lm_eval_moecache.registry import AXES
from lm_eval_moecache.report.replay_sweep import SweepSetting, run_sweep
from lm_eval_moecache.report.replay_table import as_json, as_table


def run_raw(argv: list[str]) -> int:
    """Replay; `--AXIS.PARAMETER=VALUE` is taken out first, as no parser knows all parameters."""
    rest, parameters = _split_parameters(argv)
    arguments = _parser().parse_args(rest)
    overrides = _overrides(arguments, parameters)
    setting = SweepSetting(
        policy=load_policy(arguments.policy, overrides),
        capacities=[c.strip() for c in str(arguments.capacity).split(",")],
        hardware=load_hardware(arguments.hardware, arguments.bandwidth),
        cache_reset=arguments.cache_reset,
        seed=arguments.seed,
        expert_bytes=_expert_bytes(arguments.expert_bytes),
        bound=arguments.bound,
    )
    rows = run_sweep(arguments.traces, setting, show_progress=sys.stderr.isatty())
    if arguments.plot is not None:
        # matplotlib is an optional extra, and slow to import.
        from lm_eval_moecache.report.replay_plot import plot_miss_rates

        plot_miss_rates(rows, arguments.plot)
    output = json.dumps(as_json(rows), indent=2) if arguments.json else as_table(rows, setting)
    sys.stdout.write(output + "\n")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="moecache replay",
        description=__doc__,
        epilog="Parameters of an axis: --eviction.order=fifo. See `moecache policies` for all.",
    )
    parser.add_argument("--config", action="config", help="read options from a YAML file")
    parser.add_argument("--json", action="store_true", help="print machine-readable output")
    parser.add_argument("traces", nargs="+", type=str, help="trace files: .parquet, .csv, .jsonl")
    parser.add_argument("--policy", type=str, default="on_demand", help="composition, or YAML")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=str | None, help=f"replace the policy's {axis}")
    parser.add_argument("--phases", type=str | None, help="all, or decode, for lossy algorithms")
    parser.add_argument(
        "--capacity",
        type=str,
        default="25%",
        help="'5%%', '2GiB', '51', '30/layer'; a,b,c for many",
    )
    parser.add_argument("--hardware", type=str, default="a100-5gbps", help="profile, or YAML")
    parser.add_argument("--bandwidth", type=str | None, help="replaces the profile's: '5GB/s'")
    parser.add_argument("--cache_reset", choices=["never", "request"], default="never")
    parser.add_argument("--seed", type=int | None, help="default: the recorded run's")
    parser.add_argument(
        "--expert_bytes", type=str | None, help="size of one expert, for .jsonl traces: '12MiB'"
    )
    parser.add_argument(
        "--bound",
        type=bool,
        default=True,
        help="also replay on-demand LRU and Belady, for `closeness` and the plot's Belady line",
    )
    parser.add_argument("--plot", type=str | None, help="miss rate against capacity: .svg, .png")
    return parser


def _split_parameters(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
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
        try:
            parameters[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{word}: {value!r} is not a value: {error}") from error
    return rest, parameters


def _overrides(arguments: Namespace, parameters: dict[str, Any]) -> dict[str, Any]:
    given = {key: arguments[key] for key in (*AXES, "phases") if arguments[key] is not None}
    return given | parameters


def _expert_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_bytes(text, "expert_bytes")
    if size < 1:
        raise ValueError(f"expert_bytes={text!r} must be above 0.")
    return size
