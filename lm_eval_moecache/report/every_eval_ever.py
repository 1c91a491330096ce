"""Runs in the form of EvalEval's Every Eval Ever, schema 0.3.0: one JSON document a run, and one
JSON Lines file of its samples where lm-eval saved them.

Scores are typed results with direction, bounds, error and number of documents; settings and speed
go where the schema has texts by name. Same runs, same bytes.
See https://github.com/evaleval/every_eval_ever (`every_eval_ever/schemas/`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from lm_eval_moecache.records.files import TINY, lines_of, read_text
from lm_eval_moecache.report.runs.columns import FRAME_SETTINGS
from lm_eval_moecache.report.runs.run import Run, Score, identity

NAME = "every_eval_ever"
SCHEMA = "0.3.0"
LIBRARY = "lm-eval-moecache"
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
    engine = {"name": LIBRARY, "version": versions.get(LIBRARY)}
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
            "source_name": LIBRARY,
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
            "additional_details": {
                **_texts(settings),
                "deployment_type": "self_deployed",
                "model_availability": "open_weights" if is_on_hub or model == TINY else "unknown",
            },
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
    return _dumped(document(run))


def files(run: Run) -> dict[str, str]:
    """Return path -> text of a run's document, and of its samples where lm-eval saved them.

    Paths are those of the datastore: `data/lm-eval-moecache/DEVELOPER/MODEL/UUID.json` and
    `UUID_samples.jsonl` beside it. The same run has the same paths.
    """
    made = document(run)
    digest = hashlib.sha256(made["evaluation_id"].encode()).digest()
    developer, _, name = made["model_info"]["id"].rpartition("/")
    places = [re.sub(r"[^\w.+-]+", "_", part).strip("._") for part in (developer, name)]
    stem = "/".join(["data", LIBRARY, *(place or "unknown" for place in places)])
    stem += f"/{UUID(bytes=digest[:16], version=4)}"
    rows = [row for path in _samples_of(run) for row in _instances(run, made, path)]
    if not rows:
        return {f"{stem}.json": _dumped(made)}
    path = f"{stem}_samples.jsonl"
    made["detailed_evaluation_results"] = {
        "format": "jsonl",
        "file_path": path,
        "hash_algorithm": "sha256",
        "total_rows": len(rows),
    }
    return {f"{stem}.json": _dumped(made), path: "".join(map(_dumped, rows))}


def _dumped(value: Any) -> str:
    # ASCII: readers of lines take some of Unicode's marks for their ends.
    return json.dumps(value, allow_nan=False) + "\n"


def _samples_of(run: Run) -> list[Path]:
    """Return the samples files that lm-eval wrote with this results file."""
    date = run.path.stem.removeprefix("results_")
    return sorted(run.path.parent.glob(f"samples_*_{date}.jsonl")) if date != run.path.stem else []


def _instances(run: Run, made: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample and metric of right answers, with the times of its request.

    Times are those of the run's clock and device, which `additional_details` name.
    """
    date = run.path.stem.removeprefix("results_")
    task = path.stem.removeprefix("samples_").removesuffix(f"_{date}")
    device = {"clock": run.moecache["clock"], "hardware": run.moecache["hardware"]["name"]}
    for row in map(json.loads, lines_of(read_text(path, repr(str(path))))):
        asked = [call["arg_0"] for call in row["arguments"].values()]
        is_choice, speed = len(asked) > 1, row.get("speed", {})
        choices = [str(call.get("arg_1")) for call in row["arguments"].values()]
        answers = row["resps"] if is_choice else row["resps"][0]
        extracted = row["filtered_resps"] if is_choice else row["filtered_resps"][0]
        reference = str(row["target"])
        whole, first = speed.get("e2el_ms"), speed.get("ttft_ms")
        times = {
            "latency_ms": whole,
            "time_to_first_token_ms": first,
            "generation_time_ms": None if None in (whole, first) else whole - first,
        }
        for metric in (name for name in row["metrics"] if _BOUNDS.get(name) == (0.0, 1.0)):
            yield {
                "schema_version": SCHEMA,
                "evaluation_id": made["evaluation_id"],
                "model_id": made["model_info"]["id"],
                "evaluation_name": task,
                "evaluation_result_id": f"{task}/{metric},{row['filter']}",
                "sample_id": str(row["doc_id"]),
                "sample_hash": hashlib.sha256((asked[0] + reference).encode()).hexdigest(),
                "interaction_type": "single_turn",
                "input": {
                    "raw": asked[0],
                    "reference": [reference],
                    **({"choices": choices} if is_choice else {}),
                },
                "output": {"raw": [a if isinstance(a, str) else json.dumps(a) for a in answers]},
                "answer_attribution": [
                    {
                        "turn_idx": 0,
                        "source": "output.raw",
                        "extracted_value": str(extracted),
                        "extraction_method": row["filter"],
                        "is_terminal": True,
                    }
                ],
                "evaluation": {"score": float(row[metric]), "is_correct": row[metric] == 1},
                "performance": {
                    **{name: time for name, time in times.items() if time is not None},
                    "additional_details": _texts({**device, **speed}),
                },
            }


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
