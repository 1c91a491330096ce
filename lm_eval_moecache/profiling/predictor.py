"""Train CommitMoE's predictors of the next layer's experts (section 4.2) on what a model generates.

The prompts are documents that `--tasks` are trained on (never what they are tested on) or files:
`.jsonl` with a string or {"prompt": ...} a line, or plain text with a prompt a line. `tiny` has
its own generator's where neither is given. If interrupted, the same command resumes.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import (
    add_options,
    add_training_options,
    check_training,
    collect_prompts,
    say,
)
from lm_eval_moecache.records.artifact import write_artifact
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.predictor import LOSSES


def add_arguments(parser: ArgumentParser) -> None:
    defaults = {"limit": 1000, "tokens": 20, "batch_size": 32, "max_epochs": 30}
    add_training_options(parser, "predictor", learning_rate=5e-5, **defaults)
    add_options(
        parser,
        ("loss", "kl", "kl (eq. 4), or bce of the chosen experts"),
        ("halve_every", 5, "epochs until the learning rate is halved"),
        ("work", None, "folder for temporary files"),
    )


def run(arguments: Namespace) -> int:
    """Record, train layer after layer, judge on the held-out prompts, write."""
    check_training(arguments, "halve_every")
    if arguments.loss not in LOSSES:
        raise unknown_name_error("loss", arguments.loss, LOSSES)
    prompts, data = collect_prompts(arguments)
    # Imported late: they bring torch, and a wrong option should not wait for it.
    from lm_eval_moecache.harness.preflight import geometry_of
    from lm_eval_moecache.model.predictor.training import Recipe, make
    from lm_eval_moecache.report.tables.text import rows_as_markdown

    trusted = {"trust_remote_code": arguments.trust_remote_code}
    geometry_of(arguments.pretrained, **trusted)  # says what cannot be read
    recipe = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Recipe)}
    work = Path(arguments.work or Path(arguments.out).with_suffix(".work"))
    artifact = make(
        arguments.pretrained,
        prompts,
        work,
        data,
        num_tokens=arguments.tokens,
        prompts_per_batch=arguments.prompts_per_batch,
        recipe=Recipe(**recipe),
        **trusted,
    )
    write_artifact(arguments.out, artifact)
    if arguments.work is None:
        shutil.rmtree(work)
    tables = {name: artifact.made_from[name] for name in ("layers", "certainty")}
    lines = [f"{arguments.out}: share of the experts named rightly, on held-out prompts", ""]
    lines += [rows_as_markdown(tables["layers"])]
    lines += [rows_as_markdown(tables["certainty"]).rstrip("\n")]
    return say({"out": arguments.out, **tables}, lines, arguments.json)
