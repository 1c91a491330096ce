"""What `moecache tune` asks and checks."""

from __future__ import annotations

import sys
from pathlib import Path

from lm_eval_moecache.harness.evaluation_options import check_limit
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, canonical_name
from lm_eval_moecache.records.numbers import (
    listed_names,
    read_count,
    read_number,
    unknown_name_error,
)
from lm_eval_moecache.records.schemas.keys import KEYS
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.sweep.pool import read_jobs

# The only keys of our own allowed in --model_args: a replay reads them from the trace.
_FOR_EVERY_RUN = ("precision", "emulate")


def tune(
    *,
    out: str,
    pretrained: str = "tiny",
    model_args: str | None = None,
    tasks: str = "moecache_offline",
    limit: int | float | None = None,
    capacity: str = "25%",
    hardware: str = DEFAULT_PROFILE,
    bandwidth: str | None = None,
    budget: float = 1.0,
    metric: str = "e2el_ms",
    space: str | None = None,
    trials: int = 1000,
    timeout: float = 600.0,
    jobs: int = 1,
    seed: int = 0,
) -> Report:
    """Search compositions and parameters for the fastest policy within a budget of accuracy.

    Args:
        out: folder for the study, the runs, front.md and best.yaml
        pretrained: tiny, a folder or a hub id
        model_args: further arguments of every run: precision=int8:int4,emulate=OLMoE-1B-7B
        tasks: comma-separated tasks; the accuracy is their mean
        limit: documents per task
        capacity: 5%, 2GiB, 51experts or 30/layer
        hardware: profile, or YAML
        bandwidth: link bandwidth, overrides the profile's: 5GB/s
        budget: allowed accuracy loss in points
        metric: speed objective: e2el_ms (the time of an answer), ttft_ms, tpot_ms, tok_per_s ...;
            tokens per second favour rules whose answers are longer
        space: YAML of the search space
        trials: candidates to try; shipped compositions take turns with drawn ones, and count
        timeout: time limit in seconds for starting runs, counted from the first candidate
        jobs: processes that run the model
        seed: seed of the search
    """
    # The first two need scores or limits, which a replay of routing has not; a card that is used
    # more is not faster.
    answers = ("right_per_hour", "goodput", "s_mbu")
    allowed = [
        name
        for name, m in METRICS.items()
        if m.higher_is_better is not None and name not in answers
    ]
    if metric not in allowed:
        raise unknown_name_error("metric", metric, allowed)
    read_number("budget", budget, least=0, most=100)
    read_number("timeout", timeout, above=0)
    read_count("trials", trials)
    read_jobs(jobs)
    read_count("seed", seed)
    check_limit(limit, "tune")
    further = _model_args(model_args)
    # Imported late: a wrong option should not wait for torch and lm-eval.
    from lm_eval_moecache.tune.measure import Objective
    from lm_eval_moecache.tune.outcome import front_table
    from lm_eval_moecache.tune.search import tune as search

    objective = Objective(
        pretrained=pretrained,
        limit=limit,
        bandwidth=bandwidth,
        metric=metric,
        budget=budget,
        tasks=tuple(listed_names(tasks)),
        capacity=str(capacity),
        hardware=canonical_name(hardware),
        model_args=further,
    )
    place = None if space is None else Path(space)
    effort = {"trials": trials, "seed": seed, "jobs": jobs}
    outcome = search(objective, Path(out), place, _say, timeout_s=timeout, **effort)
    return Report(outcome, lambda: front_table(outcome))


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
