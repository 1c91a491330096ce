"""What an answer costs: its tokens and time, right answers an hour, and the share within limits.

A fast token is no fast answer where a rule changes the answers: they may be longer, or wrong.
These figures follow from what every record holds of a task and of its documents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.metrics import BATCH, clustered_stderr
from lm_eval_moecache.report.statistics import Floats


class Run(Protocol):
    """What is needed of a stored run."""

    @property
    def samples(self) -> Mapping[str, Mapping[str, Mapping[str, Any]]]: ...
    @property
    def costs(self) -> Mapping[str, Mapping[str, Mapping[str, float]]]: ...
    @property
    def identity(self) -> Mapping[str, str]: ...
    def score(self, task: str) -> Any: ...
    def __getitem__(self, name: str) -> Any: ...


Figure = tuple[float | None, float | None]
"""A value and its standard error; None where a run does not have it."""
SLO = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "tpot_ms", "e2el": "e2el_ms"}
"""Word of `--slo` (those of vLLM's bench, AIPerf and guidellm) -> metric of a request. A request's
`itl` is the mean time between its tokens, its `tpot`."""
_UNITS = {"ms": 1.0, "s": 1000.0, "min": 60_000.0}
GOODPUT = "goodput"
AN_HOUR_MS = 3.6e6
_OVERLAP = ("f1", "bleu", "chrf", "rouge")
_NEAR = 0.1
"""How far from a whole number the tokens may be that follow from times of six digits."""


def read_slo(text: str | None) -> dict[str, float]:
    """Return metric -> the most it may be in ms, of `ttft=2s,itl=50ms,e2el=20s`.

    Raises ValueError naming the word or the unit that is not known.
    """
    limits: dict[str, float] = {}
    for item in (text or "").split(",") if text is not None else ():
        word, _, time = item.strip().partition("=")
        if word not in SLO:
            raise unknown_name_error("slo", word, SLO)
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)", time.strip())
        if found is None or found[2] not in _UNITS or not float(found[1]):
            raise ValueError(
                f"slo: {item.strip()!r} is no time above 0 with a unit. Allowed units: "
                f"{', '.join(_UNITS)}, as {word}=2s."
            )
        limit = float(found[1]) * _UNITS[found[2]]
        limits[SLO[word]] = min(limit, limits.get(SLO[word], math.inf))
    return limits


def costs_of(
    speed: Mapping[str, Mapping[str, float]], slo: Mapping[str, float]
) -> dict[str, Mapping[str, float]]:
    """Return a task's figures by document, with the tokens and time of each answer.

    `output_tokens` and `e2el_ms` follow from the time to the first token, the time per token and
    the tokens per second; a document is left out where their six digits do not tell a whole number
    of tokens. Scoring answers once the text is read. With limits, `goodput` says which documents
    keep them all (1) or not (0).
    """
    rates, firsts = speed.get("request_tok_per_s", {}), speed.get("ttft_ms", {})
    times = dict(speed.get("e2el_ms", {} if rates else firsts))
    tokens: dict[str, float] = {}
    for doc, rate in rates.items():
        first, each = firsts.get(doc, 0.0), speed.get("tpot_ms", {}).get(doc)
        if doc in times:
            count = rate * times[doc] / 1000
        elif each is None:
            count = 1.0
        else:
            # The time is first + (count - 1) * each, and the rate 1000 * count / time.
            rest = 1000 - rate * each
            count = rate * (first - each) / rest if rest else math.inf
        if math.isfinite(count) and round(count) > 0 and abs(count - round(count)) < _NEAR:
            tokens[doc] = float(round(count))
            times.setdefault(doc, 1000 * tokens[doc] / rate)
    found = {**speed, "e2el_ms": times, "output_tokens": tokens}
    if slo:
        found["goodput"] = {
            doc: float(all(found.get(name, {}).get(doc, 0.0) <= most for name, most in slo.items()))
            for doc in (times if "e2el_ms" in slo else firsts)
        }
    return found


def shares_of(run: Run, tasks: Sequence[str]) -> dict[str, Any]:
    """Return the primary scores of those of the tasks that generate and are scored from 0 to 1.

    Not those by the overlap of texts: some tasks have them in percent, and 0.6% of ROUGE would pass
    for six right answers of ten.
    """
    scores = {task: run.score(task) for task in _generating(run, tasks)}
    return {
        task: score
        for task, score in scores.items()
        if score is not None and score.higher_is_better and 0 <= score.value <= 1
        if not score.metric.startswith(_OVERLAP)
    }


def _generating(run: Run, tasks: Sequence[str]) -> list[str]:
    names = ("tok_per_s", "e2el_ms", "requests")
    return [task for task in tasks if all(run[f"{name}@{task}"].number for name in names)]


def rights_of(run: Run, task: str, score: Any) -> tuple[list[str], Floats, Floats, list[float]]:
    """Return a score's documents: names, right answers, times in ms, and labels of their batches.

    Empty where not every document has a time.
    """
    answers, costs = run.samples.get(task, {}).get(score.key, {}), run.costs.get(task, {})
    times, batches = costs.get("e2el_ms", {}), costs.get(BATCH, {})
    known = sorted(answers) if answers.keys() <= times.keys() else []
    return (
        known,
        np.asarray([answers[doc] for doc in known], dtype=np.float64),
        np.asarray([times[doc] for doc in known], dtype=np.float64),
        [batches.get(doc, -place) for place, doc in enumerate(known, 1)],
    )


def right_per_hour(run: Run, tasks: Sequence[str]) -> Figure:
    """Return score x 3600 / mean time of an answer in s, and the standard error of that ratio.

    Over several tasks: all right answers over all time. The error is over the documents where they
    are known (a ratio estimate), else of score and time as independent.
    """
    scores = shares_of(run, tasks)
    numbers, times = _requests_and_times(run, scores)
    right = sum(numbers[task] * score.value for task, score in scores.items())
    time_ms = sum(numbers[task] * times[task].number for task in scores)
    if not time_ms:
        return None, None
    rate, variance = right / time_ms, 0.0
    for task, score in scores.items():
        _, answers, by_document, labels = rights_of(run, task, score)
        if len(labels) > 1:
            residuals = answers - rate * by_document
            error = clustered_stderr(residuals - residuals.mean(), labels, len(labels))
        elif None in (score.stderr, times[task].stderr):
            error = None
        else:
            error = math.hypot(score.stderr, rate * times[task].stderr)
        if error is None:
            return AN_HOUR_MS * rate, None
        variance += (numbers[task] * error / time_ms) ** 2
    return AN_HOUR_MS * rate, AN_HOUR_MS * math.sqrt(variance)


def _requests_and_times(run: Run, tasks: Iterable[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return task -> its requests, and task -> the mean time of an answer in ms with its error."""
    named = [*tasks]
    return (
        {task: run[f"requests@{task}"].number for task in named},
        {task: run[f"e2el_ms@{task}"] for task in named},
    )


def output_tokens(run: Run, tasks: Sequence[str]) -> Figure:
    """Return the mean tokens of an answer, with its error where all documents' tokens are known.

    Of time and tokens per second where the device served one request at a time, else of documents.
    """
    mean, stderr = _mean(run, tasks, "output_tokens", "request_tok_per_s")
    generating = _generating(run, tasks)
    if generating and run.identity["streams"] == "1":
        numbers, times = _requests_and_times(run, generating)
        rates = {task: run[f"tok_per_s@{task}"].number / 1000 for task in generating}
        tokens = sum(numbers[task] * times[task].number * rates[task] for task in generating)
        mean = tokens / sum(numbers.values())
    return mean, stderr


def goodput(run: Run, tasks: Sequence[str]) -> Figure:
    """Return the share of documents within the limits of `run.slo`; nothing without limits."""
    return _mean(run, tasks, "goodput", "ttft_ms")


def _mean(run: Run, tasks: Sequence[str], name: str, counted: str) -> Figure:
    """Return the mean of a figure over the tasks' documents, where all that are counted have it."""
    values, labels = list[float](), list[float]()
    for task in tasks:
        costs = run.costs.get(task, {})
        known, batches = costs.get(name, {}), costs.get(BATCH, {})
        if len(known) < len(costs.get(counted, {})):
            return None, None
        labels += [batches.get(doc, -len(values) - i) for i, doc in enumerate(known, 1)]
        values += known.values()
    if not values:
        return None, None
    mean = sum(values) / len(values)
    return mean, clustered_stderr(np.asarray(values) - mean, labels, len(values))


ANSWERS: Mapping[str, Callable[[Run, Sequence[str]], Figure]] = {
    "output_tokens": output_tokens,
    "right_per_hour": right_per_hour,
    "goodput": goodput,
}
"""Metric -> its value and standard error for a run's tasks, where its record does not have it."""
