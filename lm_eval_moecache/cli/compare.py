"""Compare two sets of results: exit 0 if nothing got worse, 1 on a regression, 2 if unusable.

Scores are tested over their samples: without a real change at most `--alpha` of comparisons fail.
On the baseline's own machine, figures of the virtual clock must repeat exactly. "Better" is said by
the same tests and tolerances as "worse".
"""

from __future__ import annotations

import sys

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.records.numbers import listed_names, plain_number
from lm_eval_moecache.report.compare import (
    DEFAULT_ALPHA,
    FORMS,
    SPEED_METRICS,
    CompareOptions,
    compare,
)
from lm_eval_moecache.report.runs.columns import chosen_runs
from lm_eval_moecache.report.runs.files import load_runs

_SAME_MACHINE = {"auto": None, "yes": True, "no": False}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("baseline", help="a folder of results, or one results file")
    parser.add_argument("new", help="the same for the change under test")
    text = "relative tolerance for speed, either way: 5%%, or tok_per_s=5%%,miss_rate=1%%, or "
    text += "both; default: 0 (exact) on the baseline's machine, 2%% on others, 10%% with the wall "
    text += "clock"
    parser.add_argument("--tolerance", type=str | None, help=text)
    text = "smallest change of a score that counts: 0.5%% is half a point of accuracy or "
    text += "half a percent of a perplexity; default: 0 on the baseline's machine, else 0.5%%"
    parser.add_argument("--floor", type=str | None, help=text)
    text = "probability of a false alarm over all tested scores; default: 0.01"
    parser.add_argument("--alpha", type=str, default=f"{DEFAULT_ALPHA:g}", help=text)
    text = "whether both machines round identically; auto: decided from the records"
    choices = sorted(_SAME_MACHINE)
    parser.add_argument("--same_machine", choices=choices, default="auto", help=text)
    text = "speed metrics to compare, as `table --columns` names them"
    parser.add_argument("--metrics", default=",".join(SPEED_METRICS), help=text)
    text = "settings to ignore when joining runs, e.g. pretrained,device"
    parser.add_argument("--ignore", default="", help=text)
    text = "of BASELINE the runs with these settings, as two rows of one sweep: run=LABEL, or "
    text += "SETTING=VALUE,..."
    parser.add_argument("--baseline_where", type=str | None, help=text)
    parser.add_argument("--new_where", type=str | None, help="the same of NEW")
    parser.add_argument("--format", choices=tuple(FORMS), default="text")
    parser.add_argument("--all", action="store_true", help="list unchanged metrics as well")


def run(arguments: Namespace) -> int:
    tolerance, tolerances = _tolerances(arguments.tolerance)
    rules = CompareOptions(
        alpha=_share("--alpha", arguments.alpha),
        floor=None if arguments.floor is None else _share("--floor", arguments.floor),
        tolerance=tolerance,
        tolerances=tolerances,
        metrics=tuple(listed_names(arguments.metrics)),
        ignore=tuple(listed_names(arguments.ignore)),
        same_machine=_SAME_MACHINE[arguments.same_machine],
    )
    baseline, new = (
        chosen_runs(load_runs(arguments[side]), f"{side}_where", arguments[f"{side}_where"])
        for side in ("baseline", "new")
    )
    comparison = compare(baseline, new, rules)
    form = FORMS["json" if arguments.json else arguments.format]
    sys.stdout.write(form(comparison, everything=arguments.all))
    return 1 if comparison.is_regression else 0


def _share(option: str, text: str) -> float:
    """Read `5%` or `0.05`."""
    number = text.strip()
    value = plain_number(number.removesuffix("%"))
    if value is None or value < 0:
        raise ValueError(f"{option}={text!r} is not a number of 0 or more: 0.05, or 5%.")
    if value > 1 and not number.endswith("%"):
        raise ValueError(
            f"{option}={text!r} is a share above 1. Did you mean '{number}%', or '{value / 100:g}'?"
        )
    return value / (100 if number.endswith("%") else 1)


def _tolerances(text: str | None) -> tuple[float | None, dict[str, float]]:
    """Parse `5%,miss_rate=1%` into the general tolerance and tolerances by metric."""
    by_metric: dict[str, float] = {}
    for item in listed_names(text):
        metric, _, number = item.rpartition("=")
        by_metric[metric] = _share("--tolerance", number)
    return by_metric.pop("", None), by_metric
