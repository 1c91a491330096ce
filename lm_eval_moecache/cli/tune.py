"""Search compositions and parameters for the fastest policy within a budget of accuracy."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.harness.arguments import KEYS
from lm_eval_moecache.harness.evaluation_options import check_limit
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, canonical_name
from lm_eval_moecache.records.numbers import (
    listed_names,
    read_count,
    read_number,
    unknown_name_error,
)
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.sweep.pool import read_jobs

# The only keys of our own allowed in --model_args: a replay reads them from the trace.
_FOR_EVERY_RUN = ("precision", "emulate")


def add_arguments(parser: ArgumentParser) -> None:
    text = "folder for the study, the runs, front.md and best.yaml"
    parser.add_argument("--out", help=text)
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    text = "further arguments of every run: precision=int8:int4,emulate=OLMoE-1B-7B"
    parser.add_argument("--model_args", type=str | None, help=text)
    text = "comma-separated tasks; the accuracy is their mean"
    parser.add_argument("--tasks", default="moecache_offline", help=text)
    parser.add_argument("--limit", type=int | float | None, help="documents per task")
    parser.add_argument("--capacity", default="25%", help="5%%, 2GiB, 51experts or 30/layer")
    parser.add_argument("--hardware", default=DEFAULT_PROFILE, help="profile, or YAML")
    text = "link bandwidth, overrides the profile's: 5GB/s"
    parser.add_argument("--bandwidth", type=str | None, help=text)
    text = "allowed accuracy loss in points (default: 1)"
    parser.add_argument("--budget", type=float, default=1.0, help=text)
    text = "speed objective: tok_per_s, tpot_ms, ttft_ms ..."
    parser.add_argument("--metric", default="tok_per_s", help=text)
    parser.add_argument("--space", type=str | None, help="YAML of the search space")
    text = "candidates to try; shipped compositions take turns with drawn ones, and count"
    parser.add_argument("--trials", type=int, default=1000, help=text)
    text = "time limit in seconds for starting runs, counted from the first candidate"
    parser.add_argument("--timeout", type=float, default=600.0, help=text)
    parser.add_argument("--jobs", type=int, default=1, help="processes that run the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search")


def run(arguments: Namespace) -> int:
    _check(arguments)
    # Imported late: a wrong option should not wait for torch and lm-eval.
    from lm_eval_moecache.tune.measure import Objective
    from lm_eval_moecache.tune.outcome import front_table
    from lm_eval_moecache.tune.search import tune

    plain = {
        key: arguments[key] for key in ("pretrained", "limit", "bandwidth", "metric", "budget")
    }
    objective = Objective(
        **plain,
        tasks=tuple(listed_names(arguments.tasks)),
        capacity=str(arguments.capacity),
        hardware=canonical_name(arguments.hardware),
        model_args=_model_args(arguments.model_args),
    )
    space = None if arguments.space is None else Path(arguments.space)
    effort = {key: arguments[key] for key in ("trials", "seed", "jobs")}
    out = Path(arguments.out)
    outcome = tune(objective, out, space, _say, timeout_s=arguments.timeout, **effort)
    return print_result(arguments.json, outcome, front_table(outcome))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _model_args(text: str | None) -> dict[str, str]:
    """Read `key=value,...`. Raises ValueError for keys that the search or an option sets."""
    values = {}
    for item in listed_names(text):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"model_args={text!r}: {item!r} is not of the form key=value.")
        if key.partition(".")[0] in KEYS and key not in _FOR_EVERY_RUN:
            raise ValueError(
                f"model_args={text!r}: {key!r} is searched, or has an option of its own. Allowed: "
                f"{', '.join(_FOR_EVERY_RUN)}, and the arguments of lm-eval's `hf` model."
            )
        values[key] = value
    return values


def _check(arguments: Namespace) -> None:
    if not arguments.out:
        raise ValueError("--out must name a folder: the search is kept there, and goes on from it.")
    allowed = [name for name, m in METRICS.items() if m.higher_is_better is not None]
    if arguments.metric not in allowed:
        raise unknown_name_error("metric", arguments.metric, allowed)
    read_number("budget", arguments.budget, least=0, most=100)
    read_number("timeout", arguments.timeout, above=0)
    read_count("trials", arguments.trials)
    read_jobs(arguments.jobs)
    read_count("seed", arguments.seed)
    check_limit(arguments.limit, "tune")
