"""From the options of a training to its artifact: prompts, what the model writes, a predictor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lm_eval_moecache.harness.preflight import geometry_of
from lm_eval_moecache.model.checkpoint import load_model
from lm_eval_moecache.model.device import best_device
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.model.predictor.training import Trained, answers
from lm_eval_moecache.profiling._texts import Given, collect_prompts
from lm_eval_moecache.records.artifact import artifact_of, write_artifact
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.report.tables.text import rows_as_markdown


def train_artifact(
    given: Given, kind: str, recipe_type: Any, train: Callable[..., Trained]
) -> Report:
    """Train on what the model writes to the prompts, write the artifact, tell its tables.

    Those are the lists of rows in what `train` says of the training.
    """
    prompts, data = collect_prompts(given)
    trusted = {"trust_remote_code": bool(given["trust_remote_code"])}
    geometry_of(given["pretrained"], **trusted)  # says what cannot be read
    names = {field.name for field in dataclasses.fields(recipe_type)}
    recipe = recipe_type(**{name: value for name, value in given.items() if name in names})
    model, tokenizer = load_model(given["pretrained"], **trusted)
    model = model.to(best_device())
    layers = find_moe_layers(model)
    geometry = describe(model, layers, given["pretrained"])
    sizes = {"num_tokens": given["tokens"], "batch_size": given["prompts_per_batch"]}
    recorded = answers(model, tokenizer, layers, prompts, **sizes)
    arrays, training = train(recorded, model, layers, geometry, recipe)
    counts = {"tokens": given["tokens"], "prompts": len(prompts)}
    made_from = {**data, **dataclasses.asdict(recipe), **counts, **training}
    artifact = artifact_of(kind, geometry, router_digest(layers), made_from, arrays)
    write_artifact(given["out"], artifact)
    tables = {name: rows for name, rows in training.items() if isinstance(rows, list)}
    lines = [f"{given['out']}: share of the experts named rightly, on held-out prompts", ""]
    lines += [rows_as_markdown(rows) for rows in tables.values()]
    return Report({"out": given["out"], **tables}, "\n".join(lines))
