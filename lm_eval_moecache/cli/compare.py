"""What `moecache compare` compares and prints."""

from __future__ import annotations

import json
import sys
from typing import Literal

from lm_eval_moecache.harness.arguments import hflm_keys
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.numbers import listed_names, plain_number, unknown_name_error
from lm_eval_moecache.records.schemas.keys import KEYS
from lm_eval_moecache.report.compare import (
    DEFAULT_ALPHA,
    FORMS,
    SPEED_METRICS,
    CompareOptions,
)
from lm_eval_moecache.report.compare import compare as compared
from lm_eval_moecache.report.runs.answers import GOODPUT, read_slo
from lm_eval_moecache.report.runs.columns import chosen_runs
from lm_eval_moecache.report.runs.files import load_runs

_SAME_MACHINE = {"auto": None, "yes": True, "no": False}


def compare(
    baseline: str,
    new: str,
    *,
    tolerance: str | None = None,
    floor: str | None = None,
    alpha: str = f"{DEFAULT_ALPHA:g}",
    same_machine: Literal["auto", "no", "yes"] = "auto",
    metrics: str = ",".join(SPEED_METRICS),
    ignore: str = "",
    baseline_where: str | None = None,
    new_where: str | None = None,
    format: Literal["text", "md", "json"] = "text",
    all: bool = False,
    slo: str | None = None,
) -> Report:
    """Compare two sets of results: exit 0 if nothing got worse, 1 on a regression, 2 if unusable.

    Scores are tested over their samples: without a real change at most `--alpha` of comparisons
    fail. On the baseline's own machine, figures of the virtual clock must repeat exactly. "Better"
    is said by the same tests and tolerances as "worse".

    Args:
        baseline: a folder of results, or one results file
        new: the same for the change under test
        tolerance: relative tolerance for speed, either way: 5%, or tok_per_s=5%,miss_rate=1%, or
            both; default: 0 (exact) on the baseline's machine, 2% on others and for tested figures
            of runs of other settings, 10% with the wall clock
        floor: smallest change of a score that counts: 0.5% is half a point of accuracy or half a
            percent of a perplexity; default: 0 for the same settings on the baseline's machine,
            else 0.5%
        alpha: probability of a false alarm over all tested scores
        same_machine: whether both machines round identically; auto: decided from the records
        metrics: speed metrics to compare, as `table --columns` names them
        ignore: settings to ignore when joining runs, e.g. pretrained,device
        baseline_where: of BASELINE the runs with these settings, as two rows of one sweep:
            run=LABEL, or SETTING=VALUE,...
        new_where: the same of NEW
        format: how it is printed
        all: list unchanged metrics as well
        slo: compares goodput, too, the share of requests within limits: ttft=2s,itl=50ms,e2el=20s
    """
    general, by_metric = _tolerances(tolerance)
    rules = CompareOptions(
        alpha=_share("--alpha", alpha),
        floor=None if floor is None else _share("--floor", floor),
        tolerance=general,
        tolerances=by_metric,
        metrics=(*listed_names(metrics), *([GOODPUT] if slo else [])),
        ignore=tuple(listed_names(ignore)),
        same_machine=_SAME_MACHINE[same_machine],
    )
    limits = read_slo(slo)
    before = chosen_runs(load_runs(baseline, limits), "baseline_where", baseline_where)
    after = chosen_runs(load_runs(new, limits), "new_where", new_where)
    runs = (*before, *after)
    names = {*KEYS, *hflm_keys()}
    names |= {k for run in runs for k in (*run.identity, *run.model_args, *run.options)}
    for name in rules.ignore:
        if name not in names:
            raise unknown_name_error("ignore", name, names)
    comparison = compared(before, after, rules)
    if slo and not (comparison.rows.metric == GOODPUT).any():
        sys.stderr.write("moecache: no run here has goodput: --slo has no effect.\n")
    return Report(
        json.loads(FORMS["json"](comparison)),
        lambda: FORMS[format](comparison, everything=all),
        code=1 if comparison.is_regression else 0,
    )


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
