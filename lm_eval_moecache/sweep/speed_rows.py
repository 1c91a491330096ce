"""Speed figures of a replay in lm-eval's own rows: per task, and for groups of tasks.

A task of class `SpeedTask` puts the figures of each request among lm-eval's results, under the
filter `speed`. Here they are made from replayed requests by lm-eval's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from lm_eval.api.metrics import mean, stderr_for_metric

from lm_eval_moecache.harness.tasks import Figures, mean_figures
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.metrics import request_metrics
from lm_eval_moecache.report.results import SPEED_FILTER
from lm_eval_moecache.sweep.evaluation import BOOTSTRAP_DRAWS, KEPT_SPEED, loadable, six_digits
from lm_eval_moecache.sweep.spec import Cell

_SUFFIX = f",{SPEED_FILTER}"


def replace_speed(kept: dict[str, Any], requests: Sequence[RequestRecord], cell: Cell) -> None:
    """Replace the speed rows of `kept` by those of these requests.

    Raises ValueError where the figures are not of the same kinds: a device on which everything is
    free, for example, has no tokens per second.
    """
    results: dict[str, dict[str, Any]] = kept["results"]
    if not any(key.endswith(_SUFFIX) for row in results.values() for key in row):
        return
    for task, figures in _by_task(requests).items():
        row = results.get(task, {})
        names = [key for key in row if key.endswith(_SUFFIX)]
        if not names:
            continue
        documents = _by_document(figures)
        found = _task_row(documents)
        if list(found) != names:
            raise ValueError(
                f"task {task}: the recorded run has the speed figures {', '.join(names)}, this "
                f"cell has {', '.join(found)}. Run it with `moecache sweep --live`."
            )
        row.update(found)
        kept["scores"].setdefault(task, {}).update(_document_scores(documents))
    for name, group in _groups(cell.tasks, cell.include_path).items():
        aggregated = group.aggregate(results)
        for shown in (results.get(name), kept.get("groups", {}).get(name)):
            if shown is not None:
                shown.update({key: aggregated[key] for key in shown if key.endswith(_SUFFIX)})


def _by_task(requests: Iterable[RequestRecord]) -> dict[str, dict[tuple[int, int], Figures]]:
    """Return the figures by task, and there by document and place in it."""
    found: dict[str, dict[tuple[int, int], Figures]] = {}
    for request in requests:
        if request.document is not None:
            of_task = found.setdefault(request.task, {})
            # A request that a task repeats has the figures of its last time.
            of_task[request.document, request.place] = Figures(request_metrics(request))
    return found


def _by_document(figures: Mapping[tuple[int, int], Figures]) -> dict[int, dict[str, float]]:
    """Return each document's figures: the mean of its requests', as lm-eval has it."""
    documents: dict[int, list[Figures]] = {}
    for (document, _), found in sorted(figures.items(), key=lambda item: item[0]):
        documents.setdefault(document, []).append(found)
    return {document: mean_figures(found) for document, found in documents.items()}


def _document_scores(documents: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return what `evaluation.scores` keeps of the speed of a live run's documents."""
    return {
        name + _SUFFIX: {
            str(document): six_digits(found[name])
            for document, found in documents.items()
            if name in found
        }
        for name in KEPT_SPEED
        if any(name in found for found in documents.values())
    }


def _task_row(documents: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Aggregate as lm-eval does, over documents."""
    values: dict[str, list[float]] = {}
    for found in documents.values():
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    stderr = stderr_for_metric(metric=mean, bootstrap_iters=BOOTSTRAP_DRAWS)
    row: dict[str, Any] = {}
    for name, items in values.items():
        row[name + _SUFFIX] = mean(items)
        row[f"{name}_stderr{_SUFFIX}"] = stderr(items) if len(items) > 1 else "N/A"
    return row


@lru_cache(maxsize=2)
def _groups(tasks: tuple[str, ...], include_path: tuple[str, ...]) -> Mapping[str, Any]:
    groups: Mapping[str, Any] = loadable(tasks, include_path).load(list(tasks))["groups"]
    return groups
