"""The one trick on lm-eval's insides: its `evaluate` is wrapped, for our models only.

Around each evaluation: it counts from zero, and its figures stand in lm-eval's own results.
lm-eval calls a model with requests and never says where an evaluation begins, and its results hold
what tasks say, not models: it has no seam for either. So `evaluate`, through which
`simple_evaluate` and the command line go, is wrapped once our models are imported; with any other
model it is the plain function. Who took `evaluate` from lm-eval before importing our models has to
call `lm.reset()` between evaluations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval.evaluator

from lm_eval_moecache.harness.tasks import HIGHER_IS_BETTER, document_figures, speed_row
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.results import SPEED_FILTER

SAMPLE_KEY = "speed"
"""Of a line that `--log_samples` writes: its document's figures, and tokens of its prompt."""


def watch_evaluations(model_class: type[Any]) -> None:
    """Wrap lm-eval's `evaluate` for models of this class. Safe to call twice.

    `begin_evaluation` is called before each evaluation, and `evaluated` afterwards for its
    requests: those of all ranks on the first.
    """
    plain = lm_eval.evaluator.evaluate
    if getattr(plain, "tells_moecache", False):
        return

    @functools.wraps(plain)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        lm = kwargs.get("lm", args[0] if args else None)
        if not isinstance(lm, model_class):
            return plain(*args, **kwargs)
        lm.begin_evaluation()
        results = plain(*args, **kwargs)
        if results is not None:  # None on every rank but the first
            add_figures(results, lm.evaluated(), kwargs.get("samples") or {})
        return results

    evaluate.tells_moecache = True  # type: ignore[attr-defined]
    lm_eval.evaluator.evaluate = evaluate


def add_figures(
    results: dict[str, Any], records: Sequence[RequestRecord], chosen: Mapping[str, Sequence[int]]
) -> None:
    """Put each task's figures beside its scores, and each document's on its sample.

    What `SpeedTask` has put there already is left alone: the figures are the same. `chosen` are
    lm-eval's `samples`: task -> documents, where not all of them were asked for.
    """
    for task, documents in document_figures(records).items():
        if task not in results["results"]:
            continue
        order = chosen.get(task)
        figures = {d if order is None else order[d]: found for d, found in documents.items()}
        for sample in results.get("samples", {}).get(task, []):
            sample[SAMPLE_KEY] = figures.get(sample["doc_id"], {})
        row = results["results"][task]
        if not any(key.endswith(f",{SPEED_FILTER}") for key in row):
            found = speed_row(figures.values())
            row.update(found)
            arrows = results.setdefault("higher_is_better", {}).setdefault(task, {})
            arrows.update(
                {n: up for n, up in HIGHER_IS_BETTER.items() if f"{n},{SPEED_FILTER}" in found}
            )
