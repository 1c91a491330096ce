"""Compare two sets of results: exit 0 if nothing got worse, 1 on a regression, 2 if unusable."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.records.numbers import plain_number, read_number
from lm_eval_moecache.report.compare import (
    SPEED_METRICS,
    Rules,
    as_json,
    as_markdown,
    as_text,
    compare,
)
from lm_eval_moecache.report.results import load_runs


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("baseline", help="a folder of results, or one results JSON")
    parser.add_argument("new", help="the same for the change under test")
    parser.add_argument(
        "--tolerance",
        type=str | None,
        help="relative, for speed: 0.05, or tok_per_s=0.05,miss_rate=0.01, or both; "
        "default: 0 (exactly) with the virtual clock, 0.1 with the wall clock",
    )
    parser.add_argument(
        "--sigmas", type=float, default=1.0, help="standard errors that accuracy may fall by"
    )
    parser.add_argument(
        "--metrics", default=",".join(SPEED_METRICS), help="figures of speed to judge"
    )
    parser.add_argument(
        "--ignore", default="", help="settings to leave out of the join, as pretrained,device"
    )
    parser.add_argument("--format", choices=("text", "md", "json"), default="text")
    parser.add_argument("--all", action="store_true", help="list unchanged figures as well")


def run(arguments: Namespace) -> int:
    whole, single = _tolerances(arguments.tolerance)
    rules = Rules(
        sigmas=read_number("--sigmas", arguments.sigmas, least=0),
        tolerance=whole,
        tolerances=single,
        metrics=_names(arguments.metrics),
        ignore=_names(arguments.ignore),
    )
    rows = compare(load_runs(Path(arguments.baseline)), load_runs(Path(arguments.new)), rules)
    if arguments.json or arguments.format == "json":
        sys.stdout.write(as_json(rows))
    elif arguments.format == "md":
        sys.stdout.write(as_markdown(rows, everything=arguments.all))
    else:
        sys.stdout.write(as_text(rows, everything=arguments.all))
    return 1 if any(row.is_regression for row in rows) else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _tolerances(text: str | None) -> tuple[float | None, dict[str, float]]:
    whole, single = None, {}
    for item in _names(text or ""):
        metric, equals, number = item.rpartition("=")
        value = plain_number(number)
        if value is None or value < 0:
            raise ValueError(
                f"--tolerance={text!r}: {number!r} is not a number of 0 or more. "
                "Allowed: 0.05, or METRIC=0.05, separated by commas."
            )
        if equals:
            single[metric] = value
        else:
            whole = value
    return whole, single
