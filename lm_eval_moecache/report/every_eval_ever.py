"""Runs in the form of EvalEval's Every Eval Ever: one JSON document a run, of schema 0.2.2.

Its scores are typed results with direction, bounds, error and number of documents; settings and
speed go where the schema has texts by name. Same runs, same bytes.
See https://github.com/evaleval/every_eval_ever (`every_eval_ever/schemas/eval.schema.json`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from lm_eval_moecache.report.runs.columns import FRAME_SETTINGS
from lm_eval_moecache.report.runs.run import Run, Score, identity

NAME = "every_eval_ever"
SCHEMA = "0.2.2"
# Only metrics of one range in all tasks of lm-eval: SQuAD's f1 is in percent, GLUE's a share.
_BOUNDS = {
    **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "exact_match", "mc1", "mc2"), (0.0, 1.0)),
    "mcc": (-1.0, 1.0),
    "brier_score": (0.0, 2.0),
}


def document(run: Run) -> dict[str, Any]:
    """Return one run as the schema has it.

    Every finite score of each task and group is a result; a metric whose range is not known says
    so, and is of no score type. Who evaluated is not in a record, and is said to be unknown.
    """
    model, when = run.identity.get("pretrained", "unknown"), _timestamp(run)
    versions = run.environment.get("versions", {})
    engine = {"name": "lm-eval-moecache", "version": versions.get("lm-eval-moecache")}
    settings = {name: run.setting(name).raw for name in FRAME_SETTINGS}
    developer, slash, name = model.partition("/")
    # Else a path, perhaps of a trace.
    is_on_hub = developer.strip(".~") and slash and name and "/" not in name
    is_on_hub = is_on_hub and run.model_args.get("pretrained") == model
    return {
        "schema_version": SCHEMA,
        # Many cells of a sweep have the same tasks, model and second.
        "evaluation_id": f"{run.experiment}.{run.run_id}/{model}/{when}",
        "evaluation_timestamp": when,
        "retrieved_timestamp": when,
        "source_metadata": {
            "source_name": "lm-eval-moecache",
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
            "additional_details": _texts(
                {"experiment": run.experiment, "run_id": run.run_id, **run.moecache["totals"]}
            ),
        },
        "eval_library": {
            "name": "lm_eval",
            "version": str(versions.get("lm-eval") or run.facts.get("lm_eval_version", "unknown")),
        },
        "model_info": {
            "name": model,
            "id": model,
            **({"developer": developer} if is_on_hub else {}),
            "inference_engine": _texts(engine),
            "additional_details": _texts(settings),
        },
        "evaluation_results": [
            _result(run, task, score)
            for task in run.results
            for score in run.scores(task)
            if math.isfinite(score.value)
        ],
    }


def line(run: Run) -> str:
    """Return a run's document as one line of JSON."""
    return json.dumps(document(run), ensure_ascii=False, allow_nan=False) + "\n"


def file_name(run: Run) -> str:
    """Return `UUID.json`, as the datastore names files: the same for the same run."""
    digest = hashlib.sha256(document(run)["evaluation_id"].encode()).digest()
    return f"{UUID(bytes=digest[:16], version=4)}.json"


def _result(run: Run, task: str, score: Score) -> dict[str, Any]:
    metric: dict[str, Any] = {
        "metric_name": score.metric,
        "metric_parameters": {"filter": score.filter},
        "lower_is_better": not score.higher_is_better,
    }
    low, high = _BOUNDS.get(score.metric, (math.nan, math.nan))
    if low <= score.value <= high:
        metric |= {"score_type": "continuous", "min_score": low, "max_score": high}
    else:
        metric["additional_details"] = {"bounds_status": "unknown"}
    number, settings = run.results[task].get("sample_len"), identity(run, [task])
    uncertainty: dict[str, Any] = {"num_samples": number} if isinstance(number, int) else {}
    if score.stderr is not None and math.isfinite(score.stderr):
        uncertainty["standard_error"] = {"value": score.stderr}
    return {
        "evaluation_result_id": f"{task}/{score.key}",
        "evaluation_name": task,
        "source_data": {
            "dataset_name": task,
            "source_type": "other",
            **_texts({"source_version": settings.get("task_versions")}),
        },
        "metric_config": metric,
        "score_details": {
            "score": score.value,
            "details": _texts(run.moecache["tasks"].get(task, {})),
            "uncertainty": uncertainty,
        },
        "generation_config": {"additional_details": settings},
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text, as the schema asks; `ttft_ms.p50` of a mapping, nothing of None."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            texts |= {f"{name}.{key}": text for key, text in _texts(value).items()}
        elif value is not None:
            texts[name] = str(value)
    return texts


def _timestamp(run: Run) -> str:
    """Return when a run began, in seconds since 1970; its file's time where it does not say."""
    date = run.environment.get("date") or run.facts.get("date")
    with contextlib.suppress(ValueError, OverflowError):
        began = date if isinstance(date, float) else datetime.fromisoformat(str(date)).timestamp()
        return str(int(began))
    return str(int(run.path.stat().st_mtime))
