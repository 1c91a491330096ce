"""Per-request speed metrics in lm-eval's own results, added in two ways.

First, as per-sample metrics, which one line of a group YAML turns on for a task or a whole group:

    - task: gsm8k
      class: !function lm_eval_moecache.harness.tasks.SpeedTask

Names, prompts, filters and scores do not change. The metrics have a filter of their own, `speed`,
once per request however many filters a task has: they belong to the request, not to an answer
extracted from it. In the files of `--log_samples` they are a second line per document.

Second, after each evaluation of any task, by our one patch of lm-eval's internals: importing our
models wraps `evaluate`, through which `simple_evaluate` and the command line go; with any other
model it is the plain function. lm-eval has no hook for the start of an evaluation, nor for metrics
that a model rather than a task adds to the results. Code that took `evaluate` from lm-eval before
importing our models must call `lm.reset()` between evaluations.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import lm_eval.evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.task import ConfigurableTask

from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.metrics import BATCH, clustered_stderr, clusters, request_metrics
from lm_eval_moecache.report.runs.run import PLACEHOLDER, SPEED_FILTER

PROMPT_TOKENS = "prompt_tokens"
"""Prompt length of a document: context for its speed, not a speed metric itself."""
REQUEST_BYTES = "request_bytes_moved"
"""Mean bytes that a document's requests moved over the link; no column of lm-eval's table."""

#: Metric of a request -> whether higher is better (the arrow in lm-eval's table). Means of rates
#: over requests are not the task's rates, which are reported as `tok_per_s`, `hit_rate` ...
HIGHER_IS_BETTER: Mapping[str, bool] = {
    "ttft_ms": False,
    "tpot_ms": False,
    "e2el_ms": False,
    "request_tok_per_s": True,
    "request_hit_rate": True,
    "request_miss_rate": False,
    "request_collision_miss_rate": False,
}


class SpeedMetrics(dict[str, float]):
    """The metrics of one request, in the place of a filtered response of lm-eval."""


def mean_metrics(requests: Iterable[SpeedMetrics]) -> dict[str, float]:
    """Return the mean of each metric over the requests of one document that have it."""
    values: dict[str, list[float]] = {}
    for metrics in requests:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: mean(values[name]) for name in HIGHER_IS_BETTER if name in values}


def document_metrics(records: Iterable[RequestRecord]) -> dict[str, dict[int, dict[str, float]]]:
    """Return task -> document -> means over its requests: metrics, prompt tokens and bytes moved.

    A request that a task repeats counts once, with the metrics of its last repeat. Documents that
    share a batch have its number under `BATCH`, which those served alone lack.
    """
    last = {(r.task, r.document, r.place): r for r in records if r.document is not None}
    documents = [(key, [*keys]) for key, keys in groupby(sorted(last), key=itemgetter(0, 1))]
    labels = dict(zip(last, clusters([*last.values()]), strict=True))
    sharing = Counter(labels[keys[0]] for _, keys in documents)
    by_task: dict[str, dict[int, dict[str, float]]] = {}
    for (task, document), keys in documents:
        requests, label = [last[key] for key in keys], labels[keys[0]]
        by_task.setdefault(task, {})[document] = {
            **mean_metrics(SpeedMetrics(request_metrics(request)) for request in requests),
            **({BATCH: label} if sharing[label] > 1 else {}),
            PROMPT_TOKENS: mean([request.prompt_tokens for request in requests]),
            REQUEST_BYTES: mean([sum(p.bytes_moved for p in r.passes) for r in requests]),
        }
    return by_task


def speed_row(documents: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Return a task's speed row: mean and standard error over documents, as lm-eval has them.

    Documents that share a batch are one sample of the error.
    """
    row: dict[str, Any] = {}
    labeled = [(metrics.get(BATCH, -place), metrics) for place, metrics in enumerate(documents, 1)]
    for name in HIGHER_IS_BETTER:
        values = [(metrics[name], label) for label, metrics in labeled if name in metrics]
        if values:
            numbers, labels = [value for value, _ in values], [label for _, label in values]
            middle = mean(numbers)
            error = clustered_stderr([value - middle for value in numbers], labels, len(numbers))
            if len(set(labels)) == len(labels) > 1:
                error = mean_stderr(numbers)  # equal but for rounding: lm-eval's own, to the digit
            row[f"{name},{SPEED_FILTER}"] = middle
            row[f"{name}_stderr,{SPEED_FILTER}"] = "N/A" if error is None else error
    return row


def drop_group_errors(results: Mapping[str, Any], documents: Iterable[Mapping[str, float]]) -> None:
    """Set groups' errors of speed to N/A where documents share batches: lm-eval pools without."""
    if any(BATCH in figures for figures in documents):
        for name in results.get("groups") or {}:
            for row in (results["groups"][name], results["results"].get(name, {})):
                row.update({key: "N/A" for key in row if key.endswith(f"_stderr,{SPEED_FILTER}")})


class SpeedTask(ConfigurableTask):
    """Any YAML task of lm-eval, with the speed of its requests in addition to its scores.

    Under a model that sets no `instance.moecache` (`--model hf`) it is the plain task. A document
    without a metric (TPOT of a one-token answer) is left out of that metric's mean and count. Not
    for tasks that lm-eval writes as Python classes: `class:` would replace those.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        # lm-eval passes the whole YAML item, and TaskConfig has no field `class`.
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        self._measured: list[str] = []

    def apply_filters(self) -> list[Instance] | None:
        """Run the task's own filters, then add the pseudo filter that carries the metrics."""
        unfiltered: list[Instance] | None = super().apply_filters()
        # Empty under other models, which measure nothing.
        metrics = [SpeedMetrics(getattr(each, "moecache", None) or {}) for each in self.instances]
        self._measured = [n for n in HIGHER_IS_BETTER if any(n in each for each in metrics)]
        if self._measured:
            for instance, each in zip(self.instances, metrics, strict=True):
                instance.filtered_resps[SPEED_FILTER] = each
        return unfiltered

    def process_results(self, doc: Any, results: list[Any]) -> dict[str, Any]:
        """Score one document under one filter; lm-eval calls this once per filter."""
        if results and isinstance(results[0], SpeedMetrics):
            return mean_metrics(results)
        scores: dict[str, Any] = super().process_results(doc, results)
        return scores

    def aggregation(self) -> dict[str, Any]:
        """Aggregate by `mean`, the only aggregation with an exact standard error in lm-eval."""
        return {**super().aggregation(), **dict.fromkeys(self._measured, mean)}

    def higher_is_better(self) -> dict[str, Any]:
        """Return the arrows of the task's metrics and of the measured speed metrics."""
        arrows = {name: HIGHER_IS_BETTER[name] for name in self._measured}
        return {**super().higher_is_better(), **arrows}


# --- around each evaluation: it counts from zero, and its metrics go into lm-eval's results ---

SAMPLE_KEY = "speed"
"""Key of a `--log_samples` line that holds `document_metrics` of its document."""


def watch_evaluations(model_class: type[Any]) -> None:
    """Wrap lm-eval's `evaluate`, once: models of this class start cold and add their metrics."""
    plain = lm_eval.evaluator.evaluate
    if getattr(plain, "is_wrapped", False):
        return

    @functools.wraps(plain)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        lm = kwargs.get("lm", args[0] if args else None)
        if not isinstance(lm, model_class):
            return plain(*args, **kwargs)
        lm.begin_evaluation()
        results = plain(*args, **kwargs)
        if results is not None:  # None on every rank but the first
            drop_placeholders(results)
            add_speed_rows(results, lm.evaluated(), kwargs.get("samples") or {})
        return results

    evaluate.is_wrapped = True  # type: ignore[attr-defined]
    lm_eval.evaluator.evaluate = evaluate


def drop_placeholders(results: Mapping[str, Any]) -> None:
    """Take lm-eval's placeholder of `--predict_only` out of its results: it is no score."""
    for rows in (results["results"], results.get("groups") or {}):
        for row in rows.values():
            for key in [
                key for key in row if key.startswith((f"{PLACEHOLDER},", f"{PLACEHOLDER}_"))
            ]:
                del row[key]


def add_speed_rows(
    results: dict[str, Any], records: Sequence[RequestRecord], chosen: Mapping[str, Sequence[int]]
) -> None:
    """Put each task's metrics next to its scores, and each document's on its sample.

    Of rows that `SpeedTask` has added, the errors alone are set: a batch is one sample. `chosen` is
    lm-eval's `samples`: task -> documents, for tasks of which only some documents were requested.
    """
    for task, documents in document_metrics(records).items():
        drop_group_errors(results, documents.values())
        if task not in results["results"]:
            continue
        order = chosen.get(task)
        by_id = {d if order is None else order[d]: metrics for d, metrics in documents.items()}
        for sample in results.get("samples", {}).get(task, []):
            sample[SAMPLE_KEY] = by_id.get(sample["doc_id"], {})
        row, metrics = results["results"][task], speed_row(by_id.values())
        if any(key.endswith(f",{SPEED_FILTER}") for key in row):
            # lm-eval knows no batches: its means are ours, its errors are not.
            row.update({key: value for key, value in metrics.items() if "_stderr," in key})
        else:
            row.update(metrics)
            arrows = results.setdefault("higher_is_better", {}).setdefault(task, {})
            arrows.update(
                {n: up for n, up in HIGHER_IS_BETTER.items() if f"{n},{SPEED_FILTER}" in metrics}
            )
