"""Train SiDA's data-aware network, which reads a text's tokens and predicts all layers' experts.

The prompts are those of `moecache profile predictor`: documents that `--tasks` are trained on
(never what they are tested on) or files; `tiny` has its own generator's where neither is given.
"""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import (
    Told,
    add_options,
    add_training_options,
    check_training,
)
from lm_eval_moecache.records.artifact import DATA_AWARE


def add_arguments(parser: ArgumentParser) -> None:
    defaults = {"limit": 200, "tokens": 40, "batch_size": 16, "max_epochs": 60}
    add_training_options(parser, "network", learning_rate=1e-3, **defaults)
    add_options(
        parser,
        ("width", 128, "of the network"),
        ("truncate", 30, "experts distilled per router"),
        ("hard_weight", 0.1, "of the chosen experts"),
    )


def run(arguments: Namespace) -> Told:
    """Record, train, judge on the held-out prompts, write."""
    check_training(arguments, "width", "truncate")
    if not arguments.hard_weight >= 0:
        raise ValueError(f"hard_weight={arguments.hard_weight} must be 0 or more.")
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.model.predictor.training import TextRecipe, train_on_texts
    from lm_eval_moecache.profiling._training import train_artifact

    return train_artifact(arguments, DATA_AWARE, TextRecipe, train_on_texts)
