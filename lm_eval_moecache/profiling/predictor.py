"""Train CommitMoE's predictors of the next layer's experts (section 4.2) on what a model generates.

The prompts are documents that `--tasks` are trained on (never what they are tested on) or files:
`.jsonl` with a string or {"prompt": ...} a line, or plain text with a prompt a line. `tiny` has
its own generator's where neither is given.
"""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.learned.predictor import LOSSES
from lm_eval_moecache.profiling._texts import (
    Told,
    add_options,
    add_training_options,
    check_training,
)
from lm_eval_moecache.records.artifact import PREDICTOR
from lm_eval_moecache.records.numbers import unknown_name_error


def add_arguments(parser: ArgumentParser) -> None:
    defaults = {"limit": 1000, "tokens": 20, "batch_size": 32, "max_epochs": 30}
    add_training_options(parser, "predictor", learning_rate=5e-5, **defaults)
    add_options(
        parser,
        ("loss", "kl", "kl (eq. 4), or bce of the chosen experts"),
        ("halve_every", 5, "epochs until the learning rate is halved"),
    )


def run(arguments: Namespace) -> Told:
    """Record, train layer after layer, judge on the held-out prompts, write."""
    check_training(arguments, "halve_every")
    if arguments.loss not in LOSSES:
        raise unknown_name_error("loss", arguments.loss, LOSSES)
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.model.predictor.training import Recipe, train_layers
    from lm_eval_moecache.profiling._training import train_artifact

    return train_artifact(arguments, PREDICTOR, Recipe, train_layers)
