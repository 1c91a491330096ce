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
from lm_eval_moecache.sweep.evaluation import BOOTSTRAP_DRAWS, loadable
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
        found = _task_row(figures)
        if list(found) != names:
            raise ValueError(
                f"task {task}: the recorded run has the speed figures {', '.join(names)}, this "
                f"cell has {', '.join(found)}. Run it with `moecache sweep --live`."
            )
        row.update(found)
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


def _task_row(figures: Mapping[tuple[int, int], Figures]) -> dict[str, Any]:
    """Aggregate as lm-eval does: over documents, each with the mean of its requests."""
    documents: dict[int, list[Figures]] = {}
    for (document, _), found in sorted(figures.items(), key=lambda item: item[0]):
        documents.setdefault(document, []).append(found)
    values: dict[str, list[float]] = {}
    for of_document in documents.values():
        for name, value in mean_figures(of_document).items():
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
